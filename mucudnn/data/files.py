"""Reading published files whole, and saying what is wrong with one.

Every complaint has one form: the file, the byte, what was expected there and what was
found.
"""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mucudnn.errors import DataError

__all__ = ["check_labels", "check_length", "fault", "find_file", "read_file"]

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_CHUNK = 1 << 16


def fault(path: Path, offset: int, expected: str, found: str) -> DataError:
    """The error for a file that is not what its name says."""
    return DataError(f"{path}, byte {offset}: expected {expected}, found {found}")


def find_file(folder: Path, names: tuple[str, ...]) -> Path:
    """The first of `names` that `folder` has.

    Raises:
        DataError: It has none of them.
    """
    for name in names:
        if (folder / name).is_file():
            return folder / name
    found = "no such folder" if not folder.is_dir() else "none of them"
    raise DataError(f"{folder}: expected one of {', '.join(names)}, found {found}")


def read_file(path: Path) -> bytes:
    """The contents of a file, unpacked where its name ends in `.gz`.

    Raises:
        DataError: It is missing, cannot be read or is damaged.
    """
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise DataError(f"{path}: {e.strerror or e}") from e
    return _gunzip(path, raw) if path.suffix == ".gz" else raw


def _gunzip(path: Path, raw: bytes) -> bytes:
    """Every member of a gzip file; offsets are those of the packed bytes.

    zlib rather than `gzip`, which does not say where a stream breaks.
    """
    parts = list[bytes]()
    begin = 0
    while begin < len(raw) or not parts:
        if raw[begin : begin + 2] != _GZIP_MAGIC:
            if parts and not raw[begin:].strip(b"\0"):
                break  # tapes and block devices pad with zeros
            found = raw[begin : begin + 2].hex(" ") or "the end of the file"
            raise fault(path, begin, "a gzip stream (1f 8b)", found)
        text, begin = _gunzip_member(path, raw, begin)
        parts.append(text)
    return b"".join(parts)


def _gunzip_member(path: Path, raw: bytes, begin: int) -> tuple[bytes, int]:
    """One member's contents and where the next begins."""
    unpack = zlib.decompressobj(_GZIP_WINDOW)
    parts = list[bytes]()
    for at in range(begin, len(raw), _CHUNK):
        try:
            parts.append(unpack.decompress(raw[at : at + _CHUNK]))
        except zlib.error as e:
            within = f"within {_CHUNK} bytes"
            raise fault(path, at, "an undamaged gzip stream", f"{e} ({within})") from e
        if unpack.eof:
            end = min(at + _CHUNK, len(raw)) - len(unpack.unused_data)
            return b"".join(parts), end
    raise fault(path, len(raw), "more of a gzip stream", "the end of the file")


def check_length(path: Path, found: int, expected: int, what: str) -> None:
    """Raise `DataError` where a file's contents are too short or too long."""
    if found < expected:
        raise fault(
            path, found, f"{expected} bytes ({what})", f"{expected - found} fewer"
        )
    if found > expected:
        raise fault(
            path,
            expected,
            f"the end after {expected} bytes ({what})",
            f"{found - expected} more",
        )


def check_labels(
    path: Path, labels: NDArray[Any], classes: int, first: int, stride: int
) -> None:
    """Raise `DataError` where a label is no class.

    Args:
        path: The file.
        labels: What it holds, (n,).
        classes: How many classes there are.
        first: The offset of the first label in bytes.
        stride: Bytes from one label to the next.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        index = int(wrong[0])
        raise fault(
            path,
            first + index * stride,
            f"a label from 0 to {classes - 1}",
            f"{labels[index]} (image {index})",
        )
