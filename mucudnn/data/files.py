"""Read published files, with errors that locate the damage.

Every message has one form: the file, the byte, what was expected there and what was
found.
"""

import contextlib
import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mucudnn.errors import DataError
from mucudnn.files import check_file, read_whole

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

    A packed file may expand a thousand times, so unpacking stops soon beyond `most`,
    the maximum size of the contents.
    """
    with readable(path):
        if path.suffix != ".gz":
            return read_whole(path, most=most if isinstance(most, int) else None)
        check_file(path)
        contents = bytearray()
        try:
            with gzip.open(path) as file:
                while part := file.read(_CHUNK):
                    contents += part
                    size = most(bytes(contents[:_HEAD])) if callable(most) else most
                    if size is not None and len(contents) > size:
                        break
        except (EOFError, gzip.BadGzipFile, zlib.error) as e:
            raise data_error(path, 0, "an undamaged gzip file", str(e)) from e
    if isinstance(most, int) and len(contents) > most:
        raise DataError(f"{path}: it has more than the {most:,} bytes expected")
    return bytes(contents)


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
