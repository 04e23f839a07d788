"""Transforms of batches between data set and model.

A transform is any function of a batch and a random generator. The ones here process the
whole batch at once and draw all random numbers from the generator.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from mucudnn.arguments import check_choice, check_integer, check_number
from mucudnn.data.dataset import Dataset, Images


class Transform(Protocol):
    """A function of a batch, (n, C, H, W), and a random generator."""

    def __call__(self, images: Images, rng: np.random.Generator, /) -> Images:
        """Return the transformed batch; `images` is unchanged."""


@dataclass(frozen=True, slots=True)
class Compose:
    """A sequence of transforms, applied first to last."""

    steps: tuple[Transform, ...]

    def __call__(self, images: Images, rng: np.random.Generator, /) -> Images:
        """Return the last transform's result."""
        for step in self.steps:
            images = step(images, rng)
        return images


@dataclass(frozen=True, slots=True)
class RandomCrop:
    """Shift each image by up to `padding` pixels in each direction, filling with 0."""

    padding: int = 4

    def __post_init__(self) -> None:
        check_integer("padding", self.padding, least=0)

    def __call__(self, images: Images, rng: np.random.Generator, /) -> Images:
        """Return crops of the size of the images."""
        count, _, height, width = images.shape
        around = (self.padding, self.padding)
        padded = np.pad(images, ((0, 0), (0, 0), around, around))
        crops = sliding_window_view(padded, (height, width), axis=(2, 3))
        top, left = rng.integers(2 * self.padding + 1, size=(2, count))
        return np.ascontiguousarray(crops[np.arange(count), :, top, left])


@dataclass(frozen=True, slots=True)
class RandomFlip:
    """Mirror each image, left to right, with a probability."""

    probability: float = 0.5

    def __post_init__(self) -> None:
        check_number("probability", self.probability, 0, 1)

    def __call__(self, images: Images, rng: np.random.Generator, /) -> Images:
        """Return a new batch, even where no image is mirrored."""
        flipped = rng.random(len(images)) < self.probability
        return np.where(flipped[:, None, None, None], images[..., ::-1], images)


@dataclass(frozen=True, slots=True)
class Normalize:
    """(x - mean) / std, channel by channel, in floating point.

    Attributes:
        mean: Mean of each channel, in units of the data set's pixels.
        std: Standard deviation of each channel; 0 (a constant channel) counts as 1.
        dtype: Data type of the result.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (255.0,)
    dtype: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or min(self.std, default=-1) < 0:
            raise ValueError(
                "means and deviations must have the same length, and deviations must "
                f"not be negative; got {self.mean} and {self.std}"
            )
        check_choice("dtype", self.dtype, ("float32", "float64"))

    @classmethod
    def of(
        cls, dataset: Dataset, dtype: Literal["float32", "float64"] = "float32"
    ) -> "Normalize":
        """Make the transform that gives `dataset` mean 0 and deviation 1; reads all."""
        mean, std = channel_statistics(dataset)
        return cls(mean, std, dtype)

    def __call__(self, images: Images, rng: np.random.Generator, /) -> Images:
        """Return the normalized batch; the generator is not used."""
        if len(self.mean) not in (1, images.shape[1]):
            raise ValueError(
                f"images of {images.shape[1]} channels cannot be normalised by "
                f"{len(self.mean)} means"
            )
        shape = (-1, 1, 1)
        mean = np.array(self.mean, self.dtype).reshape(shape)
        std = np.array([s or 1.0 for s in self.std], self.dtype).reshape(shape)
        values = images.astype(self.dtype)
        values -= mean
        values /= std
        return values


def channel_statistics(
    dataset: Dataset, batch: int = 256
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel over a data set.

    One pass in float64 that holds `batch` images at a time. Batches are merged by the
    update of Chan, Golub and LeVeque ("Algorithms for Computing the Sample Variance",
    1983), which is accurate even where the mean is far from 0.
    """
    channels = dataset.image_shape[0]
    count, mean, squares = 0, np.zeros(channels), np.zeros(channels)
    for begin in range(0, len(dataset), batch):
        images, _ = dataset.read(range(begin, min(begin + batch, len(dataset))))
        values = images.astype(np.float64)
        new = images.size // channels
        new_mean = values.mean(axis=(0, 2, 3))
        values -= new_mean[:, None, None]
        gap = new_mean - mean
        squares += np.square(values, out=values).sum(axis=(0, 2, 3))
        squares += gap**2 * (count * new / (count + new))
        mean += gap * (new / (count + new))
        count += new
    std = np.sqrt(squares / count)
    return tuple(map(float, mean)), tuple(map(float, std))
