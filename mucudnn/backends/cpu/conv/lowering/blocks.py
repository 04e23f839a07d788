"""Blocks of patches of a few kilobytes: their filter columns and their gathering.

A block is planned once, as views with an axis of samples, and then filled for one
sample after another, because planning in Python costs as much as copying.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv.lowering.gather import (
    Axis,
    Gather,
    as_matrix,
    overlap,
    tap_windows,
)
from mucudnn.backends.cpu.conv.lowering.patches import matrix_buffer

__all__ = ["Block", "Blocks", "PatchBlock", "cuts", "pointwise", "reach", "tap_block"]


@dataclass(frozen=True, slots=True)
class Block:
    """A contiguous range of filter columns.

    Attributes:
        groups: Range of groups.
        channels: Range of channels of each group.
        taps: Range of taps along every kernel axis.
        columns: Range of columns in a filter's rows.
    """

    groups: slice
    channels: slice
    taps: tuple[slice, ...]
    columns: slice

    @property
    def kernel(self) -> tuple[int, ...]:
        """Number of taps along each axis."""
        return (*map(_length, self.taps),)


class Blocks:
    """Filter columns, (channel, tap) or channels last (tap, channel), cut into blocks.

    Args:
        gather: Gather that reads the taps.
        groups: Groups of the filter.
        channels: Columns of a filter for each tap.
        limit: Most columns of a block, over all its groups.
        taps_limit: Most taps of a block.
        last: Whether channels are last in memory.
        spanning: Whether a block may span several groups.
    """

    def __init__(
        self,
        gather: Gather,
        groups: int,
        channels: int,
        limit: int,
        *,
        taps_limit: int,
        last: bool,
        spanning: bool,
    ) -> None:
        kernel = tuple(axis.taps for axis in gather.axes)
        per_tap = min(channels, limit) if last else 1
        some = _tap_block(kernel, max(1, min(taps_limit, limit // per_tap)))
        if last and per_tap < channels:
            some = (1,) * len(kernel)
        partial = some != kernel and not last
        fits = per_tap if last else 1 if partial else limit // math.prod(some)
        self._channels = list(cuts(channels, max(1, fits)))
        boxes = map(cuts, kernel, some)
        self._taps = list(itertools.product(*boxes))
        whole = channels * math.prod(kernel)
        alone = not spanning or len(self._channels) * len(self._taps) > 1
        self.most_groups = 1 if alone else max(1, min(groups, limit // whole))
        self.groups = list(cuts(groups, self.most_groups))
        self._kernel, self._count, self._last = kernel, channels, last

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Return the disjoint ranges of (groups, channels)."""
        return itertools.product(self.groups, self._channels)

    def of_groups(self, groups: slice) -> Iterator[Block]:
        """Yield all blocks of a range of groups."""
        for channels in self._channels:
            yield from self.of_part(groups, channels)

    def of_part(self, groups: slice, channels: slice) -> Iterator[Block]:
        """Yield the blocks of one range of channels, one per box of taps."""
        for taps in self._taps:
            first = self._flat([t.start for t in taps])
            last = self._flat([t.stop - 1 for t in taps])
            if self._last:
                start = first * self._count + channels.start
                stop = last * self._count + channels.stop
            else:
                each = math.prod(self._kernel)
                start = channels.start * each + first
                stop = (channels.stop - 1) * each + last + 1
            yield Block(groups, channels, taps, slice(start, stop))

    @property
    def terms(self) -> int:
        """Columns of the largest block, over all its groups."""
        taps = max(math.prod(map(_length, box)) for box in self._taps)
        channels = max(map(_length, self._channels))
        return self.most_groups * channels * taps

    def _flat(self, tap: Sequence[int]) -> int:
        index = 0
        for size, j in zip(self._kernel, tap, strict=True):
            index = index * size + j
        return index


def _tap_block(kernel: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return the largest box of at most `limit` taps that are contiguous columns."""
    box, room = [], limit
    for size in reversed(kernel):
        box.append(max(1, min(size, room)))
        room = room // size
    return tuple(reversed(box))


class PatchBlock:
    """A block of patches of one tile.

    Args:
        source: (N, G, C, *spatial).
        gather: Positions to read.
        block: Columns to fill.
        tile: Outputs along each axis, with explicit bounds.
        buffers: Flat buffers for the patches and for a zero-padded copy.
        last: Whether channels are last in memory.
    """

    def __init__(
        self,
        source: Any,
        gather: Gather,
        block: Block,
        tile: Sequence[slice],
        buffers: Sequence[Any],
        *,
        last: bool,
    ) -> None:
        part = source[:, block.groups, block.channels]
        self._steps: list[tuple[Any, Any, Any, Any]] = []
        self._by_tap: tuple[Any, Any, list[Axis], Sequence[slice]] | None = None
        rank = len(gather.axes)
        if pointwise(gather, source.shape[3:]):
            self.matrix = as_matrix(part[(..., *tile)], 1, rank)
            return
        target, matrix = tap_block(buffers[0], block, tile, last=last)
        self.matrix = matrix[None]
        axes = [
            replace(
                axis,
                start=axis.start + taps.start * axis.tap_step,
                taps=taps.stop - taps.start,
            )
            for axis, taps in zip(gather.axes, block.taps, strict=True)
        ]
        reads = [
            axis.reads(t.start, t.stop) for axis, t in zip(axes, tile, strict=True)
        ]
        sizes = part.shape[3:]
        if all(r.start >= 0 and r.stop <= n for r, n in zip(reads, sizes, strict=True)):
            windows = tap_windows(part, axes, tile, (0,) * rank)
            self._steps.append((None, None, target, windows))
            return
        lengths = [len(r) for r in reads]
        room = buffers[1].size // (part.shape[1] * math.prod(lengths))
        if not room:
            target[...] = 0
            self._by_tap = part, target, axes, tile
            return
        self._pad(part, target, axes, tile, reads, buffers[1], room)

    def fill(self, n: int) -> None:
        """Gather the patches of sample `n` into the block."""
        for inner, source, target, windows in self._steps:
            if inner is None:
                np.copyto(target, windows[n])
            else:
                np.copyto(inner, source[n])
                np.copyto(target, windows)
        if self._by_tap is not None:
            self._fill_by_tap(n, *self._by_tap)

    def _pad(
        self,
        part: Any,
        target: Any,
        axes: Sequence[Axis],
        tile: Sequence[slice],
        reads: Sequence[range],
        buffer: Any,
        room: int,
    ) -> None:
        """Plan gathering through a zero-padded copy of as many channels as fit."""
        groups, channels = part.shape[1:3]
        lengths = [len(r) for r in reads]
        have, want = overlap(reads, part.shape[3:])
        each = groups * math.prod(lengths)
        some = min(room, channels)
        padded = buffer[: some * each].reshape(groups, some, *lengths)
        padded[...] = 0  # kept from one sample to the next
        for cut in cuts(channels, some):
            copy = padded[:, : cut.stop - cut.start]
            windows = tap_windows(copy, axes, tile, [-r.start for r in reads])
            inner, source = copy[(..., *want)], part[(slice(None), slice(None), cut)]
            self._steps.append((inner, source[(..., *have)], target[:, cut], windows))

    @staticmethod
    def _fill_by_tap(
        n: int, part: Any, target: Any, axes: Sequence[Axis], tile: Sequence[slice]
    ) -> None:
        """Copy tap by tap, where a padded copy would not fit the buffer."""
        for tap in itertools.product(*(range(axis.taps) for axis in axes)):
            if (hit := reach(axes, tap, tile, part.shape[3:])) is not None:
                written, read = hit
                np.copyto(target[(..., *tap, *written)], part[(n, ..., *read)])


def pointwise(gather: Gather, spatial: Sequence[int]) -> bool:
    """Return whether each output reads exactly the pixel at its own position."""
    return all(
        (axis.start, axis.out_step, axis.taps, axis.outs) == (0, 1, 1, size)
        for axis, size in zip(gather.axes, spatial, strict=True)
    )


def reach(
    axes: Sequence[Axis],
    tap: Sequence[int],
    tile: Sequence[slice],
    sizes: Sequence[int],
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the outputs (within a tile) that a tap reaches, and their inputs."""
    outputs, read = [], []
    for axis, j, t, size in zip(axes, tap, tile, sizes, strict=True):
        low, high = axis.inside(j, size, t.start, t.stop)
        if low == high:
            return None
        at, step = axis.start + j * axis.tap_step, axis.out_step
        read.append(slice(at + low * step, at + (high - 1) * step + 1, step))
        outputs.append(slice(low - t.start, high - t.start))
    return tuple(outputs), tuple(read)


def tap_block(
    buffer: Any, block: Block, tile: Sequence[slice], *, last: bool
) -> tuple[Any, Any]:
    """View a buffer as (groups, channels, *taps, *outs) and (groups, terms, pixels)."""
    groups, channels = map(_length, (block.groups, block.channels))
    kernel, outs = block.kernel, map(_length, tile)
    rank = len(kernel)
    terms = (*kernel, channels) if last else (channels, *kernel)
    shape = (groups, *terms, *outs)
    patches, matrix = matrix_buffer(buffer, shape, 1 + rank, by_column=last)
    if last:
        order = (*range(1, 1 + rank), *range(2 + rank, patches.ndim))
        patches = patches.transpose(0, 1 + rank, *order)
    return patches, matrix


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def cuts(total: int, block: int) -> Iterator[slice]:
    """Yield about equal parts, as many as blocks of this size would make."""
    count = -(-total // block)
    size = -(-total // max(1, count))
    for start in range(0, total, max(1, size)):
        yield slice(start, min(start + size, total))
