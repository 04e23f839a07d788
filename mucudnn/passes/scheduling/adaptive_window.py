"""The adaptive-window scheduler: two windows over one budget.

After Hayakawa & Narihira, "Out-of-core Training for Extremely Large-Scale Neural
Networks with Adaptive Window-Based Scheduling", 2020.

The uses of all storages form one list, in the order of the nodes. Before the node that
runs lies the swap-out window: what has been used and whose copy to the host has not
been waited for. After it lies the swap-in window: what is there for nodes to come. Both
share one budget, and neither has a length of its own: each slides until bytes run out.
What leaves does so after its last use within the swap-in window, first in, first out;
if the swap-in window meets it again before its copy was waited for, it stays.

Two things differ from the published algorithm. Workspaces are within the budget, so
that it may shrink from node to node. And where a node's results find no room, the
farthest prefetches are given back in place, instead of planning anew from the start.
As published, the windows do not reach across the end of a step: parameters and state
that may leave are on the host as it begins and as it ends.
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
"""The swap-in window may hold this much of the budget, counting what the nodes in it
have not written yet."""


@dataclass(frozen=True, slots=True)
class Windows:
    """How full the two windows were, and what came of it.

    Attributes:
        intervals: Of every storage that is not on the device all the time.
        in_bytes: Of the swap-in window as each node was planned, with prefetches that
            were given back later, and in the end.
        out_bytes: Of the swap-out window likewise.
        prefetch_bytes: Of the swap-in window with what is yet to be written, likewise.
    """

    intervals: tuple[ResidencyInterval, ...]
    in_bytes: tuple[int, ...]
    out_bytes: tuple[int, ...]
    prefetch_bytes: tuple[int, ...]


def adaptive_window(problem: Problem) -> tuple[list[ResidencyInterval], Occupancy]:
    """Slide a swap-in and a swap-out window over one budget, blind to time.

    Where the problem names no gaps over which storages may leave, all may leave over
    all of them.
    """
    intervals = windows(problem).intervals
    return list(intervals), problem.ledger(intervals)


def windows(problem: Problem) -> Windows:
    """Plan with two windows.

    Raises:
        PlanningError: A node's own operands do not fit beside what may not leave.
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
    """In the swap-in window, to be written by one of its nodes."""
    IN = enum.auto()
    OUT = enum.auto()
    """On its way to the host; may still be called back."""
    HOST = enum.auto()


class _Item:
    """A storage and where it is."""

    __slots__ = (
        "_host_since",
        "came_back",
        "count",
        "final",
        "held",
        "host_resident",
        "last",
        "leaves_after",
        "nbytes",
        "needed",
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
        self.came_back = False
        self.released_by = -1
        self._host_since: int | None = -1 if self.host_resident else None

    def enter(self, position: int, needed: int, *, came_back: bool) -> None:
        """Begin an interval."""
        self.state = _State.IN
        self.start, self.needed, self.came_back = position, needed, came_back

    def leave(self, stop: int, *, kept: bool) -> ResidencyInterval:
        """End the interval; if its bytes are wanted again, the host has them then."""
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
            self.came_back,
            dirty,
            kept,
            self.host_resident,
        )


class _Planner:
    """The two windows: accesses [tail, begin) and [begin, head)."""

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
        """Run through the nodes."""
        levels = []
        for node in range(self._count):
            self._extend(node)
            self._reserve(node)
            levels.append((self._in, self._out, self._prefetch))
            self._release(node)
        for item in self._items:
            if item.state is _State.IN:
                item.last = self._count
                self._gone(item)
                self._intervals.append(item.leave(self._count, kept=False))
            elif item.state is _State.OUT:  # host-resident
                self._out -= item.nbytes
                self._intervals.append(item.leave(self._count - 1, kept=True))
        levels.append((self._in, self._out, self._prefetch))
        inside, outside, ahead = zip(*levels, strict=True)
        return Windows(tuple(self._intervals), inside, outside, ahead)

    def _extend(self, node: int) -> None:
        """Let the swap-in window meet as many accesses as there is room for."""
        room = self._room[node]
        while self._head < len(self._accesses):
            position, item = self._accesses[self._head]
            if item.held:
                item.held = False
                self._transfers.add(self._head)
            elif item.count == 0 and not self._meet(item, position, node, room):
                return
            else:
                item.count += 1
            self._head += 1

    def _meet(self, item: _Item, position: int, node: int, room: float) -> bool:
        """Take a storage into the swap-in window, if there is room for it."""
        nbytes = item.nbytes
        if self._prefetch + nbytes > self._most or self._in + nbytes > room:
            return False
        match item.state:
            case _State.UNMET:
                item.state = _State.AWAITED
                self._prefetch += nbytes
                return True
            case _State.OUT:  # it never leaves
                self._out -= nbytes
                item.state = _State.IN
            case _:
                while self._in + self._out + nbytes > room:
                    self._retire(node)
                item.enter(node, position, came_back=True)
        self._in += nbytes
        self._prefetch += nbytes
        return True

    def _reserve(self, node: int) -> None:
        """Make room for what a node writes for the first time."""
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
                self._give_back(node)
        for item in fresh:
            item.enter(node, node, came_back=False)
            self._in += item.nbytes

    def _retire(self, node: int) -> None:
        """Wait for the oldest copy to the host."""
        _, item = self._accesses[self._tail]
        if item.state is _State.OUT and item.released_by == self._tail:
            self._out -= item.nbytes
            self._intervals.append(item.leave(node - 1, kept=True))
        self._tail += 1

    def _give_back(self, node: int) -> None:
        """Draw the swap-in window back by one access."""
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
        if item.last >= item.start:  # it was called back: now it leaves after all
            self._intervals.append(item.leave(node - 1, kept=True))
        else:
            item.state = _State.HOST

    def _release(self, node: int) -> None:
        """Let go of what a node used and no other node in the window does."""
        begin, end = self._bounds[node], self._bounds[node + 1]
        for index in range(begin, end):
            _, item = self._accesses[index]
            item.last = node
            if item.count > 1:
                item.count -= 1
            elif node == item.final and not item.host_resident:
                self._gone(item)
                self._intervals.append(item.leave(node, kept=False))
            elif node == item.final or node in item.leaves_after:
                self._gone(item)
                self._out += item.nbytes
                item.state = _State.OUT
                item.released_by = index
            else:
                item.held = True

    def _gone(self, item: _Item) -> None:
        item.count = 0
        self._in -= item.nbytes
        self._prefetch -= item.nbytes


def _accesses(
    items: Sequence[_Item], count: int
) -> tuple[list[tuple[int, _Item]], list[int]]:
    """Uses in the order of nodes, and where those of each node begin."""
    of_node: list[list[tuple[int, _Item]]] = [[] for _ in range(count + 1)]
    for item in items:
        for position in item.use.positions:  # the last may be the end
            of_node[position].append((position, item))
    bounds = [0, *itertools.accumulate(map(len, of_node[:count]))]
    return [*itertools.chain(*of_node[:count])], bounds
