"""Tiles of one image: their values in the workspace, and the transforms in and out.

A block's values are stored as (points^(rank - 1), points * tile rows, samples, tiles of
a row * channels). `analyse` can write this for one sample in one matrix product, and
read as (values, tiles, channels) it is one dense matrix per value.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.winograd.plan import Block, Image, Piece, Plan
from mucudnn.backends.cpu.conv.winograd.transforms import analyse, band, synthesise

__all__ = ["Tiles"]


class Tiles:
    """Transforms between an image and the values of its tiles.

    Args:
        plan: Cut of the problem.
        image: Source or result image of the plan.
        array: Data of the image, (N, channels, *spatial), of any strides.
        matrix: (points, reach of a tile), applied along every axis.
        values: Buffer for the values of a block (1 or workers, items).
        bands: Buffers for the band matrices, as listed by `Plan.band_regions`.
        scratch: Two arrays (workers, items) for intermediate results.
    """

    def __init__(
        self,
        plan: Plan,
        image: Image,
        array: Any,
        matrix: Any,
        values: Any,
        bands: Sequence[Any],
        scratch: Sequence[Any],
    ) -> None:
        self._plan = plan
        self._image = image
        self._pictures = np.moveaxis(array, 1, -1)
        self._values = values
        self._bands = list(self._fill(matrix, iter(bands)))
        self._scratch = [list(pair) for pair in zip(*scratch, strict=True)]

    def values(self, block: Block, groups: int, worker: int = 0) -> Any:
        """Return the block as (values, groups, tiles, channels of a group)."""
        shape = (self._plan.values, self._plan.tiles(block), groups, -1)
        return self._stored(block, worker).reshape(shape).swapaxes(1, 2)

    def read(self, block: Block, piece: Piece, worker: int) -> None:
        """Transform a piece of the image."""
        pictures, bands, values = self._cut(block, piece, worker)
        scratch = self._scratch[worker]
        analyse(pictures, bands, self._plan.minimal.points, values, scratch)

    def write(self, block: Block, piece: Piece, worker: int, *, add: bool) -> None:
        """Transform back, over the image or added to it."""
        pictures, bands, values = self._cut(block, piece, worker)
        scratch = self._scratch[worker]
        points = self._plan.minimal.points
        synthesise(values, bands, points, pictures, scratch, add=add)

    def _fill(
        self, matrix: Any, arrays: Iterator[Any]
    ) -> Iterator[list[tuple[slice, Any]]]:
        """Yield, per axis, the stretch and the band matrix of each range of tiles."""
        step = self._plan.minimal.step
        for axis, ranges in enumerate(self._plan.ranges):
            filled = []
            for tiles in ranges:
                out = next(arrays).T
                start, stop = self._image.window(axis, tiles, step)
                band(out, matrix, tiles, step, self._image.pads[axis], start)
                filled.append((slice(start, stop), out))
            yield filled

    def _stored(self, block: Block, worker: int) -> Any:
        plan = self._plan
        points, (start, stop) = plan.minimal.points, block.samples
        outer = points ** (plan.rank - 1)
        rows = points * plan.rows(block)
        shape = (outer, rows, stop - start, plan.columns * self._image.channels)
        own = self._values[worker if plan.crew else 0]
        return own[: math.prod(shape)].reshape(shape)

    def _cut(
        self, block: Block, piece: Piece, worker: int
    ) -> tuple[Any, Sequence[Any], Any]:
        """Return a stretch of images, channels last; its band matrices; its values."""
        plan, ((first, last), part) = self._plan, piece
        indices = (block.band, part, 0)
        chosen = [of[i] for of, i in zip(self._bands, indices, strict=False)]
        stretch, bands = [c[0] for c in chosen], [c[1] for c in chosen]
        start = block.samples[0]
        values = self._stored(block, worker)[:, :, first - start : last - start]
        if plan.rank > 1:
            width = values.shape[-1] // plan.ranges[1][-1][1]
            low, high = plan.ranges[1][part]
            values = values[..., low * width : high * width]
        pictures = self._pictures[(slice(first, last), *stretch)]
        return pictures, bands, values.transpose(2, 0, 1, 3)
