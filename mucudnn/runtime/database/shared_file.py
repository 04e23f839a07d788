"""Locks for a database file that several processes open, and may have to rename.

SQLite finds a write-ahead log by its name: a renamed database that is still open would
use, and remove, the log of the new one. So a file is only set aside while no other
process has it open, and the folder is locked while a file is opened or set aside.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mucudnn.files import check_file

if sys.platform != "win32":
    import fcntl

__all__ = ["SIDECARS", "check_names", "folder_lock", "inode", "lock_alone"]

SIDECARS = ("-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite keeps beside a database."""

_SHARED_LOCK = (510, 0x40000002)  # length and offset of SQLite's lock on an open file
_LOCK_TIMEOUT_S = 5.0


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, under which databases in it are opened and renamed.

    A folder that cannot be locked, or stays locked for seconds, is used without: the
    conflict that the lock prevents is rare. Windows needs no lock, as it refuses to
    rename a file in use.
    """
    with contextlib.ExitStack() as stack:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                _lock_folder(descriptor)
        yield


def _lock_folder(descriptor: int) -> None:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.001)
        else:
            return


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
