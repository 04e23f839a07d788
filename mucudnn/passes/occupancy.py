"""Bytes in use at every node, and what still fits beside them."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mucudnn.ir.graph import PERSISTENT, Graph, Role
from mucudnn.passes import liveness
from mucudnn.passes.dependencies import written
from mucudnn.passes.liveness import kept

__all__ = ["GRANULARITY", "Occupancy", "Use", "rounded", "uses_of"]

GRANULARITY = 512
"""Bytes that every allocation is rounded up to."""


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


def rounded(nbytes: int) -> int:
    """Bytes that an allocation of `nbytes` takes."""
    return liveness.rounded(nbytes, GRANULARITY)


def uses_of(graph: Graph) -> Mapping[str, Use]:
    """The uses of every storage, in order of first use; those of none come last."""
    count = len(graph.nodes)
    positions: dict[str, list[int]] = {}
    writes: dict[str, list[int]] = {}

    def touch(storage: str, at: int) -> None:
        known = positions.setdefault(storage, [])
        if not known or known[-1] != at:
            known.append(at)

    storages = graph.storages
    for spec in graph.with_role(Role.INPUT):
        touch(spec.name, 0)
        writes.setdefault(spec.name, []).append(0)
    for i, node in enumerate(graph.nodes):
        for name in node.tensors:
            touch(storages[name], i)
        for storage in written(graph, node):
            if writes.setdefault(storage, [])[-1:] != [i]:
                writes[storage].append(i)
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
    before: all steps are alike.

    Args:
        workspaces: Scratch memory at each position.
        budget: Bytes that must not be exceeded.
    """

    def __init__(self, workspaces: Sequence[int], budget: float) -> None:
        self._bytes = list(workspaces)
        self.budget = budget

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, position: int) -> int:
        return self._bytes[position % len(self._bytes)]

    def add(self, start: int, stop: int, nbytes: int) -> None:
        """Take `nbytes` at every position from `start` up to and including `stop`."""
        for span in self._spans(start, stop):
            self._bytes[span] = [used + nbytes for used in self._bytes[span]]

    def fits(self, position: int, nbytes: int) -> bool:
        """Whether `nbytes` more fit at one position."""
        return self[position] + nbytes <= self.budget

    def fits_over(self, start: int, stop: int, nbytes: int) -> bool:
        """Whether `nbytes` more fit at every position from `start` to `stop`."""
        return all(
            max(self._bytes[span]) + nbytes <= self.budget
            for span in self._spans(start, stop)
        )

    def peak(self) -> tuple[int, int]:
        """The largest sum and the first position that has it; (0, 0) if empty."""
        if not self._bytes:
            return 0, 0
        most = max(self._bytes)
        return most, self._bytes.index(most)

    def _spans(self, start: int, stop: int) -> Iterator[slice]:
        """Positions of this step that those from `start` to `stop` are like."""
        n = len(self._bytes)
        if start > stop:
            return
        first = start % n
        last = first + stop - start
        yield slice(first, min(last + 1, n))
        if last >= n:
            yield slice(0, last - n + 1)
