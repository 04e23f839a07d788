"""What a data set is: labelled images, read by index.

Images are NCHW, `uint8` (0-255) or `float32`; labels are `int64` from 0. A data set
is read from several threads at once, so `read` keeps no state.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mucudnn.arguments import integers
from mucudnn.errors import DataError

__all__ = [
    "Dataset",
    "Images",
    "Indices",
    "Labels",
    "Split",
    "Subset",
    "checked_dataset",
    "checked_indices",
    "checked_shape",
    "checked_split",
    "class_count",
    "split_indices",
]

Images: TypeAlias = NDArray[Any]
"""A batch, (n, C, H, W)."""

Labels: TypeAlias = NDArray[np.int64]
"""The classes of a batch, (n,)."""

Indices: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]

Split: TypeAlias = Literal["train", "test"]

_TEST_EVERY = 5


class Dataset(Protocol):
    """Labelled images that all have one shape."""

    @property
    def classes(self) -> tuple[str, ...] | int:
        """The names of the classes in the order of their labels, or their number."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""

    def __len__(self) -> int: ...

    def read(self, indices: Indices) -> tuple[Images, Labels]:
        """The images and labels at `indices`, as arrays of the caller's own.

        Raises:
            IndexError: An index is negative, or not below `len`.
            DataError: A file cannot be read.
        """


class Subset:
    """Some images of another data set, in the order of `indices`."""

    def __init__(self, dataset: Dataset, indices: Indices) -> None:
        checked_dataset(dataset)
        self._dataset = dataset
        self._indices = checked_indices(indices, len(dataset))

    @property
    def classes(self) -> tuple[str, ...] | int:
        """Those of the whole."""
        return self._dataset.classes

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        return self._dataset.image_shape

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, indices: Indices) -> tuple[Images, Labels]:
        """See `Dataset.read`."""
        return self._dataset.read(self._indices[checked_indices(indices, len(self))])


def checked_dataset(dataset: object) -> None:
    """Refuse what does not look like a data set.

    Raises:
        TypeError: It cannot be one.
    """
    if not hasattr(dataset, "read") or not hasattr(dataset, "__len__"):
        raise TypeError(
            "a data set is wanted, such as ArrayDataset(images, labels), got "
            f"{dataset!r}"
        )


def checked_split(split: Any) -> None:
    """Refuse what is no part of a data set.

    Raises:
        ValueError: It is neither of them.
    """
    if not isinstance(split, str) or split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}; choose train or test")


def checked_shape(name: str, shape: Any) -> tuple[int, int, int]:
    """The shape of an image.

    Raises:
        TypeError: It is no sequence of integers.
        ValueError: It is not (C, H, W), or one of them is below 1.
    """
    sizes = integers(name, shape, least=1)
    if len(sizes) != 3:
        raise ValueError(f"{name} must be (C, H, W), got {sizes}")
    return sizes[0], sizes[1], sizes[2]


def checked_indices(indices: Indices, length: int) -> NDArray[np.intp]:
    """`indices` as an array.

    Raises:
        IndexError: They are no flat list of integers from 0 to `length` - 1.
    """
    try:
        array = np.asarray(indices)
    except ValueError as e:
        raise IndexError(f"indices must be a flat list of integers: {e}") from e
    if array.size == 0:
        array = array.astype(np.intp)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise IndexError(
            "indices must be a flat list of integers, got an array of shape "
            f"{array.shape} and type {array.dtype}"
        )
    outside = (array < 0) | (array >= length)
    if outside.any():
        raise IndexError(
            f"index {array[outside][0]} is outside a data set of {length} images"
        )
    return array.astype(np.intp, copy=False)


def class_count(dataset: Dataset) -> int:
    """How many classes there are, named or not."""
    classes = dataset.classes
    return classes if isinstance(classes, int) else len(classes)


def split_indices(labels: NDArray[Any], split: Split, where: str) -> NDArray[np.intp]:
    """A fixed, stratified split of data published without one.

    Every fifth image of each class is for testing, so both parts hold the classes in
    the same shares and nothing depends on a random number.

    Args:
        labels: Of the whole, (n,).
        split: Which part.
        where: What the message calls the data.

    Raises:
        DataError: No class has enough images for a test part.
    """
    order = np.argsort(labels, kind="stable")
    _, counts = np.unique(labels, return_counts=True)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    rank = np.empty(len(labels), dtype=np.intp)
    rank[order] = np.arange(len(labels)) - starts
    for_test = rank % _TEST_EVERY == _TEST_EVERY - 1
    if not for_test.any():
        raise DataError(
            f"{where}: every {_TEST_EVERY}th image of a class is for testing, but no "
            f"class has {_TEST_EVERY} images"
        )
    return np.flatnonzero(for_test if split == "test" else ~for_test)
