"""Sliding windows without strides: a tile of images, split by phase.

With stride 2 an image is four smaller ones: even and odd columns of even and odd rows.
Element (r, s) of every window is in the image of phase (r % 2, s % 2), displaced by
(r // 2, s // 2) from the window's own position. Because these images and the results
share a row length, a displacement is an offset into flat memory, so each step over all
windows of a tile is one long vector operation. The price is a few unused elements at
the end of each row.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.cpu.kernels.tiles import Attrs, tiles
from mucudnn.backends.cpu.scratch import Scratch

__all__ = ["Axis", "Windows", "spatial_axes"]

_TILE_BYTES = 256 << 10  # of one phase's image; a kernel holds up to about ten of them


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of an image and the windows along it."""

    size: int
    out: int
    kernel: int = 1
    stride: int = 1
    padding: int = 0

    @property
    def reach(self) -> int:
        """Displacement of a window's last element, in elements of a phase."""
        return (self.kernel - 1) // self.stride

    @property
    def phases(self) -> int:
        """Number of phases that windows touch."""
        return min(self.kernel, self.stride)


def spatial_axes(shape: Sequence[int], out: Sequence[int], attrs: Attrs) -> list[Axis]:
    """Return all axes of (N * C, *spatial), the first without windows."""
    windows = (attrs[name] for name in ("kernel", "stride", "padding"))
    spatial = zip(shape[2:], out[2:], *windows, strict=True)
    return [Axis(shape[0] * shape[1], out[0] * out[1]), *(Axis(*v) for v in spatial)]


@dataclass(frozen=True)
class Windows:
    """Positions [start, stop) on every axis, plus those that windows reach beyond them.

    Attributes:
        axes: Axes of the whole tensor.
        starts: First position of the tile on each axis.
        counts: Number of positions of the tile on each axis.
    """

    axes: tuple[Axis, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def cover(
        cls, axes: Sequence[Axis], positions: Sequence[int], itemsize: int
    ) -> "list[Windows]":
        """Return tiles that cover all positions."""
        parts = tiles(positions, _TILE_BYTES // itemsize)
        return [
            cls(
                tuple(axes),
                tuple(s.start for s in part),
                tuple(s.stop - s.start for s in part),
            )
            for part in parts
        ]

    @classmethod
    def of_inputs(cls, axes: Sequence[Axis], itemsize: int) -> "list[Windows]":
        """Return tiles such that one of them, in some phase, has each element."""
        positions = [-(-(axis.size + axis.padding) // axis.stride) for axis in axes]
        return cls.cover(axes, positions, itemsize)

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Shape of an image of one phase: the positions and those beyond."""
        pairs = zip(self.axes, self.counts, strict=True)
        return tuple(count + axis.reach for axis, count in pairs)

    @functools.cached_property
    def size(self) -> int:
        """Elements of one image."""
        return math.prod(self.lengths)

    @functools.cached_property
    def pitches(self) -> tuple[int, ...]:
        """Flat distance of neighbours along each axis."""
        lengths = self.lengths
        return tuple(math.prod(lengths[i + 1 :]) for i in range(len(lengths)))

    @functools.cached_property
    def spare(self) -> int:
        """Elements that flat offsets may run past the end."""
        pairs = zip(self.axes, self.pitches, strict=True)
        return sum(axis.reach * pitch for axis, pitch in pairs)

    def phases(self) -> Iterator[tuple[int, ...]]:
        """Yield every phase that a window touches."""
        return itertools.product(*(range(axis.phases) for axis in self.axes))

    def taps(self) -> Iterator[tuple[int, ...]]:
        """Yield every element of a window, in row-major order."""
        return itertools.product(*(range(axis.kernel) for axis in self.axes))

    def locate(self, tap: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Return (phase, flat offset) of an element of the window."""
        return _locate(tuple(axis.stride for axis in self.axes), self.pitches, tap)

    def element(self, images: dict[tuple[int, ...], Any], tap: tuple[int, ...]) -> Any:
        """Return one element of every window, flat, from the images by phase."""
        phase, offset = self.locate(tap)
        return images[phase][offset : offset + self.size]

    def outputs(self) -> tuple[slice, ...]:
        """Return the tile's slices in a tensor of windows."""
        pairs = zip(self.starts, self.counts, strict=True)
        return tuple(slice(start, start + count) for start, count in pairs)

    def inner(self, flat: Any) -> Any:
        """Return the positions of an image, without the rest of its rows."""
        image = flat[: self.size].reshape(self.lengths)
        return image[tuple(slice(0, count) for count in self.counts)]

    def gather(
        self, x: Any, phase: Sequence[int], fill: float, scratch: Scratch
    ) -> Any:
        """Return a phase's flat image, with `fill` outside `x` and in the spare."""
        flat = scratch.take(self.size + self.spare, x.dtype)
        image = flat[: self.size].reshape(self.lengths)
        inside, source = self.overlap(phase, self.lengths)
        if self.spare or any(
            s.stop - s.start < n for s, n in zip(inside, self.lengths, strict=True)
        ):
            flat[...] = fill
        image[inside] = x[source]
        return flat

    def scatter(self, phase: Sequence[int], flat: Any, x: Any) -> None:
        """Write one phase of a tile of `x`; zeros if `flat` is None."""
        inside, target = self.overlap(phase, self.counts)
        x[target] = 0 if flat is None else self.inner(flat)[inside]

    def overlap(
        self, phase: Sequence[int], lengths: Sequence[int]
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the part of a phase's image in the tensor, as slices of both."""
        inside, source = [], []
        for axis, start, r, length in zip(
            self.axes, self.starts, phase, lengths, strict=True
        ):
            first = start * axis.stride + r - axis.padding
            low = max(0, -(first // axis.stride))
            high = max(low, min(length, (axis.size - 1 - first) // axis.stride + 1))
            begin = first + low * axis.stride
            inside.append(slice(low, high))
            source.append(
                slice(begin, begin + (high - low) * axis.stride, axis.stride)
                if high > low
                else slice(0, 0)
            )
        return tuple(inside), tuple(source)

    def reduce(
        self, images: dict[tuple[int, ...], Any], combine: Any, scratch: Scratch
    ) -> Any:
        """Combine each window's elements, one axis after the other, the last first.

        Args:
            images: Images made by `gather`, by phase; not modified.
            combine: A ufunc such as `np.maximum`.
            scratch: Memory for the result and for intermediate ones.
        """
        for i in reversed(range(len(self.axes))):
            axis, pitch = self.axes[i], self.pitches[i]
            if axis.kernel == 1:
                images = {phase[:-1]: image for phase, image in images.items()}
                continue
            shorter: dict[tuple[int, ...], Any] = {}
            for prefix in {phase[:-1]: None for phase in images}:
                size = images[(*prefix, 0)].size - axis.reach * pitch
                parts = []
                for t in range(axis.kernel):
                    offset = t // axis.stride * pitch
                    image = images[(*prefix, t % axis.stride)]
                    parts.append(image[offset : offset + size])
                result = scratch.take(size, parts[0].dtype)
                combine(parts[0], parts[1], out=result)
                for part in parts[2:]:
                    combine(result, part, out=result)
                shorter[prefix] = result
            images = shorter
        return images[()]


@functools.lru_cache(maxsize=4096)  # numbers only; the same for nearly all tiles
def _locate(
    strides: tuple[int, ...], pitches: tuple[int, ...], tap: tuple[int, ...]
) -> tuple[tuple[int, ...], int]:
    along = list(zip(tap, strides, pitches, strict=True))
    phase = tuple(t % stride for t, stride, _ in along)
    return phase, sum(t // stride * pitch for t, stride, pitch in along)
