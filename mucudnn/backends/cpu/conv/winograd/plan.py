"""The cut of a Winograd convolution: tile size, blocks of tiles, and workspace.

All three directions relate a source image, read with overlap, to a result image, read
or written tile by tile: x and y, dy and dx, x and dy. The plan speaks of these two.

The tiles are processed in blocks: a range of tile rows (of the first image axis) of a
range of samples. A block's transforms should stay in cache between the phases. If the
filter is small, every worker takes blocks of its own through all phases without waiting
for the others. If it is large, reading it once a block is the main cost, and all
workers share one block after another. The workspace grows with the micro-batch up to
`_OWN_BYTES` a worker, or `_BLOCK_BYTES`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mucudnn.backends.cpu.conv.carve import Region
from mucudnn.backends.cpu.conv.winograd.transforms import (
    MINIMAL,
    TAPS,
    Minimal,
    intermediate_items,
    window,
)
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["Block", "Image", "Piece", "Plan", "Range", "make_plan", "pieces"]

_STRETCH = 5  # most tiles an axis of a band matrix: wider ones multiply more zeros
_BLOCK_BYTES = 8 << 20
"""Bytes of transformed tiles of a shared block, to fit a last-level cache; at least as
many as the transformed filter has, which every block reads once.
"""

_OWN_BYTES = 3 << 20  # bytes of transformed tiles of a block that belongs to one worker
_OWN_FILTER = 4 << 20  # bytes of a transformed filter up to which workers own blocks
_OWN_BALANCE = 0.75  # least share of the workers' time that their own blocks must use
_PIECE_BYTES = 512 << 10  # intermediate results, to fit a core's second-level cache
_BLOCK_SAMPLES = 256  # most samples of a block; keeps the list of its pieces small
_TRANSFORM_COST = 40  # multiply-adds that take as long as one transformed value
_FILTER_COST = 40  # multiply-adds that take as long as one transformed filter value

Range = tuple[int, int]

Piece = tuple[Range, int]
"""Samples, and the index of a range of tiles of the second axis."""


@dataclass(frozen=True, slots=True)
class Image:
    """The source or the result image.

    Attributes:
        channels: Channels of all groups.
        sizes: Spatial sizes.
        pads: Items before each axis that its first tile reaches.
        reach: Items along an axis that belong to a tile.
    """

    channels: int
    sizes: tuple[int, ...]
    pads: tuple[int, ...]
    reach: int

    def window(self, axis: int, tiles: Range, step: int) -> Range:
        """Return the part of an axis that some of its tiles touch."""
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
        crew: Number of blocks in progress at a time, one per worker; 0 if all workers
            share one.
        at_once: Most samples that are transformed at a time.
    """

    minimal: Minimal
    batch: int
    source: Image
    result: Image
    ranges: tuple[tuple[Range, ...], ...]
    samples: int
    crew: int
    at_once: int

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
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
        """Return the tile rows of a block."""
        start, stop = self.ranges[0][block.band]
        return stop - start

    def tiles(self, block: Block) -> int:
        """Return the tiles of a block."""
        return self.rows(block) * (block.samples[1] - block.samples[0]) * self.columns

    def blocks(self, part: int = 0, parts: int = 1) -> Iterator[Block]:
        """Yield every block in order, or those of one of several equal parts."""
        chunks, bands = -(-self.batch // self.samples), len(self.ranges[0])
        count = chunks * bands
        for i in range(part * count // parts, (part + 1) * count // parts):
            chunk, band = divmod(i, bands)
            yield Block(band, _share(self.batch, chunk, chunks))

    def pieces(self, block: Block) -> Iterator[Piece]:
        """Yield the pieces of a block; a list of thousands would take memory too."""
        start, stop = block.samples
        chunks = -(-(stop - start) // self.at_once)
        for chunk in range(chunks):
            low, high = _share(stop - start, chunk, chunks)
            for part in range(len(self.ranges[1]) if self.rank > 1 else 1):
                yield (start + low, start + high), part

    def block_items(self, image: Image) -> int:
        """Return the items of an image's largest block of transformed tiles."""
        rows = max(stop - start for start, stop in self.ranges[0])
        return self.values * rows * self.samples * self.columns * image.channels

    def scratch_items(self, *, adding: bool) -> tuple[int, int]:
        """Return the items of the two scratch arrays of one worker.

        If `adding`, they also hold a piece of the result before it is added.
        """
        tiles = [max(b - a for a, b in ranges) for ranges in self.ranges]
        needs = [[0], [0]]
        for image in (self.source, self.result):
            spans = [
                max(b - a for a, b in self._windows(image, axis))
                for axis in range(self.rank)
            ]
            channels = image.channels
            items = intermediate_items(self.minimal.points, tiles, spans, channels)
            for need, most in zip(needs, items, strict=True):
                need.append(most)
        if adding:  # `spans` and `channels` are now those of the result
            needs[self.rank % 2].append(math.prod(spans) * channels)
        return self.at_once * max(needs[0]), self.at_once * max(needs[1])

    def band_regions(self, image: Image, dtype: str) -> list[Region]:
        """List band matrices, transposed as BLAS is faster so, by axis and range."""
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
    # Bands of the first axis, and how many samples of them are a block.
    bands = pieces(tiles[0], -(-tiles[0] // _STRETCH))
    rows = max(stop - start for start, stop in bands)
    tile_bytes = minimal.points ** len(tiles) * problem.itemsize  # of one channel
    sample_bytes = tile_bytes * rows * math.prod(tiles[1:]) * (c + k)
    filter_bytes = tile_bytes * math.prod(problem.w_shape[:2])
    samples, crew = _samples(
        problem.batch, len(bands), sample_bytes, filter_bytes, workers
    )
    # Pieces of the other axes: enough of them if all workers share a block.
    ranges = [tuple(bands)]
    for axis, count in enumerate(tiles[1:], 1):
        parts = 1
        if axis == 1:
            least = 1 if crew else -(-2 * workers // samples)
            parts = max(-(-count // _STRETCH), least)
        ranges.append(tuple(pieces(count, min(parts, count))))
    plan = Plan(
        minimal,
        problem.batch,
        Image(c, source, pads, minimal.points),
        Image(k, result, (0,) * len(result), minimal.step),
        tuple(ranges),
        samples,
        crew,
        at_once=1,
    )
    # Samples to transform at once, so that intermediate results fit the cache.
    even, odd = plan.scratch_items(adding=False)
    most = _PIECE_BYTES // max(1, max(even, odd) * problem.itemsize)
    if not crew:  # enough pieces for all workers
        parts = len(ranges[1]) if len(ranges) > 1 else 1
        most = min(most, samples * parts // (2 * workers))
    return replace(plan, at_once=max(1, min(samples, most)))


def _samples(
    batch: int, bands: int, sample_bytes: int, filter_bytes: int, workers: int
) -> tuple[int, int]:
    """Return the samples of a block and the crew, as in `Plan`."""
    most = min(_BLOCK_SAMPLES, max(1, _OWN_BYTES // sample_bytes))
    chunks = -(-batch // most)
    while chunks < batch and bands * chunks % workers:
        chunks += 1
    blocks = bands * -(-batch // -(-batch // chunks))
    balance = blocks / (workers * -(-blocks // workers))
    if filter_bytes <= _OWN_FILTER and balance >= _OWN_BALANCE:
        return -(-batch // chunks), min(workers, blocks)
    room = max(_BLOCK_BYTES, filter_bytes)
    most = min(_BLOCK_SAMPLES, max(1, room // sample_bytes))
    return -(-batch // -(-batch // most)), 0


def _images(
    problem: ConvProblem,
) -> tuple[tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...]], tuple[int, ...]]:
    """Return (channels, sizes) of source and result, and the source's padding."""
    x = problem.x_shape[1], problem.x_shape[2:]
    y = problem.y_shape[1], problem.y_shape[2:]
    if problem.direction is Direction.BACKWARD_DATA:
        return y, x, tuple(TAPS - 1 - pad for pad in problem.padding)
    return x, y, problem.padding


def _tile(problem: ConvProblem, result: Sequence[int]) -> int:
    """Return the m of F(m, 3) with the least arithmetic; the smaller one on a tie.

    In three dimensions this is always the smallest: errors multiply with every axis.
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
    """Split `range(total)` into at most `parts` pieces of nearly equal size."""
    return [_share(total, i, parts) for i in range(parts)]


def _share(total: int, part: int, parts: int) -> Range:
    return part * total // parts, (part + 1) * total // parts
