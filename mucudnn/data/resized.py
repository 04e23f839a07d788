"""Resize the images of any data set, such as digits for a network of 224 x 224."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mucudnn.data.dataset import (
    Dataset,
    Images,
    Indices,
    Labels,
    checked_dataset,
    checked_shape,
)

__all__ = ["Resized"]

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
                f"images of shape {self.dataset.image_shape} cannot become "
                f"{self.image_shape}; they can have any size and "
                f"{'1 or 3' if has in (1, 3) else has} channels"
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
