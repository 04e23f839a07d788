"""How a Winograd convolution is cut: tile size, blocks of tiles, and workspace.

All three directions relate a source image, read with overlap, to a result image, read
or written tile by tile: x and y, dy and dx, x and dy. The plan speaks of these two.

The tiles are worked on in blocks: a range of tile rows (of the first image axis) of a
range of samples. A block's transforms should stay in the last-level cache between the
phases, so the workspace grows with the micro-batch up to `_BLOCK_BYTES`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mucudnn.backends.cpu.conv.carve import Region
from mucudnn.backends.cpu.conv.winograd.transforms import (
    MINIMAL,
    TAPS,
    Minimal,
    intermediate_items,
    window,
)
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["Block", "Image", "Plan", "Range", "make_plan", "pieces"]

_STRETCH = 5
"""Most tiles an axis that one band matrix covers: wider ones multiply more zeros."""

_BLOCK_BYTES = 8 << 20
"""Transformed tiles of a block, to stay in a last-level cache; but as many as the
transformed filter has, which every block reads once."""

_BLOCK_SAMPLES = 256
"""Most samples of a block, so that the list of its pieces stays small."""

_TRANSFORM_COST = 40
"""Multiply-adds of a matrix product that take as long as one transformed value."""

_FILTER_COST = 40
"""Multiply-adds that take as long as one value of the transformed filter."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Image:
    """One of the two images.

    Attributes:
        channels: Channels, of all groups.
        sizes: Spatial sizes.
        pads: Items before each axis that its first tile reaches.
        reach: Items along an axis that belong to a tile.
    """

    channels: int
    sizes: tuple[int, ...]
    pads: tuple[int, ...]
    reach: int

    def window(self, axis: int, tiles: Range, step: int) -> Range:
        """The part of an axis that some of its tiles touch."""
        return window(tiles, step, self.reach, self.pads[axis], self.sizes[axis])


@dataclass(frozen=True, slots=True)
class Block:
    """Tiles that are transformed, multiplied and transformed back together.

    Attributes:
        band: Index of the range of tile rows in `Plan.ranges[0]`.
        samples: Range of samples.
    """

    band: int
    samples: Range


@dataclass(frozen=True, slots=True)
class Plan:
    """The cut of one problem.

    Attributes:
        minimal: F(m, 3).
        batch: Samples.
        source: Image that is read with overlap.
        result: Image that the tiles partition.
        ranges: Ranges of tiles an axis: bands of the first axis, the parallel pieces
            of the second, all of the third.
        samples: Most samples in a block.
    """

    minimal: Minimal
    batch: int
    source: Image
    result: Image
    ranges: tuple[tuple[Range, ...], ...]
    samples: int

    @property
    def rank(self) -> int:
        """Spatial axes."""
        return len(self.ranges)

    @property
    def values(self) -> int:
        """Values of a transformed tile."""
        return math.prod([self.minimal.points] * self.rank)

    @property
    def columns(self) -> int:
        """Tiles of one tile row."""
        return math.prod(ranges[-1][1] for ranges in self.ranges[1:])

    def rows(self, block: Block) -> int:
        """Tile rows of a block."""
        start, stop = self.ranges[0][block.band]
        return stop - start

    def tiles(self, block: Block) -> int:
        """Tiles of a block."""
        return self.rows(block) * (block.samples[1] - block.samples[0]) * self.columns

    def blocks(self) -> Iterator[Block]:
        """Every block, in order."""
        for start, stop in pieces(self.batch, -(-self.batch // self.samples)):
            for band in range(len(self.ranges[0])):
                yield Block(band, (start, stop))

    def block_items(self, image: Image) -> int:
        """Items of the largest block of transformed tiles of an image."""
        rows = max(stop - start for start, stop in self.ranges[0])
        return self.values * rows * self.samples * self.columns * image.channels

    def scratch_items(self) -> tuple[int, int]:
        """Items of the two scratch arrays of one worker."""
        tiles = [max(b - a for a, b in ranges) for ranges in self.ranges]
        needs = []
        for image in (self.source, self.result):
            spans = [
                max(b - a for a, b in self._windows(image, axis))
                for axis in range(self.rank)
            ]
            needs.append(
                intermediate_items(self.minimal.points, tiles, spans, image.channels)
            )
        return max(n[0] for n in needs), max(n[1] for n in needs)

    def line_items(self) -> int:
        """Items of one line of the result along its last axis, in one piece."""
        lines = self._windows(self.result, self.rank - 1)
        return max(b - a for a, b in lines) * self.result.channels

    def band_regions(self, image: Image, dtype: str) -> list[Region]:
        """The band matrices of an image, axis by axis and range by range.

        Stored transposed, as BLAS multiplies these small shapes faster that way.
        """
        return [
            ((high - low, self.minimal.points * (tiles[1] - tiles[0])), dtype)
            for axis, ranges in enumerate(self.ranges)
            for tiles, (low, high) in zip(
                ranges, self._windows(image, axis), strict=True
            )
        ]

    def _windows(self, image: Image, axis: int) -> list[Range]:
        step = self.minimal.step
        return [image.window(axis, tiles, step) for tiles in self.ranges[axis]]


def make_plan(problem: ConvProblem, workers: int) -> Plan:
    """Choose tile size and cuts for a problem that Winograd can run."""
    (c, source), (k, result), pads = _images(problem)
    minimal = MINIMAL[_tile(problem, result)]
    tiles = [-(-size // minimal.step) for size in result]
    bands = pieces(tiles[0], -(-tiles[0] // _STRETCH))
    rows = max(stop - start for start, stop in bands)
    tile_bytes = minimal.points ** len(tiles) * problem.itemsize  # of one channel
    sample_bytes = tile_bytes * rows * math.prod(tiles[1:]) * (c + k)
    room = max(_BLOCK_BYTES, tile_bytes * math.prod(problem.w_shape[:2]))
    most = min(_BLOCK_SAMPLES, max(1, room // sample_bytes))
    chunks = -(-problem.batch // most)
    samples = -(-problem.batch // chunks)
    ranges = [tuple(bands)]
    for axis, count in enumerate(tiles[1:], 1):
        parts = 1
        if axis == 1:
            parts = max(-(-count // _STRETCH), -(-2 * workers // samples))
        ranges.append(tuple(pieces(count, min(parts, count))))
    return Plan(
        minimal,
        problem.batch,
        Image(c, source, pads, minimal.points),
        Image(k, result, (0,) * len(result), minimal.step),
        tuple(ranges),
        samples,
    )


def _images(
    problem: ConvProblem,
) -> tuple[tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...]], tuple[int, ...]]:
    """(channels, sizes) of source and result, and the padding of the source."""
    x = problem.x_shape[1], problem.x_shape[2:]
    y = problem.y_shape[1], problem.y_shape[2:]
    if problem.direction is Direction.BACKWARD_DATA:
        return y, x, tuple(TAPS - 1 - pad for pad in problem.padding)
    return x, y, problem.padding


def _tile(problem: ConvProblem, result: Sequence[int]) -> int:
    """The m of F(m, 3) that takes the least arithmetic; the smaller one on a tie.

    In three dimensions always the smallest: errors multiply with every axis.
    """
    choices = sorted(MINIMAL)
    if len(result) == 3:
        return choices[0]
    k, c_per_group = problem.w_shape[:2]
    channels = k + problem.x_shape[1]

    def cost(m: int) -> int:
        tiles = problem.batch * math.prod(-(-size // m) for size in result)
        products = (tiles + _FILTER_COST) * k * c_per_group
        transforms = tiles * channels * _TRANSFORM_COST
        return math.prod([m + TAPS - 1] * len(result)) * (products + transforms)

    return min(choices, key=cost)


def pieces(total: int, parts: int) -> Sequence[Range]:
    """`range(total)` in at most `parts` pieces, as equal as they can be."""
    return [(i * total // parts, (i + 1) * total // parts) for i in range(parts)]
