"""Read and write files atomically, and regular files only.

A written file replaces the old one only when it is complete: whatever ends the writing,
the old file is unchanged; only a kill leaves a draft, `.NAME.….partial`. The
replacement acts like writing in place: links are followed, owner and permissions are
preserved, and directories, devices, FIFOs and sockets are refused. Another hard link to
the old file keeps the old contents.

Paths of open descriptors (`/dev/stdout`, `/dev/fd/3`) are streams: they are written
directly.
"""

import contextlib
import errno
import io
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

Filler = Callable[[BinaryIO], object]

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}
_MOST_LINKS = 40
_LONGEST = 40  # characters of the target's name in the draft's name
_NEW = 0o666  # before the umask
_PERMISSIONS = 0o777


def write_whole(path: Path | str, contents: bytes | Filler) -> None:
    """Write a file atomically.

    Args:
        path: Path of the file; links are followed.
        contents: The bytes, or a function that writes them to a seekable binary file.

    Raises:
        OSError: The file cannot be written or is not a regular file; see `strerror`.
    """
    fill = contents if callable(contents) else lambda file: file.write(contents)
    number = descriptor_of(path)
    if number is not None:
        whole = io.BytesIO()  # `fill` may seek, which a stream cannot
        fill(whole)
        with os.fdopen(os.dup(number), "wb") as stream:
            stream.write(whole.getbuffer())
        return
    target, found = _resolve_target(path)
    number, draft = _open_draft(target)
    try:
        with os.fdopen(number, "w+b") as file:
            fill(file)
            file.flush()
            _copy_ownership(file.fileno(), found)
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def check_writable(path: Path | str) -> None:
    """Raise the `OSError` that `write_whole` would; change nothing."""
    number = descriptor_of(path)
    if number is not None:
        os.fstat(number)
        return
    target, _ = _resolve_target(path)
    # Only the file system knows whether a file can be created: try it.
    number, draft = _open_draft(target)
    os.close(number)
    draft.unlink()


def read_whole(
    path: Path | str, *, most: int | None = None, streams: bool = False
) -> bytes:
    """Return the contents of a file.

    Args:
        path: Path of the file.
        most: Maximum size in bytes.
        streams: Whether the path may name an open descriptor, which is read once.

    Raises:
        OSError: The file is missing, not regular, or too large; see `strerror`.
    """
    if not (streams and descriptor_of(path) is not None):
        check_file(path)
    with _check_name(path), Path(path).open("rb") as file:
        contents = file.read(-1 if most is None else most + 1)
    if most is not None and len(contents) > most:
        raise OSError(errno.EFBIG, f"it has more than the {most:,} bytes expected")
    return contents


def check_file(path: Path | str) -> None:
    """Raise an `OSError` unless the file is regular: reading a FIFO may block."""
    with _check_name(path):
        _refuse_others(Path(path).stat())


def descriptor_of(path: Path | str) -> int | None:
    """Return the open descriptor that a path names or links to, or None."""
    ours = re.compile(rf"/dev/fd|/proc/{os.getpid()}(/task/\d+)?/fd")
    at = Path(path)
    with contextlib.suppress(OSError, ValueError):
        for _ in range(_MOST_LINKS):
            folder = os.path.realpath(at.parent)
            if at.name.isdecimal() and ours.fullmatch(folder):
                return int(at.name)
            at = Path(folder, at.readlink())
    return None


def _resolve_target(path: Path | str) -> tuple[Path, os.stat_result | None]:
    """Return the file behind all links, and its status if it exists."""
    with _check_name(path):
        target = Path(os.path.realpath(path))
        try:
            found = Path(path).stat()
        except FileNotFoundError:
            if os.fspath(path).endswith(os.sep):
                raise OSError(errno.EISDIR, "it is the name of a directory") from None
            target.parent.stat()
            return target, None
    _refuse_others(found)
    os.close(os.open(target, os.O_WRONLY))  # refuse a write-protected file
    return target, found


def _refuse_others(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file")


@contextlib.contextmanager
def _check_name(path: Path | str) -> Iterator[None]:
    """Turn the `ValueError` of an invalid file name into an `OSError`."""
    try:
        yield
    except ValueError as e:
        raise OSError(errno.EINVAL, f"no file can be called {path!r}: {e}") from e


def _open_draft(target: Path) -> tuple[int, Path]:
    """Open a new file in the target's folder; return its descriptor and its name."""
    name = f".{target.name[:_LONGEST]}.{secrets.token_hex(6)}.partial"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    draft = target.with_name(name)
    return os.open(draft, flags, _NEW), draft


def _copy_ownership(number: int, old: os.stat_result | None) -> None:
    """Copy owner and permissions of the old file as far as permitted."""
    if old is None or sys.platform == "win32":
        return
    with contextlib.suppress(PermissionError):
        os.fchown(number, -1, old.st_gid)
    with contextlib.suppress(PermissionError):
        os.fchown(number, old.st_uid, -1)
    os.fchmod(number, old.st_mode & _PERMISSIONS)


def flush_folder(folder: Path) -> None:
    """Make renames in a folder durable where the system supports it."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
