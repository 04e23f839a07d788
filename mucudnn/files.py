"""Reading and writing files whole: all of it or nothing, and only what is a file.

A file that is written appears complete, in place of the one before: whatever ends the
writing, a full disk or a kill, the old one is as it was and nothing lies beside it. So
that a rename replaces no more than a file's contents, links are followed to what they
name, owner and permissions stay, and a directory, device, FIFO or socket is refused.
Another hard link to the old file keeps the old contents.

Open descriptors that have names (`/dev/stdout`, `/dev/fd/3`) are streams: there is
nothing to replace, and they are written to plainly.
"""

import contextlib
import errno
import io
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "check_file",
    "check_writable",
    "descriptor_of",
    "flush_folder",
    "read_whole",
    "write_whole",
]

Filler = Callable[[BinaryIO], object]

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}
_MOST_LINKS = 40
_LONGEST = 40  # characters of a name that its draft's name repeats
_NEW = 0o666  # what the umask leaves of it
_PERMISSIONS = 0o777


def write_whole(path: Path | str, contents: bytes | Filler) -> None:
    """Write a file, or leave it as it was.

    Args:
        path: Where; a link is followed.
        contents: The bytes, or what writes them to a file that can be read and sought
            as well.

    Raises:
        OSError: It cannot be written, or is no file; `strerror` says why.
    """
    fill = contents if callable(contents) else _writer(contents)
    number = descriptor_of(path)
    if number is not None:
        _write_plainly(number, fill)
        return
    target, found = _target(path)
    draft: Path | None = None
    try:
        with _draft(target) as (file, draft):
            fill(file)
            file.flush()
            _become(file.fileno(), found)
            os.fsync(file.fileno())
            draft = draft or _named(file, target)
        draft.replace(target)
    except BaseException:
        if draft is not None:
            with contextlib.suppress(OSError):
                draft.unlink()
        raise


def check_writable(path: Path | str) -> None:
    """Raise the `OSError` that `write_whole` would; nothing is changed."""
    number = descriptor_of(path)
    if number is not None:
        os.fstat(number)
        return
    target, _ = _target(path)
    with _draft(target) as (_, name):
        pass
    if name is not None:
        name.unlink()


def read_whole(
    path: Path | str, *, most: int | None = None, streams: bool = False
) -> bytes:
    """The contents of a file.

    Args:
        path: Which.
        most: Bytes it may have.
        streams: Whether it may be an open descriptor's name, which is read but once.

    Raises:
        OSError: It cannot be read, is no file, or is too large; `strerror` says why.
    """
    if not (streams and descriptor_of(path) is not None):
        check_file(path)
    with _named_well(path), Path(path).open("rb") as file:
        contents = file.read(-1 if most is None else most + 1)
    if most is not None and len(contents) > most:
        raise OSError(errno.EFBIG, f"it has more than the {most:,} bytes expected")
    return contents


def check_file(path: Path | str) -> None:
    """Raise an `OSError` unless there is a file: reading a FIFO may never end."""
    with _named_well(path):
        _refuse_others(Path(path).stat())


def descriptor_of(path: Path | str) -> int | None:
    """The open descriptor that a path is a name of, or links to such a name."""
    ours = re.compile(rf"/dev/fd|/proc/{os.getpid()}(/task/\d+)?/fd")
    at = Path(path)
    with contextlib.suppress(OSError, ValueError):
        for _ in range(_MOST_LINKS):
            folder = os.path.realpath(at.parent)
            if at.name.isdecimal() and ours.fullmatch(folder):
                return int(at.name)
            at = Path(folder, at.readlink())
    return None


def _writer(contents: bytes) -> Filler:
    return lambda file: file.write(contents)


def _write_plainly(number: int, fill: Filler) -> None:
    contents = io.BytesIO()
    fill(contents)
    with os.fdopen(os.dup(number), "wb") as stream:
        stream.write(contents.getbuffer())


def _target(path: Path | str) -> tuple[Path, os.stat_result | None]:
    """Where a file really is, and what is known of the one there."""
    with _named_well(path):
        target = Path(os.path.realpath(path))
        try:
            found = Path(path).stat()
        except FileNotFoundError:
            if os.fspath(path).endswith(os.sep):
                raise OSError(errno.EISDIR, "it is the name of a directory") from None
            target.parent.stat()
            return target, None
    _refuse_others(found)
    os.close(os.open(target, os.O_WRONLY))  # one that is write-protected stays
    return target, found


def _refuse_others(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file")


@contextlib.contextmanager
def _named_well(path: Path | str) -> Iterator[None]:
    """Within it a name that no file can have is an `OSError`."""
    try:
        yield
    except ValueError as e:
        raise OSError(errno.EINVAL, f"no file can be called {path!r}: {e}") from e


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[tuple[BinaryIO, Path | None]]:
    """A new file in the target's folder, and its name if it needs one.

    Where the system can, it has none as yet: then a kill leaves nothing.
    """
    name: Path | None = None
    if sys.platform == "linux":
        try:
            number = os.open(target.parent, os.O_TMPFILE | os.O_RDWR, _NEW)
        except OSError:  # not every file system has them
            number, name = _open_named(target)
    else:
        number, name = _open_named(target)
    with os.fdopen(number, "w+b") as file:
        yield file, name


def _open_named(target: Path) -> tuple[int, Path]:
    name = _draft_name(target)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return os.open(name, flags, _NEW), name


def _draft_name(target: Path) -> Path:
    word = target.name[:_LONGEST]
    return target.with_name(f".{word}.{secrets.token_hex(6)}.partial")


def _named(file: BinaryIO, target: Path) -> Path:
    """Give a file without a name the one that a draft would have."""
    name = _draft_name(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        # the folder's descriptor makes this linkat, which alone can follow /proc
        source = f"/proc/self/fd/{file.fileno()}"
        os.link(source, name.name, dst_dir_fd=folder, follow_symlinks=True)
    except OSError:
        return _copied(file, target)
    finally:
        os.close(folder)
    return name


def _copied(file: BinaryIO, target: Path) -> Path:
    number, name = _open_named(target)
    try:
        with os.fdopen(number, "w+b") as copy:
            file.seek(0)
            shutil.copyfileobj(file, copy)
            copy.flush()
            _become(copy.fileno(), os.fstat(file.fileno()))
            os.fsync(copy.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            name.unlink()
        raise
    return name


def _become(number: int, old: os.stat_result | None) -> None:
    """Owner and permissions of the file before, as far as they may be given."""
    if old is None or sys.platform == "win32":
        return
    with contextlib.suppress(PermissionError):
        os.fchown(number, -1, old.st_gid)
    with contextlib.suppress(PermissionError):
        os.fchown(number, old.st_uid, -1)
    os.fchmod(number, old.st_mode & _PERMISSIONS)


def flush_folder(folder: Path) -> None:
    """Let names survive a power cut, too; not every system has that."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
