"""Learnable images generated on the fly, in any number, without files or memory.

Each class has a smooth pattern, a random sum of the lowest cosines. An image is its
class's pattern with a random brightness and pixel noise. All of it depends on the seed
and the index only, so an index always gives the same image, in any order and on any
thread.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mucudnn.arguments import a_number, an_integer
from mucudnn.data.dataset import (
    Images,
    Indices,
    Labels,
    Split,
    checked_indices,
    checked_shape,
    checked_split,
)

__all__ = ["SyntheticDataset"]

_MOST = 2**63 - 1
_WAVES = 4
_CONTRAST = 32.0
_BRIGHTNESS = 16.0
_PATTERNS, _TRAIN, _TEST = range(3)


@dataclass(frozen=True, slots=True)
class SyntheticDataset:
    """Images of class-dependent patterns in noise.

    Both splits have the same classes, but different images.

    Attributes:
        length: Number of images.
        classes: Number of classes, which alternate.
        image_shape: (C, H, W).
        noise: Standard deviation of pixel noise relative to that of the patterns.
        seed: Seed of patterns and images.
        split: Training or test images.
    """

    length: int
    classes: int = 10
    image_shape: tuple[int, int, int] = (3, 32, 32)
    noise: float = 1.0
    seed: int = 0
    split: Split = "train"

    def __post_init__(self) -> None:
        for name in ("length", "classes"):
            an_integer(name, getattr(self, name), least=1, most=_MOST)
        an_integer("seed", self.seed, least=0)
        for size in checked_shape("image_shape", self.image_shape):
            an_integer("a size of image_shape", size, most=_MOST)
        a_number("noise", self.noise, least=0, most=100)
        checked_split(self.split)

    def __len__(self) -> int:
        return self.length

    def read(self, indices: Indices) -> tuple[Images, Labels]:
        """See `Dataset.read`."""
        chosen = checked_indices(indices, self.length)
        labels = chosen.astype(np.int64) % self.classes
        patterns = {int(label): self._pattern(int(label)) for label in set(labels)}
        images = np.empty((len(chosen), *self.image_shape), np.uint8)
        for image, index, label in zip(images, chosen, labels, strict=True):
            image[...] = self._image(int(index), patterns[int(label)])
        return images, labels

    def _image(self, index: int, pattern: NDArray[np.float32]) -> NDArray[np.float32]:
        stream = _TEST if self.split == "test" else _TRAIN
        rng = np.random.default_rng([self.seed, stream, index])
        image = rng.standard_normal(self.image_shape, np.float32)
        image *= self.noise * _CONTRAST
        image += pattern
        image += 128 + _BRIGHTNESS * rng.uniform(-1, 1)
        return np.clip(image, 0, 255, out=image)

    def _pattern(self, label: int) -> NDArray[np.float32]:
        """Return a class's pattern, (C, H, W), of deviation `_CONTRAST`."""
        rng = np.random.default_rng([self.seed, _PATTERNS, label])
        channels, height, width = self.image_shape
        rows, columns = _cosines(height), _cosines(width)
        weights = rng.standard_normal((channels, len(rows), len(columns)))
        weights *= _CONTRAST / np.sqrt(len(rows) * len(columns))
        pattern: NDArray[np.float64] = rows.T @ weights @ columns
        return pattern.astype(np.float32)


def _cosines(size: int) -> NDArray[np.float64]:
    """Return the lowest cosines over `size` points, each of mean square 1."""
    places = (np.arange(size) + 0.5) / size
    waves = np.arange(min(_WAVES, size))[:, None]
    scale = np.where(waves == 0, 1.0, np.sqrt(2))
    return np.asarray(scale * np.cos(np.pi * waves * places))
