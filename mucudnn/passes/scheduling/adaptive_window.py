"""Adaptive-window scheduler: two sliding windows that share one budget.

After Hayakawa & Narihira, "Out-of-core Training for Extremely Large-Scale Neural
Networks with Adaptive Window-Based Scheduling", 2020.

The uses of all storages form one list, in the order of nodes. Before the current node
is the swap-out window: storages whose offload has not been awaited yet. After it is the
swap-in window: storages that are resident for nodes to come. Both share one budget, and
each slides until bytes run out. A storage is offloaded after its last use within the
swap-in window, first in, first out; if the swap-in window reaches it again before its
copy was awaited, it stays.

There are two differences from the published algorithm. Workspaces count towards the
budget, so the available bytes vary from node to node. And if a node's results find no
room, the farthest prefetches are cancelled, instead of planning again from the start.
As published, the windows do not cross the end of a step: parameters and state that may
be offloaded are on the host at the start and at the end.
"""

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mucudnn.passes.scheduling.intervals import ResidencyInterval, Swaps
from mucudnn.passes.scheduling.occupancy import Occupancy, Use
from mucudnn.passes.scheduling.problem import Problem

__all__ = ["PREFETCH_FACTOR", "Windows", "adaptive_window", "windows"]

PREFETCH_FACTOR = 1.5
"""Limit of the swap-in window relative to the budget, unwritten results included."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Residency intervals, and the fill levels of both windows over time.

    Attributes:
        intervals: Intervals of all storages that are not always resident. in_bytes:
        Bytes of the swap-in window when each node was planned, and at the end;
            prefetches that were cancelled later are included.
        out_bytes: Bytes of the swap-out window at the same times.
        prefetch_bytes: Bytes of the swap-in window, unwritten results included.
    """

    intervals: tuple[ResidencyInterval, ...]
    in_bytes: tuple[int, ...]
    out_bytes: tuple[int, ...]
    prefetch_bytes: tuple[int, ...]


def adaptive_window(problem: Problem) -> tuple[list[ResidencyInterval], Occupancy]:
    """Schedule copies by two windows over one budget, without regard to time.

    If the problem names no gaps for offload, all gaps may be used.
    """
    intervals = windows(problem).intervals
    return list(intervals), problem.ledger(intervals)


def windows(problem: Problem) -> Windows:
    """Schedule copies by two windows.

    Raises:
        PlanningError: A node's operands do not fit beside the resident storages.
    """
    problem = replace(problem, swaps=problem.swaps or _every_gap(problem))
    problem.check()
    return _Planner(problem).plan()


def _every_gap(problem: Problem) -> Swaps:
    n, immovable = len(problem.graph.nodes), problem.graph.immovable
    return {
        use.storage: gaps
        for use in problem.uses.values()
        if not use.persistent and use.storage not in immovable
        if (gaps := [(i, j) for i, j in use.gaps() if j < n])
    }


class _State(enum.Enum):
    UNMET = enum.auto()
    AWAITED = enum.auto()
    """In the swap-in window, but not written yet."""
    IN = enum.auto()
    OUT = enum.auto()
    """In the swap-out window; the offload may still be cancelled."""
    HOST = enum.auto()


class _Item:
    """A storage and its state."""

    __slots__ = (
        "_host_since",
        "count",
        "final",
        "held",
        "host_resident",
        "last",
        "leaves_after",
        "nbytes",
        "needed",
        "prefetched",
        "released_by",
        "start",
        "state",
        "use",
    )

    def __init__(self, use: Use, gaps: Sequence[tuple[int, int]]) -> None:
        self.use = use
        self.nbytes = use.nbytes
        self.final = use.positions[-1] if use.positions else -1
        self.leaves_after = {i for i, _ in gaps}
        self.host_resident = use.persistent
        self.state = _State.HOST if self.host_resident else _State.UNMET
        self.count = 0
        self.held = False
        self.start = self.needed = 0
        self.last = -1
        self.prefetched = False
        self.released_by = -1
        self._host_since: int | None = -1 if self.host_resident else None

    def enter(self, position: int, needed: int, *, prefetched: bool) -> None:
        """Begin a residency interval."""
        self.state = _State.IN
        self.start, self.needed, self.prefetched = position, needed, prefetched

    def leave(self, stop: int, *, kept: bool) -> ResidencyInterval:
        """End the interval; `kept` says whether the host needs a valid copy."""
        since = self._host_since
        dirty = kept and (
            since is None or any(since < w <= self.last for w in self.use.writes)
        )
        if dirty:
            self._host_since = self.last
        self.state = _State.HOST
        return ResidencyInterval(
            self.use.storage,
            self.nbytes,
            self.start,
            stop,
            self.needed,
            self.last,
            self.prefetched,
            dirty,
            kept,
            self.host_resident,
        )


class _Planner:
    """State of the two windows: accesses [tail, begin) and [begin, head)."""

    def __init__(self, problem: Problem) -> None:
        self._count = len(problem.graph.nodes)
        room = problem.budget - problem.resident()
        self._room = [room - nbytes for nbytes in problem.scratch()]
        self._most = PREFETCH_FACTOR * room
        self._items = [
            _Item(use, problem.swaps.get(use.storage, ())) for use in problem.moving()
        ]
        self._accesses, self._bounds = _accesses(self._items, self._count)
        self._transfers: set[int] = set()
        self._intervals: list[ResidencyInterval] = []
        self._head = self._tail = 0
        self._in = self._out = self._prefetch = 0

    def plan(self) -> Windows:
        """Plan all nodes in order."""
        levels = []
        for node in range(self._count):
            self._extend(node)
            self._reserve(node)
            levels.append((self._in, self._out, self._prefetch))
            self._release(node)
        for item in self._items:
            if item.state is _State.IN:
                item.last = self._count
                self._remove_from_window(item)
                self._intervals.append(item.leave(self._count, kept=False))
            elif item.state is _State.OUT:  # host-resident
                self._out -= item.nbytes
                self._intervals.append(item.leave(self._count - 1, kept=True))
        levels.append((self._in, self._out, self._prefetch))
        inside, outside, ahead = zip(*levels, strict=True)
        return Windows(tuple(self._intervals), inside, outside, ahead)

    def _extend(self, node: int) -> None:
        """Extend the swap-in window by as many accesses as fit."""
        room = self._room[node]
        while self._head < len(self._accesses):
            position, item = self._accesses[self._head]
            if item.held:
                item.held = False
                self._transfers.add(self._head)
            elif item.count == 0 and not self._add_to_window(
                item, position, node, room
            ):
                return
            else:
                item.count += 1
            self._head += 1

    def _add_to_window(
        self, item: _Item, position: int, node: int, room: float
    ) -> bool:
        """Add a storage to the swap-in window; return whether it fits."""
        nbytes = item.nbytes
        if self._prefetch + nbytes > self._most or self._in + nbytes > room:
            return False
        match item.state:
            case _State.UNMET:
                item.state = _State.AWAITED
                self._prefetch += nbytes
                return True
            case _State.OUT:  # cancel the offload
                self._out -= nbytes
                item.state = _State.IN
            case _:
                while self._in + self._out + nbytes > room:
                    self._retire(node)
                item.enter(node, position, prefetched=True)
        self._in += nbytes
        self._prefetch += nbytes
        return True

    def _reserve(self, node: int) -> None:
        """Make room for storages that a node writes for the first time."""
        begin, end = self._bounds[node], self._bounds[node + 1]
        fresh = [
            item
            for _, item in self._accesses[begin:end]
            if item.state is _State.AWAITED
        ]
        need = sum(item.nbytes for item in fresh)
        while self._in + self._out + need > self._room[node]:
            if self._tail < begin:
                self._retire(node)
            else:
                self._cancel_farthest(node)
        for item in fresh:
            item.enter(node, node, prefetched=False)
            self._in += item.nbytes

    def _retire(self, node: int) -> None:
        """Await the oldest offload."""
        _, item = self._accesses[self._tail]
        if item.state is _State.OUT and item.released_by == self._tail:
            self._out -= item.nbytes
            self._intervals.append(item.leave(node - 1, kept=True))
        self._tail += 1

    def _cancel_farthest(self, node: int) -> None:
        """Shorten the swap-in window by one access."""
        self._head -= 1
        _, item = self._accesses[self._head]
        if self._head in self._transfers:
            self._transfers.remove(self._head)
            item.held = True
            return
        item.count -= 1
        if item.count:
            return
        self._prefetch -= item.nbytes
        if item.state is _State.AWAITED:
            item.state = _State.UNMET
            return
        self._in -= item.nbytes
        if item.last >= item.start:  # its offload was cancelled: offload it after all
            self._intervals.append(item.leave(node - 1, kept=True))
        else:
            item.state = _State.HOST

    def _release(self, node: int) -> None:
        """Free or offload storages that no other node in the window uses."""
        begin, end = self._bounds[node], self._bounds[node + 1]
        for index in range(begin, end):
            _, item = self._accesses[index]
            item.last = node
            if item.count > 1:
                item.count -= 1
            elif node == item.final and not item.host_resident:
                self._remove_from_window(item)
                self._intervals.append(item.leave(node, kept=False))
            elif node == item.final or node in item.leaves_after:
                self._remove_from_window(item)
                self._out += item.nbytes
                item.state = _State.OUT
                item.released_by = index
            else:
                item.held = True

    def _remove_from_window(self, item: _Item) -> None:
        item.count = 0
        self._in -= item.nbytes
        self._prefetch -= item.nbytes


def _accesses(
    items: Sequence[_Item], count: int
) -> tuple[list[tuple[int, _Item]], list[int]]:
    """Return uses in the order of nodes, and the start of each node's uses."""
    of_node: list[list[tuple[int, _Item]]] = [[] for _ in range(count + 1)]
    for item in items:
        for position in item.use.positions:  # the last may be the end
            of_node[position].append((position, item))
    bounds = [0, *itertools.accumulate(map(len, of_node[:count]))]
    return [*itertools.chain(*of_node[:count])], bounds
