"""Give blocks with known lives offsets in one arena (dynamic storage allocation).

Finding the smallest arena is NP-hard; its lower bound, the most bytes alive at once, is
mostly met by one of a few allocation heuristics. They differ in the order of blocks and
in the free gap that a block takes; the best result counts. Where none meets the bound,
the blocks at the top of the arena are placed earlier and the rest again
(`squeaky_wheel`), as long as the work allowed lasts.

Some blocks may have their place already: what two programs share has to lie at the same
place in both. Then only heuristics that can work around them are used.
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
    """Block -> offset, and the bytes of the arena."""

    offsets: Mapping[str, int]
    nbytes: int


def pack(
    blocks: Sequence[Block],
    *,
    fixed: Mapping[str, int] | None = None,
    work: int = _WORK,
) -> Packing:
    """Offsets for blocks such that those alive together do not overlap.

    Args:
        blocks: With distinct names; their sizes decide the offsets' alignment.
        fixed: Block -> offset of those that must lie there, beside each other; all
            others are placed around them.
        work: Bound on the pairs of blocks looked at; beyond it only heuristics that
            take near-linear time are tried.
    """
    pinned = fixed or {}
    solid = [block for block in blocks if block.nbytes]
    held = {i: pinned[b.name] for i, b in enumerate(solid) if b.name in pinned}
    tops = (offset + solid[i].nbytes for i, offset in held.items())
    bound = max(live_peak(solid), *tops, 0)
    best: Sequence[int] = ()
    height: float = math.inf
    for offsets in _attempts(solid, held, bound, work):
        top = _height(solid, offsets)
        if top < height:
            best, height = offsets, top
        if height <= bound:
            break
    found = {block.name: 0 for block in blocks} | dict(pinned)
    found |= {block.name: offset for block, offset in zip(solid, best, strict=True)}
    return Packing(MappingProxyType(found), _height(solid, best))


def live_peak(blocks: Sequence[Block]) -> int:
    """The most bytes alive at once: no arena is smaller."""
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
    """Offsets by one heuristic after the other, the quick ones first."""
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


def placing_orders(blocks: Sequence[Block], some: Sequence[int]) -> list[list[int]]:
    """Orders to place some of the blocks in, by several heuristics."""
    return [sorted(some, key=key) for key in _keys(blocks)]


def _keys(blocks: Sequence[Block]) -> tuple[Callable[[int], tuple[int, ...]], ...]:
    """Which block is placed first: the long-lived, the large, those of large area."""

    def life(i: int) -> int:
        return blocks[i].last - blocks[i].first + 1

    return (
        lambda i: (-life(i), -blocks[i].nbytes, blocks[i].first),
        lambda i: (-life(i) * blocks[i].nbytes, blocks[i].first),
        lambda i: (-blocks[i].nbytes, -life(i), blocks[i].first),
        lambda i: (blocks[i].first, -blocks[i].last),
        lambda i: (-blocks[i].last, blocks[i].first),
    )
