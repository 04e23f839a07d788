"""Virtual placement: map free memory in chunks behind contiguous addresses.

A tensor in several pieces is contiguous by virtual address (`page_table`) if all its
inner boundaries are chunk boundaries: the tail of one chunk, then whole chunks from
anywhere, then the head of another. Only free bytes in the middle of a chunk, and unused
heads and tails, are lost to fragmentation.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.schedule import Compute, Schedule
from mucudnn.passes.liveness import rounded
from mucudnn.passes.placement.layout import (
    Extent,
    PlacedStep,
    joined,
    layout_at,
    step_blocks,
    with_addresses,
    workspace_name,
)
from mucudnn.passes.placement.packing import SqueakyWheel, placing_orders
from mucudnn.passes.scheduling.problem import fastest_of
from mucudnn.passes.scheduling.step_plan import StepPlan


class FreeMemory:
    """The free memory below `end` at one time, beside taken extents in any order."""

    def __init__(self, taken: Iterable[Extent], end: int, chunk_bytes: int) -> None:
        self._free, self._chunk = list[Extent](), chunk_bytes
        start = 0
        for low, high in (*sorted(taken), (end, end)):
            if low > start:
                self._free.append(Extent(start, low))
            start = max(start, high)

    @property
    def most(self) -> int:
        """Bytes of the largest tensor that fits."""
        tails, runs, heads = self._ends()
        scattered = _longest(tails) + sum(map(_size, runs)) + _longest(heads)
        return max(_longest(self._free), scattered)

    def find(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Return the tightest free extent for a tensor, or several, or None."""
        if nbytes == 0:
            return (Extent(0, 0),)
        fitting = [e for e in self._free if _size(e) >= nbytes]
        if fitting:
            low = min(fitting, key=_size).start
            return (Extent(low, low + nbytes),)
        return self._scattered(nbytes)

    def _scattered(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Return a tail, as few whole chunks as possible, and a head."""
        tails, runs, heads = self._ends()
        left = nbytes - _longest(tails) - _longest(heads)
        whole = max(0, -(-left // self._chunk)) * self._chunk
        if whole > sum(map(_size, runs)):
            return None
        rest = max(0, nbytes - whole)
        tail, head = _tightest(tails, heads, rest)
        first = min(rest, _size(tail))
        found = [Extent(tail.stop - first, tail.stop)]
        found += _take_from_runs(runs, nbytes - rest)
        found.append(Extent(head.start, head.start + rest - first))
        return joined(piece for piece in found if _size(piece))

    def _ends(self) -> tuple[list[Extent], list[Extent], list[Extent]]:
        """Return free ends of chunks, runs of free chunks, and free beginnings.

        Ends and beginnings are of chunks that are not entirely free.
        """
        tails, runs, heads = list[Extent](), list[Extent](), list[Extent]()
        for start, stop in self._free:
            low = -(-start // self._chunk) * self._chunk
            high = stop // self._chunk * self._chunk
            if low > high:  # in the middle of a chunk
                continue
            if start < low:
                tails.append(Extent(start, low))
            if low < high:
                runs.append(Extent(low, high))
            if high < stop:
                heads.append(Extent(high, stop))
        return tails, runs, heads


def _size(extent: Extent) -> int:
    return extent.stop - extent.start


def _longest(extents: Iterable[Extent]) -> int:
    return max(map(_size, extents), default=0)


def _take_from_runs(runs: Iterable[Extent], nbytes: int) -> Iterator[Extent]:
    """Yield `nbytes` of whole chunks, longest runs first; the last may be partial."""
    for run in sorted(runs, key=_size, reverse=True):
        if not nbytes:
            return
        taken = min(nbytes, _size(run))
        nbytes -= taken
        yield Extent(run.start, run.start + taken)


def _tightest(
    tails: Iterable[Extent], heads: Iterable[Extent], nbytes: int
) -> tuple[Extent, Extent]:
    """Return the tightest tail and head (possibly empty) that hold `nbytes`."""
    nothing = Extent(0, 0)
    sized = sorted((_size(e), e) for e in (nothing, *heads))
    found = []
    for tail in (nothing, *tails):
        at = bisect.bisect_left(sized, (nbytes - _size(tail), nothing))
        if at < len(sized):
            found.append((_size(tail) + sized[at][0], tail, sized[at][1]))
    _, tail, head = min(found)
    return tail, head


# Place a step with virtual memory: tensors without a contiguous gap are scattered.
#
# Blocks are placed one after another in memory that is free during their whole life: in
# one extent if possible, else in several extents made contiguous by the page table.
# Only free bytes inside of chunks are lost. Residency intervals are not shrunk: copies
# run as planned. A convolution gets the fastest of its plans whose workspace fits when
# it runs.


Pieces = tuple[Extent, ...]

_WORK = 20_000_000
"""Limit of compared pairs of blocks."""

_ROUNDS = 12


def place_virtually(
    plan: StepPlan, arena_bytes: int, *, grows: bool = False
) -> PlacedStep | None:
    """Place a step in an arena of mappable memory; return None if it does not fit.

    Args:
        plan: The step to place; its profile has the chunk size.
        arena_bytes: Limit of the arena, rounded down to whole chunks.
        grows: Whether convolutions may use other plans than the step's.
    """
    chunks = plan.profile.mapping_costs
    if chunks is None:
        return None
    size, fronts = chunks.nbytes, plan.profile.fronts if grows else {}
    end = arena_bytes // size * size
    every, fixed = step_blocks(plan.schedule)
    pinned: dict[str, Pieces] = {
        block.name: (Extent(at, at + block.nbytes),)
        for block in every
        if (at := fixed.get(block.name)) is not None
    }
    if any(pieces[-1].stop > end for pieces in pinned.values()):
        return None
    # Workspaces of convolutions that may use other plans are placed behind the others.
    chosen_later = {workspace_name(node) for node in fronts}
    blocks = [block for block in every if block.name not in chosen_later]

    def free_during(first: int, last: int, places: Mapping[str, Pieces]) -> FreeMemory:
        taken = [
            piece
            for block in blocks
            if block.first <= last and first <= block.last
            for piece in places.get(block.name, ())
        ]
        return FreeMemory(taken, end, size)

    movable = [i for i, block in enumerate(blocks) if block.name not in pinned]
    longest, area, largest, *in_time = placing_orders(blocks, movable)
    orders = [in_time[0], area, largest, longest]
    rounds = min(_ROUNDS, _WORK // (1 + len(movable) ** 2))
    wheel = SqueakyWheel(orders[0])
    # After the given orders, what failed moves ahead in the next one.
    for attempt in range(max(1, rounds)):
        if attempt < len(orders):
            wheel.order = orders[attempt]
        places, failed = dict(pinned), list[int]()
        for i in wheel.order:
            block = blocks[i]
            pieces = free_during(block.first, block.last, places).find(block.nbytes)
            if pieces is None:
                failed.append(i)
            else:
                places[block.name] = pieces
        chosen = None
        if not failed:
            chosen = _place_workspaces(plan.schedule, fronts, places, free_during)
        if chosen is not None:
            offsets, pages = with_addresses(places, size)
            if chosen:
                plan = plan.with_plans({**plan.plans, **chosen})
            top = max((pieces[-1].stop for pieces in places.values()), default=0)
            if pages is not None:
                top = (1 + max(pages.chunks)) * size
            peak = plan.peak_bytes - plan.state_bytes
            return PlacedStep(plan, layout_at(plan.schedule, offsets, top, peak, pages))
        wheel.judge(sum(blocks[i].nbytes for i in failed))
        wheel.reorder(failed)
    return None


def _place_workspaces(
    schedule: Schedule,
    fronts: Mapping[str, Sequence[ConvPlan]],
    places: dict[str, Pieces],
    free_during: Callable[[int, int, Mapping[str, Pieces]], FreeMemory],
) -> dict[str, ConvPlan] | None:
    """Choose plans for nodes with fronts and place their workspaces, or None."""
    chosen = {}
    for at, instruction in enumerate(schedule.instructions):
        if not isinstance(instruction, Compute) or instruction.node not in fronts:
            continue
        name, free = instruction.node, free_during(at, at, places)
        most = free.most
        fits = [p for p in fronts[name] if rounded(p.workspace) <= most]
        if not fits:
            return None
        chosen[name] = fastest_of(fits)
        if nbytes := rounded(chosen[name].workspace):
            # `find` has room for it, as the plan was chosen by the free bytes.
            places[workspace_name(name)] = free.find(nbytes) or ()
    return chosen
