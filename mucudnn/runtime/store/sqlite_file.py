"""The SQLite file of the store: opening, locking, sharing, recovery.

A cache must never stop the work. A file that is damaged or foreign is set aside under
another name, never deleted, and a new one starts with the entries that were salvaged.
A file of a newer version of mucudnn is left alone, and memory is used instead. A file
that cannot be written is left alone, too; rows that can be read are copied to memory.
Each case issues one warning, and the caller sees an ordinary result.
"""

import contextlib
import logging
import os
import sqlite3
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mucudnn.files import check_file
from mucudnn.processes import PerProcess, on_fork
from mucudnn.runtime.store import tables

logger = logging.getLogger(__name__)

T = TypeVar("T")

IN_MEMORY_ONLY = "measurements and plans are stored in memory only, as "
"""Prefix of the warnings that a file is not used."""

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_READING = (sqlite3.DatabaseError, UnicodeDecodeError)

_PRIMARY = 0xFF  # the other bits of an SQLite error code say where it happened

_ATTEMPTS = 6

_FORK_S = 5.0


class CacheWarning(UserWarning):
    """The cache file was damaged or unusable: it was replaced, or memory is used."""


class RecordFile:
    """One connection to a database (a file or memory), shared by threads."""

    def __init__(self, path: Path | None, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = PerProcess(threading.RLock)
        self._pid = os.getpid()
        self._inherited: list[sqlite3.Connection] = []
        self._at_work = False
        self._at_rest = False  # closed for a fork, to be opened by the next operation
        self._closed = False
        self._held: list[Any] = []  # locks, while the process forks
        self._inode = 0
        self._path: Path | None = None
        self._db = tables.in_memory()
        on_fork(self)
        if path is None:
            return
        try:
            self._path = path.expanduser().resolve()
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError, ValueError) as e:
            self._path = None
            warn(f"{IN_MEMORY_ONLY}{path} cannot be used: {e}")
        else:
            with self._lock.value:
                self._open(self._path)

    @property
    def path(self) -> Path | None:
        """Path of the file in use; None for memory."""
        return self._path

    def do(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """Run an operation, and again if the file had to be replaced.

        The operation is one read or one `transaction`, so that nothing is done twice.
        """
        with self._lock.value:
            self._notice_fork()
            if self._at_rest and self._path is not None:
                self._at_rest = False
                self._open(self._path)
            while True:
                try:
                    self._at_work = True
                    return operation(self._db)
                # A DatabaseError, too, but a mistake of the caller, not of the file.
                except sqlite3.ProgrammingError:
                    raise
                except (sqlite3.DatabaseError, UnicodeDecodeError) as e:
                    if self._path is None:
                        raise
                    if _is_damage(e):
                        self._db.close()
                        self._open(self._path, found=e)
                    else:
                        self._fall_back(self._path, e)
                finally:
                    self._at_work = False

    def close(self) -> None:
        """Close the connection; closing twice is allowed."""
        with self._lock.value:
            self._notice_fork()
            self._at_rest, self._closed = False, True
            self._db.close()

    def before_fork(self) -> None:
        """Close the file, as a child must not inherit SQLite's locks and state."""
        lock = self._lock.value
        # Wait for a thread in an operation, but only seconds: that thread may itself be
        # waiting for another process.
        if not lock.acquire(timeout=_FORK_S):
            return
        self._notice_fork()
        self._held.append(lock)
        if self._path is not None and not (self._at_work or self._closed):
            self._db.close()
            self._at_rest = True

    def after_fork(self, *, child: bool) -> None:
        """Release the lock in the parent; a child makes a new lock."""
        if self._held and not child:
            self._held.pop().release()

    def __del__(self) -> None:
        if self._pid == os.getpid():
            self._db.close()

    def _notice_fork(self) -> None:
        """Open a new connection in a forked process, as SQLite demands."""
        if self._pid == os.getpid():
            return
        rested = bool(self._held)
        self._pid, self._held, self._at_work = os.getpid(), [], False
        if self._at_rest or self._closed or (rested and self._path is None):
            return
        # Kept without being closed: closing it here would act on the parent's files.
        self._inherited.append(self._db)
        self._db = tables.in_memory()
        self._at_rest = self._path is not None and not self._closed

    def _open(self, file: Path, found: Exception | None = None) -> None:
        """Connect to the file; an unusable file of that name is set aside.

        `found` is damage that was already found in the file.
        """
        problem = found
        for attempt in range(_ATTEMPTS):
            try:
                with folder_lock(file.parent):
                    aside = self._set_aside(file, problem) if problem else file
                    db = self._connect(file) if aside else None
                    if problem and db and aside and aside != file:
                        self._salvage_from(file, aside, db, problem)
            except (*_READING, tables.UnusableError, tables.NewerError, OSError) as e:
                problem = e
                if not _is_damage(e):
                    break
            else:
                if db is not None:
                    self._db.close()
                    self._db = db
                    return
                # Another process has the damaged file open: try again, each time later.
                time.sleep(0.01 * 2**attempt)
        self._fall_back(file, problem)

    def _connect(self, file: Path) -> sqlite3.Connection:
        check_names(file)
        self._inode = inode(file)
        db = sqlite3.connect(
            file, timeout=self._timeout_s, isolation_level=None, check_same_thread=False
        )
        try:
            empty = tables.is_empty(db)
            # A read-only folder cannot hold a write-ahead log, but the rows can be
            # read.
            with contextlib.suppress(sqlite3.OperationalError):
                db.execute("PRAGMA journal_mode = WAL")
            if empty:
                with transaction(db):
                    if tables.is_empty(db):
                        tables.create(db)
            tables.check_table(db)
            if not empty:
                tables.check_contents(db)
            # A power cut may lose the last rows, which are measured again, but not the
            # file.
            db.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            db.close()
            raise
        return db

    def _set_aside(self, file: Path, problem: Exception) -> Path | None:
        """Rename the database and its side files.

        Returns the new name, `file` itself where another process has renamed it
        already, or None if another process uses it.
        """
        if inode(file) != self._inode:
            return file
        with file.open("r+b") as opened:
            if not lock_alone(opened.fileno()):
                return None
            # It may have been renamed before the lock was taken.
            if inode(file) != self._inode:
                return file
            kind = "foreign" if isinstance(problem, tables.ForeignError) else "corrupt"
            stamp = time.strftime("%Y%m%d-%H%M%S")
            aside, number = Path(f"{file}.{kind}-{stamp}"), 0
            while aside.exists():
                number += 1
                aside = Path(f"{file}.{kind}-{stamp}-{number}")
            # Side files first: beside a new database they would be taken for its own.
            for sidecar in SIDECARS:
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{file}{sidecar}").rename(f"{aside}{sidecar}")
            file.rename(aside)
        return aside

    def _salvage_from(
        self, file: Path, aside: Path, db: sqlite3.Connection, problem: Exception
    ) -> None:
        """Copy the sound entries of a file that was set aside, if its table is ours."""
        # Without a write-ahead log the file is complete, and needs no side files.
        whole = not Path(f"{aside}-wal").exists()
        count = _copy_entries(aside, db, "immutable=1" if whole else "mode=ro")
        words = "none of its entries can be read"
        if count is not None:
            words = f"{count} of its entries are kept"
        warn(
            f"starting a new {file}; the previous file is now {aside}: {problem}; "
            f"{words}"
        )

    def _fall_back(self, file: Path, problem: Exception | None) -> None:
        """Switch to memory, with the entries that can be read from the file."""
        memory = tables.in_memory()
        if not _is_damage(problem):
            with contextlib.suppress(OSError):
                check_names(file)
                # A database in a read-only folder may only be readable as immutable.
                _copy_entries(file, memory, "mode=ro", "immutable=1")
        self._db.close()
        self._db, self._path = memory, None
        why = problem.strerror if isinstance(problem, OSError) else None
        warn(f"{IN_MEMORY_ONLY}{file} cannot be used: {why or problem}")


def _copy_entries(file: Path, target: sqlite3.Connection, *ways: str) -> int | None:
    """Copy the sound entries of a file that opens in one of some ways; count them."""
    for access in ways:
        uri = f"{file.as_uri()}?{access}"
        try:
            with (
                contextlib.closing(sqlite3.connect(uri, 1.0, uri=True)) as source,
                transaction(target),
            ):
                if tables.is_empty(source):
                    return None
                tables.check_table(source)
                return tables.salvage(source, target)
        except (*_READING, tables.UnusableError, tables.NewerError) as e:
            logger.debug("%s cannot be read with %s: %s", file, access, e)
    return None


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run statements in one transaction; waits for the write lock first."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _is_damage(error: Exception | None) -> bool:
    """Return whether the contents are at fault, not the disk or the permissions."""
    # The `sqlite3` module reports text that is not UTF-8 without an error code, or, in
    # the name of a column, by Python's own error.
    if isinstance(error, UnicodeDecodeError):
        return True
    if not isinstance(error, sqlite3.DatabaseError):
        return isinstance(error, tables.UnusableError)
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return code is None or code & _PRIMARY in _DAMAGED


def warn(message: str, stacklevel: int = 4) -> None:
    """Log a message, and issue it as a `CacheWarning` `stacklevel` frames above."""
    # Names of files that are not UTF-8 contain surrogates, which logs cannot write.
    message = message.encode(errors="backslashreplace").decode()
    logger.warning(message)
    warnings.warn(message, CacheWarning, stacklevel=stacklevel)


# Locks for a database file that several processes open, and may have to rename.
#
# SQLite finds a write-ahead log by its name: a renamed database that is still open
# would use, and remove, the log of the new one. So a file is only set aside while no
# other process has it open, and the folder is locked while a file is opened or set
# aside.


if sys.platform != "win32":
    import fcntl

SIDECARS = ("-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite keeps beside a database."""

_SHARED_LOCK = (510, 0x40000002)  # length and offset of SQLite's lock on an open file

_LOCK_TIMEOUT_S = 5.0


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, under which databases in it are opened and renamed."""
    # A folder that cannot be locked, or stays locked for seconds, is used without: the
    # conflict that the lock prevents is rare. Windows needs no lock, as it refuses to
    # rename a file in use.
    with contextlib.ExitStack() as stack:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                deadline = time.monotonic() + _LOCK_TIMEOUT_S
                while time.monotonic() < deadline:
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        time.sleep(0.001)
        yield


def inode(file: Path) -> int:
    """Return the inode number of the file of this name; 0 if there is none."""
    try:
        return file.stat().st_ino
    except FileNotFoundError:
        return 0


def lock_alone(descriptor: int) -> bool:
    """Try to lock a database exclusively; return whether that succeeded.

    It fails while another process has the database open. The lock lasts until the file
    is closed.
    """
    if sys.platform == "win32":
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, *_SHARED_LOCK)
    except OSError:
        return False
    return True


def check_names(file: Path) -> None:
    """Raise an `OSError` unless the database and its side files are regular files."""
    for name in (file, *(Path(f"{file}{suffix}") for suffix in SIDECARS)):
        with contextlib.suppress(FileNotFoundError):
            check_file(name)
