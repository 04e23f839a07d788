"""MNIST and data sets of the same form (Fashion-MNIST, KMNIST): IDX files.

An IDX file is a big-endian header (two zero bytes, the element type, the number of
dimensions, each dimension in 32 bits) and the elements.

Source: Y. LeCun, C. Cortes and C. J. C. Burges, "The MNIST database of handwritten
digits", section "File formats".
"""

import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mucudnn.arguments import a_path
from mucudnn.data.arrays import ArrayDataset
from mucudnn.data.dataset import Dataset, Split, checked_split
from mucudnn.data.files import check_labels, check_length, fault, find_file, read_file

__all__ = ["open_mnist"]

_CLASSES = 10
_PREFIX = {"train": "train", "test": "t10k"}
_UBYTE = 0x08


def open_mnist(folder: str | Path, split: Split) -> Dataset:
    """Open the published files, packed (`.gz`) or not, with `-idx` or `.idx`.

    Raises:
        DataError: A file is missing, truncated, damaged or of another kind.
    """
    folder = a_path("folder", folder)
    checked_split(split)
    images_path = find_file(folder, _names(split, "images", 3))
    labels_path = find_file(folder, _names(split, "labels", 1))
    images, _ = _read_idx(images_path, 3)
    labels, header = _read_idx(labels_path, 1)
    if len(labels) != len(images):
        expected = f"{len(images)} labels, one for each image of {images_path.name}"
        raise fault(labels_path, 4, expected, str(len(labels)))
    check_labels(labels_path, labels, _CLASSES, header, 1)
    return ArrayDataset(images, labels, _CLASSES)


def _names(split: Split, what: str, ndim: int) -> tuple[str, ...]:
    return tuple(
        f"{_PREFIX[split]}-{what}{mark}idx{ndim}-ubyte{packed}"
        for packed in ("", ".gz")
        for mark in ("-", ".")
    )


def _read_idx(path: Path, ndim: int) -> tuple[NDArray[np.uint8], int]:
    """Return the elements of a file, and the offset of the first one."""
    raw = read_file(path, lambda head: _stated_size(head, ndim))
    magic = struct.pack(">HBB", 0, _UBYTE, ndim)
    if raw[:4] != magic[: len(raw)]:
        expected = f"{magic.hex(' ')} (unsigned bytes, {ndim}-dimensional)"
        raise fault(path, 0, expected, raw[:4].hex(" "))
    header = 4 + 4 * ndim
    if len(raw) < header:
        fewer = f"{header - len(raw)} fewer"
        raise fault(path, len(raw), f"a header of {header} bytes", fewer)
    shape = _shape(raw, ndim)
    if 0 in shape:
        raise fault(path, 4 + 4 * shape.index(0), "dimensions above 0", f"{shape}")
    size = header + math.prod(shape)
    check_length(path, len(raw), size, f"a header and {shape} elements")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape), header


def _shape(raw: bytes, ndim: int) -> tuple[int, ...]:
    return struct.unpack_from(f">{ndim}I", raw, 4)


def _stated_size(head: bytes, ndim: int) -> int | None:
    """Return the size that a header states; None while it is incomplete."""
    header = 4 + 4 * ndim
    if len(head) < header:
        return None
    return header + math.prod(_shape(head, ndim))
