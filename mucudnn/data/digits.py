"""The 1797 handwritten digits that come with scikit-learn; no download needed.

8 x 8 pixels from 0 to 16, ten classes. The file is read from the installed package
without importing scikit-learn.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI
Machine Learning Repository, 1998 (its test part).
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from mucudnn.data.arrays import ArrayDataset
from mucudnn.data.dataset import Dataset, Split, Subset, checked_split, split_indices
from mucudnn.data.files import fault, read_file
from mucudnn.errors import DataError

__all__ = ["open_digits"]

_CLASSES = 10
_SIDE = 8
_WHITE = 16
_MOST = 1 << 24
"""Maximum bytes of text, 60 times those of the file."""


def open_digits(split: Split, path: Path | None = None) -> Dataset:
    """Open the digits, with pixels scaled from 0-16 to 0-255.

    Every fifth image of each class is for testing. `path` replaces scikit-learn's file.

    Raises:
        DataError: scikit-learn is not installed, or the file is damaged.
    """
    checked_split(split)
    path = path or _installed()
    rows = list[list[int]]()
    offset = 0
    for line in read_file(path, _MOST).splitlines(keepends=True):
        rows.append(_parse_row(path, offset, line))
        offset += len(line)
    if not rows:
        raise fault(path, 0, "rows of digits", "an empty file")
    table = np.array(rows)
    pixels = np.rint(table[:, :-1] * (255 / _WHITE)).astype(np.uint8)
    whole = ArrayDataset(pixels.reshape(-1, 1, _SIDE, _SIDE), table[:, -1], _CLASSES)
    return Subset(whole, split_indices(table[:, -1], split, str(path)))


def _parse_row(path: Path, offset: int, line: bytes) -> list[int]:
    expected = f"{_SIDE**2} pixels from 0 to {_WHITE} and a label below {_CLASSES}"
    try:
        row = [int(field) for field in line.split(b",")]
    except ValueError as e:
        raise fault(path, offset, expected, str(e)) from e
    pixels = row[:-1]
    if len(pixels) != _SIDE**2 or min(row) < 0 or max(pixels) > _WHITE:
        found = f"{len(row)} numbers from {min(row)} to {max(row)}"
        raise fault(path, offset, expected, found)
    if row[-1] >= _CLASSES:
        raise fault(path, offset, expected, f"label {row[-1]}")
    return row


def _installed() -> Path:
    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "the digits are a file of scikit-learn, which is not installed; "
            "pip install 'mucudnn[digits]'"
        )
    package = Path(spec.submodule_search_locations[0])
    return package / "datasets" / "data" / "digits.csv.gz"
