"""Give blocks with known lives offsets in one arena (dynamic storage allocation).

Finding the smallest arena is NP-hard; its lower bound, the most bytes alive at once, is
mostly met by one of a few greedy rules. They differ in the order of blocks and in the
gap that a block takes; the best result counts. Where none meets the bound, the blocks
at the top of the arena are placed earlier and the rest again (squeaky wheel
optimisation, Joslin & Clements 1999), as long as the work allowed lasts.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mucudnn.passes.fitting import Block, by_time, in_gaps, on_top

__all__ = ["Block", "Packing", "live_peak", "pack"]

_WORK = 20_000_000
_RETURN = 0.1


@dataclass(frozen=True, slots=True)
class Packing:
    """Block -> offset, and the bytes of the arena."""

    offsets: Mapping[str, int]
    nbytes: int


def pack(blocks: Sequence[Block], *, work: int = _WORK) -> Packing:
    """Offsets for blocks such that those alive together do not overlap.

    Args:
        blocks: With distinct names; their sizes decide the offsets' alignment.
        work: Bound on the pairs of blocks looked at; beyond it only rules that take
            near-linear time are tried.
    """
    empty = {block.name: 0 for block in blocks if not block.nbytes}
    solid = [block for block in blocks if block.nbytes]
    bound = live_peak(solid)
    best: list[int] = [0] * len(solid)
    height = sum(block.nbytes for block in solid) + 1

    for offsets in _attempts(solid, bound, work):
        top = _height(solid, offsets)
        if top < height:
            best, height = offsets, top
        if height <= bound:
            break
    placed = {block.name: o for block, o in zip(solid, best, strict=True)}
    return Packing(MappingProxyType(empty | placed), height if solid else 0)


def live_peak(blocks: Sequence[Block]) -> int:
    """The most bytes alive at once: no arena is smaller."""
    change: dict[int, int] = {}
    for block in blocks:
        change[block.first] = change.get(block.first, 0) + block.nbytes
        change[block.last + 1] = change.get(block.last + 1, 0) - block.nbytes
    used = peak = 0
    for moment in sorted(change):
        used += change[moment]
        peak = max(peak, used)
    return peak


def _height(blocks: Sequence[Block], offsets: Sequence[int]) -> int:
    return max((o + b.nbytes for o, b in zip(offsets, blocks, strict=True)), default=0)


def _attempts(blocks: Sequence[Block], bound: int, work: int) -> Iterator[list[int]]:
    """Offsets by one rule after the other, the quick ones first."""
    mirrored = [Block(b.name, b.nbytes, -b.last, -b.first) for b in blocks]
    for best_fit in (False, True):
        yield by_time(blocks, best_fit=best_fit)
        yield by_time(mirrored, best_fit=best_fit)
    orders = [sorted(range(len(blocks)), key=key) for key in _keys(blocks)]
    for order in orders[:2]:
        yield on_top(blocks, order)
    rounds = 2 * work // (len(blocks) ** 2 + 1)
    found = []
    for order in orders[:rounds]:
        offsets = in_gaps(blocks, order)
        found.append((_height(blocks, offsets), order, offsets))
        yield offsets
    if len(found) == len(orders):
        _, order, offsets = min(found)
        yield from _squeaky(blocks, bound, order, offsets, rounds - len(orders))


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


def _squeaky(
    blocks: Sequence[Block],
    bound: int,
    order: list[int],
    offsets: list[int],
    rounds: int,
) -> Iterator[list[int]]:
    """Again and again with the blocks that stick out earlier in the order.

    How much earlier is left to chance, and now and then the search returns to the best
    order so far: without that it goes round in circles.
    """
    chance = random.Random(0)
    best, best_order = _height(blocks, offsets), order
    for _ in range(rounds):
        rank = {i: float(r) for r, i in enumerate(order)}
        for i in order:
            if offsets[i] + blocks[i].nbytes > bound:
                rank[i] *= chance.random()
        order = sorted(order, key=rank.__getitem__)
        offsets = in_gaps(blocks, order)
        yield offsets
        height = _height(blocks, offsets)
        if height <= best:
            best, best_order = height, order
        elif chance.random() < _RETURN:
            order = best_order
