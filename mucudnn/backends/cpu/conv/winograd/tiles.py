"""The tiles of one image: their values in the workspace, and the way in and out.

A block's values are stored as (points^(rank - 1), points * tile rows, samples, tiles of
a row * channels): what `analyse` can write for one sample in one matrix product, and
what is, read as (values, tiles, channels), one dense matrix a value.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.winograd.plan import Block, Image, Plan
from mucudnn.backends.cpu.conv.winograd.transforms import analyse, band, synthesise

__all__ = ["Piece", "Tiles", "pieces_of"]

Piece = tuple[int, int]
"""A sample and the index of a range of tiles of the second axis."""


def pieces_of(plan: Plan, block: Block) -> Iterator[Piece]:
    """What the workers transform at a time; a list of thousands would be memory too."""
    parts = len(plan.ranges[1]) if plan.rank > 1 else 1
    return ((n, part) for n in range(*block.samples) for part in range(parts))


class Tiles:
    """Transforms between an image and the values of its tiles.

    Args:
        plan: How the problem is cut.
        image: Which of its images this is.
        array: The image's data, (N, channels, *spatial), of any strides.
        matrix: (points, reach of a tile), applied along every axis.
        values: Flat room for the values of a block.
        bands: Room for the band matrices, as `Plan.band_regions` lists them.
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

    def values(self, block: Block, groups: int) -> Any:
        """The block as (values, groups, tiles, channels of a group)."""
        shape = (self._plan.values, self._plan.tiles(block), groups, -1)
        return self._stored(block).reshape(shape).swapaxes(1, 2)

    def read(self, block: Block, piece: Piece, worker: int) -> None:
        """Transform a piece of the image."""
        picture, bands, values = self._cut(block, piece)
        scratch = self._scratch[worker]
        analyse(picture, bands, self._plan.minimal.points, values, scratch)

    def write(self, block: Block, piece: Piece, worker: int, line: Any) -> None:
        """Transform back, into the image.

        `line` is None, or flat room for `Plan.line_items` to add to the image instead.
        """
        picture, bands, values = self._cut(block, piece)
        scratch = self._scratch[worker]
        if line is not None:
            length, channels = picture.shape[-2:]
            line = line[: length * channels]
            if picture.strides[-1] == picture.itemsize:
                line = line.reshape(length, channels)
            else:
                line = line.reshape(channels, length).T
        synthesise(values, bands, self._plan.minimal.points, picture, scratch, line)

    def _fill(
        self, matrix: Any, arrays: Iterator[Any]
    ) -> Iterator[list[tuple[slice, Any]]]:
        """Per axis and range of tiles: the stretch of the axis, and its matrix."""
        step = self._plan.minimal.step
        for axis, ranges in enumerate(self._plan.ranges):
            filled = []
            for tiles in ranges:
                out = next(arrays).T
                start, stop = self._image.window(axis, tiles, step)
                band(out, matrix, tiles, step, self._image.pads[axis], start)
                filled.append((slice(start, stop), out))
            yield filled

    def _stored(self, block: Block) -> Any:
        plan = self._plan
        points, (start, stop) = plan.minimal.points, block.samples
        outer = points ** (plan.rank - 1)
        rows = points * plan.rows(block)
        shape = (outer, rows, stop - start, plan.columns * self._image.channels)
        return self._values[: math.prod(shape)].reshape(shape)

    def _cut(self, block: Block, piece: Piece) -> tuple[Any, Sequence[Any], Any]:
        """A stretch of the image, channels last; its band matrices; its values."""
        plan, (sample, part) = self._plan, piece
        indices = (block.band, part, 0)
        chosen = [of[i] for of, i in zip(self._bands, indices, strict=False)]
        stretch, bands = [c[0] for c in chosen], [c[1] for c in chosen]
        values = self._stored(block)[:, :, sample - block.samples[0]]
        if plan.rank > 1:
            width = values.shape[-1] // plan.ranges[1][-1][1]
            start, stop = plan.ranges[1][part]
            values = values[..., start * width : stop * width]
        return self._pictures[(sample, *stretch)], bands, values
