"""Data sets: labelled images read by index, resized if asked for.

Images are NCHW, `uint8` (0-255) or `float32`; labels are `int64` from 0. Several
threads read a data set at once, so `read` must not change it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mucudnn.arguments import check_integers
from mucudnn.errors import DataError

Images: TypeAlias = NDArray[Any]
"""Images of a batch, (n, C, H, W)."""

Labels: TypeAlias = NDArray[np.int64]
"""Labels of a batch, (n,)."""

Indices: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Split: TypeAlias = Literal["train", "test"]
_TEST_EVERY = 5


class Dataset(Protocol):
    """Labelled images of one shape."""

    @property
    def classes(self) -> tuple[str, ...] | int:
        """Names of the classes in the order of labels, or their number."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape of an image, (C, H, W)."""

    def __len__(self) -> int: ...

    def read(self, indices: Indices) -> tuple[Images, Labels]:
        """Return images and labels at `indices`, as new arrays.

        Raises:
            IndexError: An index is not in `range(len(self))`.
        """


class Subset:
    """Images of another data set, in the order of `indices`.

    Attributes:
        classes: Classes of the whole data set.
        image_shape: (C, H, W).
    """

    def __init__(self, dataset: Dataset, indices: Indices) -> None:
        checked_dataset(dataset)
        self.classes = dataset.classes
        self.image_shape = dataset.image_shape
        self._dataset = dataset
        self._indices = checked_indices(indices, len(dataset))

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, indices: Indices) -> tuple[Images, Labels]:
        """See `Dataset.read`."""
        return self._dataset.read(self._indices[checked_indices(indices, len(self))])


def checked_dataset(dataset: object) -> None:
    """Raise `TypeError` unless `dataset` looks like a data set."""
    if not hasattr(dataset, "read") or not hasattr(dataset, "__len__"):
        raise TypeError(
            "expected a data set, such as ArrayDataset(images, labels), got "
            f"{dataset!r}"
        )


def checked_split(split: Any) -> None:
    """Raise `ValueError` unless `split` is "train" or "test"."""
    if not isinstance(split, str) or split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}; choose train or test")


def checked_shape(name: str, shape: Any) -> tuple[int, int, int]:
    """Return the validated shape of an image."""
    sizes = check_integers(name, shape, least=1)
    if len(sizes) != 3:
        raise ValueError(f"{name} must be (C, H, W), got {sizes}")
    return sizes[0], sizes[1], sizes[2]


def checked_indices(indices: Indices, length: int) -> NDArray[np.intp]:
    """Return `indices` as an array."""
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
    """Return the number of classes, named or not."""
    classes = dataset.classes
    return classes if isinstance(classes, int) else len(classes)


def split_indices(labels: NDArray[Any], split: Split, where: str) -> NDArray[np.intp]:
    """Split data that is published without a test part, stratified by class.

    Every fifth image of each class is for testing: the shares of classes are equal in
    both parts, and nothing is random. Messages call the data `where`.
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


_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


@dataclass(frozen=True, slots=True)
class Resized:
    """A data set with bilinearly resized images, converted to grey or to color.

    Attributes:
        dataset: Data set with the original images.
        image_shape: (C, H, W) of the result. C is that of the data set, or 1 instead of
            3, or 3 instead of 1.

    Raises:
        ValueError: The number of channels cannot be converted.
    """

    dataset: Dataset
    image_shape: tuple[int, int, int]

    def __post_init__(self) -> None:
        checked_dataset(self.dataset)
        wants, *_ = checked_shape("image_shape", self.image_shape)
        has = self.dataset.image_shape[0]
        if has != wants and {has, wants} != {1, 3}:
            raise ValueError(
                f"images of shape {self.dataset.image_shape} cannot be resized to "
                f"{self.image_shape}; the target can have any size, but "
                f"{('1 or 3' if has in (1, 3) else has)} channels"
            )

    @property
    def classes(self) -> tuple[str, ...] | int:
        """Classes of the data set."""
        return self.dataset.classes

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: Indices) -> tuple[Images, Labels]:
        """See `Dataset.read`."""
        images, labels = self.dataset.read(indices)
        channels, height, width = self.image_shape
        values = images.astype(np.float32, copy=False)
        if images.shape[1] == 3 and channels == 1:
            luma = np.array(_LUMA, np.float32)
            values = np.einsum("nchw,c->nhw", values, luma)[:, None]
        values = _weights(images.shape[2], height) @ values
        values = values @ _weights(images.shape[3], width).T
        if values.shape[1] != channels:
            values = np.repeat(values, channels, axis=1)
        if images.dtype == np.uint8:
            values = np.rint(values).clip(0, 255).astype(np.uint8)
        return values, labels


def _weights(size: int, wanted: int) -> NDArray[np.float32]:
    """Return the matrix that interpolates `size` points bilinearly at `wanted`.

    Points are centers of pixels; the edge repeats beyond the outermost.
    """
    places = (np.arange(wanted) + 0.5) * size / wanted - 0.5
    places = places.clip(0, size - 1)
    distance: NDArray[np.float64] = np.abs(places[:, None] - np.arange(size))
    return (1 - distance).clip(0, None).astype(np.float32)
