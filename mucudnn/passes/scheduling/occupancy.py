"""Bytes in use at every node, and what still fits beside them."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mucudnn.ir.graph import PERSISTENT, Graph, Role
from mucudnn.passes.graph.dependencies import written
from mucudnn.passes.liveness import kept, rounded

__all__ = ["Occupancy", "Use", "uses_of"]

_WIDTH = 32
"""Positions of a block of a ledger."""


@dataclass(frozen=True, slots=True)
class Use:
    """When the bytes of a storage are touched.

    Attributes:
        storage: Its name.
        nbytes: Its size, rounded up.
        positions: Nodes that read or write it, ascending; for an input also the first
            node, before which it arrives, and for a result the end.
        writes: Those of them that write it.
        period: Nodes of a step, if it outlives the step: after its last use comes, that
            many nodes later than in this step, its first use in the next. Else 0.
    """

    storage: str
    nbytes: int
    positions: tuple[int, ...]
    writes: tuple[int, ...]
    period: int = 0

    @property
    def persistent(self) -> bool:
        """Whether it outlives the step: a parameter, or state."""
        return self.period > 0

    def gaps(self) -> Iterable[tuple[int, int]]:
        """Pairs of uses with nodes in between.

        Of what outlives the step also the last use and the first of the next step, with
        the latter's position counted on.
        """
        for i, j in itertools.pairwise(self.positions):
            if j - i > 1:
                yield i, j
        if self.persistent and self.positions:
            yield self.positions[-1], self.positions[0] + self.period


def uses_of(graph: Graph) -> Mapping[str, Use]:
    """The uses of every storage, in order of first use; those of none come last."""
    count = len(graph.nodes)
    positions: dict[str, list[int]] = {}
    writes: dict[str, list[int]] = {}

    def touch(storage: str, at: int) -> None:
        known = positions.get(storage)
        if known is None:
            positions[storage] = [at]
        elif known[-1] != at:
            known.append(at)

    storages = graph.storages
    for spec in graph.with_role(Role.INPUT):
        touch(spec.name, 0)
        writes.setdefault(spec.name, []).append(0)
    for i, node in enumerate(graph.nodes):
        for name in node.tensors:
            touch(storages[name], i)
        for storage in written(graph, node):
            writes.setdefault(storage, []).append(i)
    for storage in kept(graph):
        if graph.tensors[storage].role in PERSISTENT:
            positions.setdefault(storage, [])
        else:
            touch(storage, count)
    return {
        storage: Use(
            storage,
            rounded(graph.tensors[storage].nbytes),
            tuple(found),
            tuple(writes.get(storage, ())),
            max(1, count) if graph.tensors[storage].role in PERSISTENT else 0,
        )
        for storage, found in positions.items()
    }


class Occupancy:
    """A ledger of bytes at every node position.

    Positions beyond the last are those of the next step, negative ones of the step
    before: all steps are alike. Positions are kept in blocks, each with the most that
    any of them has, so that long spans cost little.

    Args:
        workspaces: Scratch memory at each position.
        budget: Bytes that must not be exceeded.
    """

    def __init__(self, workspaces: Sequence[int], budget: float) -> None:
        self._bytes = list(workspaces)
        self.budget = budget
        blocks = range(0, len(self._bytes), _WIDTH)
        self._most = [max(self._bytes[at : at + _WIDTH]) for at in blocks]
        self._everywhere = [0] * len(blocks)

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, position: int) -> int:
        at = position % len(self._bytes)
        return self._bytes[at] + self._everywhere[at // _WIDTH]

    def add(self, start: int, stop: int, nbytes: int) -> None:
        """Take `nbytes` at every position from `start` up to and including `stop`."""
        for first, last in self._spans(start, stop):
            low, high = first // _WIDTH, last // _WIDTH
            if low == high:
                self._add_within(low, first, last, nbytes)
                continue
            self._add_within(low, first, (low + 1) * _WIDTH - 1, nbytes)
            whole = slice(low + 1, high)
            self._most[whole] = [used + nbytes for used in self._most[whole]]
            self._everywhere[whole] = [n + nbytes for n in self._everywhere[whole]]
            self._add_within(high, high * _WIDTH, last, nbytes)

    def _add_within(self, block: int, first: int, last: int, nbytes: int) -> None:
        within = slice(first, last + 1)
        self._bytes[within] = [used + nbytes for used in self._bytes[within]]
        most = max(self._bytes[block * _WIDTH : (block + 1) * _WIDTH])
        self._most[block] = most + self._everywhere[block]

    def fits(self, position: int, nbytes: int) -> bool:
        """Whether `nbytes` more fit at one position."""
        return self[position] + nbytes <= self.budget

    def fits_over(self, start: int, stop: int, nbytes: int) -> bool:
        """Whether `nbytes` more fit at every position from `start` to `stop`."""
        return self.room_after(start - 1, stop, nbytes) >= stop

    def room_before(self, position: int, floor: int, nbytes: int) -> int:
        """From where on `nbytes` more fit, up to before a position; not below a floor.

        It is the position itself, if they do not fit at the one before.
        """
        room, count = self.budget - nbytes, len(self._bytes)
        while position > floor:
            at = (position - 1) % count
            block = at // _WIDTH
            end = max(floor, position - 1 - (at - block * _WIDTH))
            if self._most[block] <= room:
                position = end
                continue
            rest = room - self._everywhere[block]
            while position > end:
                if self._bytes[at] > rest:
                    return position
                at -= 1
                position -= 1
        return position

    def room_after(self, position: int, ceiling: int, nbytes: int) -> int:
        """Up to where `nbytes` more fit, from after a position; not above a ceiling.

        It is the position itself, if they do not fit at the next one.
        """
        room, count = self.budget - nbytes, len(self._bytes)
        while position < ceiling:
            at = (position + 1) % count
            block = at // _WIDTH
            last = min((block + 1) * _WIDTH, count) - 1
            end = min(ceiling, position + 1 + last - at)
            if self._most[block] <= room:
                position = end
                continue
            rest = room - self._everywhere[block]
            while position < end:
                if self._bytes[at] > rest:
                    return position
                at += 1
                position += 1
        return position

    def peak(self) -> tuple[int, int]:
        """The largest sum and the first position that has it; (0, 0) if empty."""
        if not self._bytes:
            return 0, 0
        most = max(self._most)
        block = self._most.index(most)
        start = block * _WIDTH
        within = self._bytes[start : start + _WIDTH]
        return most, start + within.index(most - self._everywhere[block])

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Positions of this step that those from `start` to `stop` are like."""
        n = len(self._bytes)
        if start > stop:
            return
        first = start % n
        last = first + stop - start
        yield first, min(last, n - 1)
        if last >= n:
            yield 0, last - n
