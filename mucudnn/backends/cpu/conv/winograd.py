"""WINOGRAD_NONFUSED: transform, batched matrix product, inverse transform.

With V the transformed tiles of the source, U the transformed filter and Y those of dy,
every value of a tile has its own matrix product: M = V U (forward and, with the filter
flipped and transposed, backward data) or S = Yᵀ V (backward filter). The last is the
adjoint of the first: dw = Gᵀ [sum over tiles of (Bᵀ x B) ⊙ (A dy Aᵀ)] G.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv import algorithm
from mucudnn.backends.cpu.conv.algorithm import Algorithm, Arrays, Region
from mucudnn.backends.cpu.conv.winograd_transforms import (
    MINIMAL,
    TAPS,
    Filter,
    Minimal,
    analyse,
    band,
    filter_region,
    synthesise,
)
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction


def excluded(problem: ConvProblem) -> str | None:
    """Return a reason unless stride and dilation are 1 and kernel sizes are 3."""
    for name, value, needed in (
        ("kernel", problem.w_shape[2:], TAPS),
        ("stride", problem.stride, 1),
        ("dilation", problem.dilation, 1),
    ):
        if any(v != needed for v in value):
            return f"{name} is {value}, Winograd F(m, 3) needs {needed} on every axis"
    return None


class Winograd:
    """A problem that is not `excluded`, cut into blocks of tiles."""

    def __init__(self, problem: ConvProblem, workers: int) -> None:
        self._problem = problem
        self._plan = make_plan(problem, workers)
        self._regions = _regions(problem, self._plan, workers)
        self.nbytes = algorithm.nbytes(self._regions)

    def run(
        self, arrays: Arrays, workspace: Any, workers: Workers, accumulate: bool
    ) -> None:
        """See `Kernel.run`."""
        problem, plan, minimal = self._problem, self._plan, self._plan.minimal
        a, b, out = arrays
        regions = algorithm.carve(workspace, self._regions)
        kernel, inner, outer, spare, even, odd, *bands = regions
        adjoint = problem.direction is Direction.BACKWARD_FILTER
        half, scratch = len(bands) // 2, (even, odd)
        matrix = np.array(minimal.data, np.float64)
        source = Tiles(plan, plan.source, a, matrix, inner, bands[:half], scratch)
        matrix, image = np.array(minimal.output, np.float64).T, b if adjoint else out
        result = Tiles(plan, plan.result, image, matrix, outer, bands[half:], scratch)
        w = Filter(problem, minimal, kernel)
        if adjoint:
            sum_gradient = _sum_apart if plan.crew else _sum_together
            sum_gradient(plan, source, result, w, spare, workers)
            w.gradient(out, spare, accumulate, workers)
        else:
            w.transform(b, workers)
            _correlate(plan, source, result, w, workers, accumulate)


WINOGRAD_NONFUSED = Algorithm("WINOGRAD_NONFUSED", Winograd, excluded)
Product = tuple[int, slice]
"""A value of the tiles and some rows of its matrix product."""


def _regions(problem: ConvProblem, plan: "Plan", nworkers: int) -> list[Region]:
    """List the values of filter, source and result; workers' scratch; band matrices."""
    dtype = problem.dtype
    adjoint = problem.direction is Direction.BACKWARD_FILTER
    rooms = max(1, plan.crew)
    # Each worker has a sum and the next block's summand.
    kernels = 2 * plan.crew if adjoint and plan.crew else 1
    k, c_per_group, *taps = problem.w_shape
    spare = max(k, math.prod(taps)) * c_per_group if adjoint else 0
    even, odd = plan.scratch_items(adding=not adjoint)
    return [
        filter_region(problem, plan.minimal, kernels),
        ((rooms, plan.block_items(plan.source)), dtype),
        ((rooms, plan.block_items(plan.result)), dtype),
        ((nworkers, spare), dtype),
        ((nworkers, even), dtype),
        ((nworkers, odd), dtype),
        *plan.band_regions(plan.source, dtype),
        *plan.band_regions(plan.result, dtype),
    ]


def _correlate(
    plan: "Plan",
    source: "Tiles",
    result: "Tiles",
    w: Filter,
    workers: Workers,
    add: bool,
) -> None:
    """Transform the source, multiply by the filter, transform the result back."""
    kernel = w.values()

    def own_block(worker: int, block: Block) -> None:
        for piece in plan.pieces(block):
            source.read(block, worker, piece)
        v, m = (t.values(block, kernel.shape[1], worker) for t in (source, result))
        _product(v, kernel, m)
        for piece in plan.pieces(block):
            result.write(block, add, worker, piece)

    if plan.crew:  # every worker takes blocks of its own through all phases
        workers.each(plan.blocks(), own_block, at_most=plan.crew)
        return
    # Else all workers share every block, and wait for each other between its phases.
    for block in plan.blocks():
        v, m = (t.values(block, kernel.shape[1]) for t in (source, result))

        def multiply(_: int, item: Product, v: Any = v, m: Any = m) -> None:
            value, rows = item
            _product(v[value, :, rows], kernel[value], m[value, :, rows])

        workers.each(plan.pieces(block), partial(source.read, block))
        workers.each(_products(plan, v.shape[2], workers), multiply)
        workers.each(plan.pieces(block), partial(result.write, block, add))


def _sum_apart(
    plan: "Plan", x: "Tiles", dy: "Tiles", dw: Filter, _: Any, workers: Workers
) -> None:
    """Sum the transformed filter's gradient over the tiles, one part per worker."""

    def work(_: int, part: int) -> None:
        own = part
        for block in plan.blocks(part, plan.crew):
            for piece in plan.pieces(block):
                x.read(block, part, piece)
                dy.read(block, part, piece)
            out = dw.values(own)
            v, y = (t.values(block, out.shape[1], part) for t in (x, dy))
            _product(y.swapaxes(2, 3), v, out)
            if own != part:
                dw.add(part, [own])
            own = plan.crew + part

    # The result does not depend on which worker takes a part: sums belong to the part.
    workers.each(range(plan.crew), work)
    dw.add(0, range(1, plan.crew), workers)


def _sum_together(
    plan: "Plan", x: "Tiles", dy: "Tiles", dw: Filter, spare: Any, workers: Workers
) -> None:
    """Sum the transformed filter's gradient over all tiles, block by block."""
    sums = dw.values()
    for i, block in enumerate(plan.blocks()):
        v, y = (t.values(block, sums.shape[1]) for t in (x, dy))

        def read(worker: int, piece: Piece, block: Block = block) -> None:
            x.read(block, worker, piece)
            dy.read(block, worker, piece)

        def multiply(
            worker: int, item: Product, v: Any = v, y: Any = y, i: int = i
        ) -> None:
            value, rows = item
            out = sums[value, :, rows]
            # Later products take a detour: a matrix product cannot add to its output.
            fresh = out
            if i > 0:
                fresh = spare[worker, : out.size].reshape(out.shape)
            _product(y[value, :, :, rows].swapaxes(1, 2), v[value], fresh)
            if i > 0:
                np.add(out, fresh, out=out)

        workers.each(plan.pieces(block), read)
        workers.each(_products(plan, sums.shape[2], workers), multiply)


def _products(plan: "Plan", rows: int, workers: Workers) -> list[Product]:
    parts = min(rows, -(-4 * workers.count // plan.values))
    return [
        (value, slice(start, stop))
        for value in range(plan.values)
        for start, stop in pieces(rows, parts)
    ]


def _product(a: Any, b: Any, out: Any) -> None:
    """Multiply matrices, one pair per group."""
    if a.shape[-1] == 1:
        np.multiply(a, b, out=out)
    else:
        np.matmul(a, b, out=out)


# The cut of a Winograd convolution: tile size, blocks of tiles, and workspace.
#
# All three directions relate a source image, read with overlap, to a result image, read
# or written tile by tile: x and y, dy and dx, x and dy. The plan speaks of these two.
#
# The tiles are processed in blocks: a range of tile rows (of the first image axis) of a
# range of samples. A block's transforms should stay in cache between the phases. If the
# filter is small, every worker takes blocks of its own through all phases without
# waiting for the others. If it is large, reading it once a block is the main cost, and
# all workers share one block after another. The workspace grows with the micro-batch up
# to `_OWN_BYTES` a worker, or `_BLOCK_BYTES`.


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
    """The source or the result image, with the channels of all groups.

    A tile consists of `reach` items of each axis; the first begins `pads` items before
    it.
    """

    channels: int
    sizes: tuple[int, ...]
    pads: tuple[int, ...]
    reach: int

    def window(self, axis: int, tiles: Range, step: int) -> Range:
        """Return the part of an axis that a range of its tiles touches.

        Empty if the tiles see padding only.
        """
        size, pad = self.sizes[axis], self.pads[axis]
        start = min(max(0, tiles[0] * step - pad), size)
        stop = min(size, (tiles[1] - 1) * step - pad + self.reach)
        return start, max(stop, start)


@dataclass(frozen=True, slots=True)
class Block:
    """Tiles that are transformed, multiplied and transformed back together.

    `band` is the index of the range of tile rows in `Plan.ranges[0]`.
    """

    band: int
    samples: Range


@dataclass(frozen=True, slots=True)
class Plan:
    """The cut of one problem; tiles partition `result`, and overlap in `source`.

    `ranges` are ranges of tiles an axis: bands of the first axis, the parallel pieces
    of the second, all of the third. A block has up to `samples` samples, transformed up
    to `at_once` at a time. `crew` is the number of blocks in progress at a time, one
    per worker; 0 if all workers share one.
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
        return int(self.minimal.points**self.rank)

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
        rows = _widest(self.ranges[0])
        return self.values * rows * self.samples * self.columns * image.channels

    def scratch_items(self, *, adding: bool) -> tuple[int, int]:
        """Return the items of the two scratch arrays of one worker; see `analyse`."""
        tiles, needs = list(map(_widest, self.ranges)), [0, 0]
        for image in (self.source, self.result):
            spans = [_widest(self._windows(image, axis)) for axis in range(self.rank)]
            # The earlier axes are items of the image still, the others are values.
            for axis in range(1, self.rank):
                values = self.minimal.points ** (self.rank - axis)
                values *= math.prod(tiles[axis:]) * math.prod(spans[:axis])
                needs[axis % 2] = max(needs[axis % 2], values * image.channels)
        if adding:  # `spans` are now those of the result
            summed = math.prod(spans) * self.result.channels
            needs[self.rank % 2] = max(needs[self.rank % 2], summed)
        return self.at_once * needs[0], self.at_once * needs[1]

    def band_regions(self, image: Image, dtype: str) -> list[Region]:
        """List band matrices, transposed as BLAS is faster so, by axis and range."""
        regions: list[Region] = []
        for axis, ranges in enumerate(self.ranges):
            windows = zip(ranges, self._windows(image, axis), strict=True)
            for (first, last), (low, high) in windows:
                rows = self.minimal.points * (last - first)
                regions.append(((high - low, rows), dtype))
        return regions

    def _windows(self, image: Image, axis: int) -> list[Range]:
        step = self.minimal.step
        return [image.window(axis, tiles, step) for tiles in self.ranges[axis]]


def make_plan(problem: ConvProblem, workers: int) -> Plan:
    """Choose tile size and cuts for a problem that Winograd can run."""
    (_, c, *source), (_, k, *result) = problem.x_shape, problem.y_shape
    pads = problem.padding
    if problem.direction is Direction.BACKWARD_DATA:
        c, source, k, result = k, result, c, source
        pads = tuple(TAPS - 1 - pad for pad in pads)
    minimal = MINIMAL[_tile(problem, result)]
    tiles = [-(-size // minimal.step) for size in result]
    # Bands of the first axis, and how many samples of them are a block.
    bands = pieces(tiles[0], -(-tiles[0] // _STRETCH))
    rows = _widest(bands)
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
        Image(c, tuple(source), pads, minimal.points),
        Image(k, tuple(result), (0,) * len(result), minimal.step),
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


def _tile(problem: ConvProblem, result: Sequence[int]) -> int:
    """Return the m of F(m, 3) with the least arithmetic; the smaller one on a tie."""
    choices = sorted(MINIMAL)
    # In three dimensions always the smallest: errors multiply with every axis.
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


def _widest(ranges: Sequence[Range]) -> int:
    return max(stop - start for start, stop in ranges)


def pieces(total: int, parts: int) -> Sequence[Range]:
    """Split `range(total)` into at most `parts` pieces of nearly equal size."""
    return [_share(total, i, parts) for i in range(parts)]


def _share(total: int, part: int, parts: int) -> Range:
    return part * total // parts, (part + 1) * total // parts


# Tiles of one image: their values in the workspace, and the transforms in and out.
#
# A block's values are stored as (points^(rank - 1), points * tile rows, samples, tiles
# of a row * channels). `analyse` can write this for one sample in one matrix product,
# and read as (values, tiles, channels) it is one dense matrix per value.


class Tiles:
    """Transforms between an image and the values of its tiles.

    `array` has the data of the image, (N, channels, *spatial), of any strides;
    `matrix`, (points, reach of a tile), is applied along every axis. `values` holds
    those of a block (1 or workers, items), `bands` the matrices that
    `Plan.band_regions` lists, `scratch` two arrays (workers, items).
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

    def read(self, block: Block, worker: int, piece: Piece) -> None:
        """Transform a piece of the image."""
        pictures, bands, values = self._cut(block, piece, worker)
        scratch = self._scratch[worker]
        analyse(pictures, bands, self._plan.minimal.points, values, scratch)

    def write(self, block: Block, add: bool, worker: int, piece: Piece) -> None:
        """Transform a piece back, and write it to the image or add it."""
        pictures, bands, values = self._cut(block, piece, worker)
        scratch = self._scratch[worker]
        synthesise(values, bands, self._plan.minimal.points, pictures, scratch, add=add)

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
