"""Bytes in use at every node, and what still fits beside them."""

from collections.abc import Iterable, Mapping, Sequence
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
            node, before which it arrives, and for what outlives the last node the end.
        writes: Those of them that write it.
        persistent: Whether it outlives the step.
    """

    storage: str
    nbytes: int
    positions: tuple[int, ...]
    writes: tuple[int, ...]
    persistent: bool

    def gaps(self) -> Iterable[tuple[int, int]]:
        """Pairs of uses with nodes in between."""
        for i, j in zip(self.positions, self.positions[1:], strict=False):
            if j - i > 1:
                yield i, j


def rounded(nbytes: int) -> int:
    """Bytes that an allocation of `nbytes` takes."""
    return liveness.rounded(nbytes, GRANULARITY)


def uses_of(graph: Graph) -> Mapping[str, Use]:
    """The uses of every storage, in order of first use."""
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
        touch(storage, len(graph.nodes))
    return {
        storage: Use(
            storage,
            rounded(graph.tensors[storage].nbytes),
            tuple(found),
            tuple(writes.get(storage, ())),
            graph.tensors[storage].role in PERSISTENT,
        )
        for storage, found in positions.items()
    }


class Occupancy:
    """A ledger of bytes at every node position.

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
        return self._bytes[position]

    def add(self, start: int, stop: int, nbytes: int) -> None:
        """Take `nbytes` at every position from `start` up to and including `stop`."""
        span = slice(max(start, 0), max(stop + 1, 0))
        self._bytes[span] = [used + nbytes for used in self._bytes[span]]

    def fits(self, position: int, nbytes: int) -> bool:
        """Whether `nbytes` more fit at one position."""
        return self._bytes[position] + nbytes <= self.budget

    def fits_over(self, start: int, stop: int, nbytes: int) -> bool:
        """Whether `nbytes` more fit at every position from `start` to `stop`."""
        span = self._bytes[start : stop + 1]
        return not span or max(span) + nbytes <= self.budget

    def peak(self) -> tuple[int, int]:
        """The largest sum and the first position that has it; (0, 0) if empty."""
        if not self._bytes:
            return 0, 0
        most = max(self._bytes)
        return most, self._bytes.index(most)
