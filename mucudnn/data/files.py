"""Read published files, with errors that locate the damage.

Every message has one form: the file, the byte, what was expected there and what was
found.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mucudnn.errors import DataError
from mucudnn.files import read_whole

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_CHUNK = 1 << 16
_HEAD = 256
"""Bytes of a file's beginning that are passed to `Size` functions."""
_SHOWN = 200

Size = int | Callable[[bytes], int | None] | None
"""Maximum bytes of a file, or a function of its first bytes; None is unlimited."""


def data_error(path: Path, offset: int, expected: str, found: str) -> DataError:
    """Return the error for unexpected contents of a file."""
    return DataError(f"{path}, byte {offset}: expected {expected}, found {found}")


def find_file(folder: Path, names: tuple[str, ...]) -> Path:
    """Return the first of `names` that `folder` has; `DataError` without any."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    found = "no such folder" if not folder.is_dir() else "none of them"
    raise DataError(f"{folder}: expected one of {', '.join(names)}, found {found}")


def shown(value: object) -> str:
    """Return the text of a value for a message, cut to a limited length."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # numbers of many digits, lists of great depth
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Convert an `OSError` within the block to a `DataError` that names the path."""
    try:
        yield
    except OSError as e:
        raise DataError(f"{path}: {e.strerror or e}") from e


def read_file(path: Path, most: Size = None) -> bytes:
    """Return the contents of a file, unpacked if its name ends in `.gz`.

    A packed file may expand a thousand times, so unpacking stops one byte beyond
    `most`, the maximum size of the contents.
    """
    packed = path.suffix == ".gz"
    known = None if packed or not isinstance(most, int) else most
    with readable(path):
        raw = read_whole(path, most=known)
    if not packed:
        return raw
    contents = _gunzip(path, raw, most)
    if isinstance(most, int) and len(contents) > most:
        raise DataError(f"{path}: it has more than the {most:,} bytes expected")
    return contents


def _gunzip(path: Path, raw: bytes, most: Size) -> bytes:
    """Unpack all members of a gzip file.

    `zlib` instead of `gzip`, which does not report where a stream is damaged; offsets
    are those of the packed bytes.
    """
    contents = bytearray()
    begin = 0
    while begin < len(raw) or not begin:
        if raw[begin : begin + 2] != _GZIP_MAGIC:
            if begin and not raw[begin:].strip(b"\0"):
                break  # tapes and block devices pad with zeros
            found = raw[begin : begin + 2].hex(" ") or "the end of the file"
            raise data_error(path, begin, "a gzip stream (1f 8b)", found)
        begin = _gunzip_member(path, raw, begin, contents, most)
        if _enough(contents, most):
            break
    return bytes(contents)


def _gunzip_member(
    path: Path, raw: bytes, begin: int, contents: bytearray, most: Size
) -> int:
    """Append one member's contents; return the offset of the next member."""
    unpack = zlib.decompressobj(_GZIP_WINDOW)
    for at in range(begin, len(raw), _CHUNK):
        packed, part = raw[at : at + _CHUNK], b""
        # Output is limited as well: few packed bytes may contain very many.
        while not unpack.eof and (packed or len(part) == _CHUNK):
            try:
                part = unpack.decompress(packed, _CHUNK)
            except zlib.error as e:
                found = f"{e} (within {_CHUNK} bytes)"
                raise data_error(path, at, "an undamaged gzip stream", found) from e
            contents += part
            if _enough(contents, most):
                return len(raw)
            packed = unpack.unconsumed_tail
        # Another member may follow in the rest of this chunk.
        if unpack.eof:
            return min(at + _CHUNK, len(raw)) - len(unpack.unused_data)
    raise data_error(path, len(raw), "more of a gzip stream", "the end of the file")


def _enough(contents: bytearray, most: Size) -> bool:
    """Return whether there are more bytes than allowed."""
    if callable(most):
        most = most(bytes(contents[:_HEAD]))
    return most is not None and len(contents) > most


def check_length(path: Path, found: int, expected: int, what: str) -> None:
    """Raise `DataError` where a file's contents are too short or too long."""
    whole = f"{expected} bytes ({what})"
    if found < expected:
        raise data_error(path, found, whole, f"{expected - found} fewer")
    if found > expected:
        raise data_error(
            path, expected, f"the end after {whole}", f"{found - expected} more"
        )


def check_labels(
    path: Path, labels: NDArray[Any], classes: int, first: int, stride: int
) -> None:
    """Raise `DataError` where a label, one of (n,), is out of range.

    The `first` label is at that byte of the file, each other one `stride` bytes later.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        index = int(wrong[0])
        expected = f"a label from 0 to {classes - 1}"
        found = f"{labels[index]} (image {index})"
        raise data_error(path, first + index * stride, expected, found)
