"""CIFAR-10 and CIFAR-100, in both published forms.

Binary: rows of one label (CIFAR-100: coarse, then fine) and 3072 bytes, the red, green
and blue planes of 32 x 32. Python: pickled dictionaries of the same rows.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009,
and the description beside the files.

No file states its number of rows, so a file cut between two rows looks complete. Hence
the number of rows is an argument, which defaults to the published one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mucudnn.arguments import a_path
from mucudnn.data.arrays import ArrayDataset
from mucudnn.data.dataset import Dataset, Split, checked_split
from mucudnn.data.files import (
    check_labels,
    check_length,
    fault,
    find_file,
    read_file,
    shown,
)
from mucudnn.data.pickles import read_pickled_dict
from mucudnn.errors import DataError

__all__ = ["open_cifar10", "open_cifar100"]

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_PICKLED_ROW = 2 * _PIXELS + (1 << 10)
"""Maximum bytes of a row in a pickle; old protocols may use two per pixel."""
_BESIDE = 1 << 20
"""Maximum bytes of everything but rows."""


@dataclass(frozen=True, slots=True)
class _Labels:
    """A kind of labels, and its place in the files.

    Attributes:
        classes: Number of classes.
        column: Offset of the label in a binary row.
        columns: Number of labels in a binary row.
        key: Entry of the labels in a pickled dictionary.
        names: Text file, pickle and pickle entry with the names of the classes.
    """

    classes: int
    column: int
    columns: int
    key: str
    names: tuple[str, str, str]


_TEN = _Labels(
    *(10, 0, 1, "labels"), ("batches.meta.txt", "batches.meta", "label_names")
)
_FINE = _Labels(
    *(100, 1, 2, "fine_labels"), ("fine_label_names.txt", "meta", "fine_label_names")
)
_COARSE = _Labels(
    *(20, 0, 2, "coarse_labels"),
    ("coarse_label_names.txt", "meta", "coarse_label_names"),
)


def open_cifar10(folder: str | Path, split: Split, *, rows: int = 10_000) -> Dataset:
    """Open CIFAR-10: `data_batch_1` to `_5` or `test_batch`, perhaps with `.bin`.

    Args:
        folder: Folder of the files, or the parent of the unpacked archive's folder.
        split: Training or test images.
        rows: Number of images per file.

    Raises:
        DataError: A file is missing, truncated or of another kind.
    """
    checked_split(split)
    stems = [f"data_batch_{i}" for i in range(1, 6)]
    stems = stems if split == "train" else ["test_batch"]
    unpacked = ("cifar-10-batches-bin", "cifar-10-batches-py")
    return _open(folder, unpacked, stems, _TEN, rows)


def open_cifar100(
    folder: str | Path, split: Split, *, coarse: bool = False, rows: int | None = None
) -> Dataset:
    """Open CIFAR-100: `train` or `test`, perhaps with `.bin`.

    Args:
        folder: Folder of the files, or the parent of the unpacked archive's folder.
        split: Training or test images.
        coarse: Label with the 20 superclasses instead of the 100 classes.
        rows: Number of images in the file; None is the published 50 000 or 10 000.

    Raises:
        DataError: A file is missing, truncated or of another kind.
    """
    checked_split(split)
    published = 50_000 if split == "train" else 10_000
    unpacked = ("cifar-100-binary", "cifar-100-python")
    which = _COARSE if coarse else _FINE
    return _open(folder, unpacked, [split], which, rows or published)


def _open(
    folder: str | Path,
    unpacked: tuple[str, ...],
    stems: list[str],
    which: _Labels,
    rows: int,
) -> Dataset:
    """Read the files of `stems` in a folder, or in the archive's folder inside it."""
    folder = a_path("folder", folder)
    inner = (folder / name for name in unpacked if (folder / name).is_dir())
    folder = next(inner, folder)
    parts = []
    for stem in stems:
        path = find_file(folder, (f"{stem}.bin", stem))
        read = _read_binary if path.suffix == ".bin" else _read_pickle
        parts.append(read(path, which, rows))
    images = np.concatenate([images for images, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    classes = _class_names(folder, which) or which.classes
    return ArrayDataset(images.reshape(-1, *_SHAPE), labels, classes)


def _read_binary(
    path: Path, which: _Labels, rows: int
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    raw = read_file(path)
    row = which.columns + _PIXELS
    check_length(path, len(raw), rows * row, f"{rows} rows of {row}")
    table = np.frombuffer(raw, np.uint8).reshape(rows, row)
    labels = table[:, which.column]
    check_labels(path, labels, which.classes, which.column, row)
    return table[:, which.columns :], labels


def _read_pickle(
    path: Path, which: _Labels, rows: int
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    entries = read_pickled_dict(path, rows * _PICKLED_ROW + _BESIDE)
    images, labels = entries.get("data"), entries.get(which.key)
    if not isinstance(images, np.ndarray) or not isinstance(labels, list):
        keys = shown(", ".join(sorted(entries)) or "nothing")
        raise fault(path, 0, f"an array 'data' and a list '{which.key}'", keys)
    if images.shape != (rows, _PIXELS):
        raise fault(path, 0, f"'data' of shape {(rows, _PIXELS)}", f"{images.shape}")
    if len(labels) != rows:
        raise fault(path, 0, f"{rows} entries in '{which.key}'", f"{len(labels)}")
    for index, label in enumerate(labels):
        if not isinstance(label, int) or not 0 <= label < which.classes:
            expected = f"labels from 0 to {which.classes - 1} in '{which.key}'"
            raise fault(path, 0, expected, f"{shown(label)} (image {index})")
    return images, np.array(labels, np.int64)


def _class_names(folder: Path, which: _Labels) -> tuple[str, ...] | None:
    """Return the names of the classes; None without a file of names."""
    text, pickled, key = which.names
    if (folder / text).is_file():
        path = folder / text
        found: object = [*filter(None, read_file(path, _BESIDE).split(b"\n"))]
    elif (folder / pickled).is_file():
        path = folder / pickled
        found = read_pickled_dict(path, _BESIDE).get(key)
    else:
        return None
    if not isinstance(found, list) or len(found) != which.classes:
        number = f"{len(found)}" if isinstance(found, list) else "none"
        raise DataError(f"{path}: expected {which.classes} names, found {number}")
    for name in found:
        if not isinstance(name, str | bytes):
            raise DataError(f"{path}: expected texts for names, found {shown(name)}")
    texts = (n.decode("utf-8", "replace") if isinstance(n, bytes) else n for n in found)
    return tuple(text.strip() for text in texts)
