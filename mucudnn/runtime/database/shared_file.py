"""A database file that processes share: whose turn it is, and who has it open.

SQLite finds a write-ahead log by its name, so a renamed database that is still open
would take, and remove, the log of the new one. Hence nothing is set aside while another
process has it open, and opening and setting aside take turns: the folder is locked.
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

__all__ = ["SIDECARS", "check_names", "inode", "lock_alone", "turn"]

SIDECARS = ("-wal", "-shm", "-journal")
"""What the names of the files beside a database end in."""

_SHARED_LOCK = (510, 0x40000002)  # length and offset that SQLite locks while open
_TURN_S = 5.0


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Wait until no other process opens or renames a database in this folder.

    A folder that cannot be locked, or that someone else keeps locked, is not waited
    for: what the lock prevents is rare. Windows needs none, it refuses to rename a file
    in use.
    """
    with contextlib.ExitStack() as stack:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                _lock_folder(descriptor)
        yield


def _lock_folder(descriptor: int) -> None:
    deadline = time.monotonic() + _TURN_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.001)
        else:
            return


def inode(file: Path) -> int:
    """Which file has this name just now; 0 if none has."""
    try:
        return file.stat().st_ino
    except FileNotFoundError:
        return 0


def lock_alone(descriptor: int) -> bool:
    """Whether no other process has this database open; lasts until it is closed."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, *_SHARED_LOCK)
    except OSError:
        return False
    return True


def check_names(file: Path) -> None:
    """Raise an `OSError` unless what has the names of a database are files."""
    for name in (file, *(Path(f"{file}{suffix}") for suffix in SIDECARS)):
        with contextlib.suppress(FileNotFoundError):
            check_file(name)
