"""Pack blocks with known live ranges into one arena (dynamic storage allocation).

Finding the smallest arena is NP-hard. Its lower bound, the peak of live bytes, is
mostly reached by one of a few allocation heuristics, which differ in the order of
blocks and in the choice of gaps; the best result counts. If none reaches the bound,
blocks at the top of the arena are placed earlier and the rest again (`squeaky_wheel`),
within a limit of work.

Some blocks may have fixed offsets, such as those that two programs share. Then only
heuristics that work around fixed blocks are used.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mucudnn.passes.placement.heuristics import Block, by_time, in_gaps, on_top
from mucudnn.passes.placement.squeaky_wheel import SqueakyWheel

__all__ = ["Block", "Packing", "live_peak", "pack", "placing_orders"]

_WORK = 20_000_000
_ROUNDS = 5000


@dataclass(frozen=True, slots=True)
class Packing:
    """Offsets of blocks by name, and the size of the arena in bytes."""

    offsets: Mapping[str, int]
    nbytes: int


def pack(
    blocks: Sequence[Block],
    *,
    fixed: Mapping[str, int] | None = None,
    work: int = _WORK,
) -> Packing:
    """Assign offsets such that blocks alive at the same time do not overlap.

    Args:
        blocks: Blocks with distinct names; aligned sizes give aligned offsets.
        fixed: Offsets of fixed blocks, which do not overlap.
        work: Limit of compared pairs of blocks; beyond it only heuristics of
            near-linear time are tried.
    """
    pinned = fixed or {}
    solid = [block for block in blocks if block.nbytes]
    pinned_offsets = {
        i: pinned[b.name] for i, b in enumerate(solid) if b.name in pinned
    }
    tops = (offset + solid[i].nbytes for i, offset in pinned_offsets.items())
    bound = max(live_peak(solid), *tops, 0)
    best: Sequence[int] = ()
    height: float = math.inf
    for offsets in _attempts(solid, pinned_offsets, bound, work):
        top = _height(solid, offsets)
        if top < height:
            best, height = offsets, top
        if height <= bound:
            break
    found = {block.name: 0 for block in blocks} | dict(pinned)
    found |= {block.name: offset for block, offset in zip(solid, best, strict=True)}
    return Packing(MappingProxyType(found), _height(solid, best))


def live_peak(blocks: Sequence[Block]) -> int:
    """Return the peak of live bytes, a lower bound of the arena."""
    change: Counter[int] = Counter()
    for block in blocks:
        change[block.first] += block.nbytes
        change[block.last + 1] -= block.nbytes
    used = itertools.accumulate(change[moment] for moment in sorted(change))
    return max(used, default=0)


def _height(blocks: Sequence[Block], offsets: Sequence[int]) -> int:
    return max((o + b.nbytes for o, b in zip(offsets, blocks, strict=True)), default=0)


def _attempts(
    blocks: Sequence[Block], fixed: Mapping[int, int], bound: int, work: int
) -> Iterator[list[int]]:
    """Yield offsets by one heuristic after another, the fast ones first."""
    if not fixed:
        mirrored = [Block(b.name, b.nbytes, -b.last, -b.first) for b in blocks]
        for best_fit in (False, True):
            yield by_time(blocks, best_fit=best_fit)
            yield by_time(mirrored, best_fit=best_fit)
    free = [i for i in range(len(blocks)) if i not in fixed]
    orders = placing_orders(blocks, free)
    for order in orders[:2]:
        yield on_top(blocks, order, fixed)
    rounds = min(_ROUNDS, 2 * work // (len(blocks) ** 2 + 1))
    found = []
    for order in orders[:rounds]:
        offsets = in_gaps(blocks, order, fixed=fixed)
        found.append((_height(blocks, offsets), order, offsets))
        yield offsets
    if rounds <= len(orders):
        return
    _, order, offsets = min(found)
    wheel = SqueakyWheel(order)
    for _ in range(rounds - len(orders)):
        wheel.judge(_height(blocks, offsets))
        ends = ((i, offsets[i] + blocks[i].nbytes) for i in wheel.order)
        wheel.reorder(i for i, end in ends if end > bound)
        offsets = in_gaps(blocks, wheel.order, fixed=fixed)
        yield offsets


def placing_orders(blocks: Sequence[Block], selected: Sequence[int]) -> list[list[int]]:
    """Return several orders in which to place some of the blocks."""
    return [sorted(selected, key=key) for key in _keys(blocks)]


def _keys(blocks: Sequence[Block]) -> tuple[Callable[[int], tuple[int, ...]], ...]:
    """Return sort keys: by lifetime, by area, by size, by start and by end."""

    def life(i: int) -> int:
        return blocks[i].last - blocks[i].first + 1

    return (
        lambda i: (-life(i), -blocks[i].nbytes, blocks[i].first),
        lambda i: (-life(i) * blocks[i].nbytes, blocks[i].first),
        lambda i: (-blocks[i].nbytes, -life(i), blocks[i].first),
        lambda i: (blocks[i].first, -blocks[i].last),
        lambda i: (-blocks[i].last, blocks[i].first),
    )
