"""Schedulers of offloads and prefetches: on demand, timed, adaptive window.

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

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

from mucudnn.ir.profile import Profile
from mucudnn.passes.liveness import Use
from mucudnn.passes.scheduling.intervals import (
    MemoryLedger,
    ResidencyInterval,
    Swaps,
    join,
    least_occupancy,
    shifted,
    split,
)
from mucudnn.passes.scheduling.problem import SchedulingProblem

PREFETCH_FACTOR = 1.5
"""Limit of the swap-in window relative to the budget, unwritten results included."""


def adaptive_window(
    problem: SchedulingProblem,
) -> tuple[list[ResidencyInterval], MemoryLedger]:
    """Schedule copies by two windows over one budget, without regard to time.

    If the problem names no gaps for offload, all gaps may be used.

    Raises:
        PlanningError: A node's operands do not fit beside the resident storages.
    """
    graph = problem.graph
    swaps = problem.swaps or {
        use.storage: gaps
        for use in problem.uses.values()
        if not use.persistent and use.storage not in graph.immovable
        if (gaps := [(i, j) for i, j in use.gaps() if j < len(graph.nodes)])
    }
    problem = replace(problem, swaps=swaps)
    problem.check()
    resident, scratch = problem.resident(), problem.scratch()
    intervals = _slide(problem, resident, scratch)
    return intervals, least_occupancy(intervals, scratch, resident, problem.budget)


_UNMET, _AWAITED, _IN, _OUT, _HOST = range(5)
"""States of a storage: not in a window yet; in the swap-in window but not written yet;
resident in it; in the swap-out window, where the offload may be cancelled; offloaded.

Plain integers, since a search schedules hundreds of plans of thousands of accesses."""


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
        "storage",
        "writes",
    )

    def __init__(self, use: Use, gaps: Sequence[tuple[int, int]]) -> None:
        self.storage, self.nbytes, positions, self.writes, period = use
        self.final = positions[-1] if positions else -1
        self.leaves_after = {i for i, _ in gaps} if gaps else ()
        self.host_resident = period > 0
        self.state = _HOST if period else _UNMET
        self.count = 0
        self.held = self.prefetched = False
        self.start = self.needed = 0
        self.last = self.released_by = -1
        self._host_since: int | None = -1 if period else None

    def enter(self, position: int, needed: int, *, prefetched: bool) -> None:
        """Begin a residency interval."""
        self.state = _IN
        self.start, self.needed, self.prefetched = position, needed, prefetched

    def leave(self, stop: int, *, kept: bool) -> ResidencyInterval:
        """End the interval; `kept` says whether the host needs a valid copy."""
        since = self._host_since
        dirty = kept and (
            since is None or any(since < w <= self.last for w in self.writes)
        )
        if dirty:
            self._host_since = self.last
        self.state = _HOST
        fields = (
            self.storage,
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
        return tuple.__new__(ResidencyInterval, fields)


def _slide(
    problem: SchedulingProblem, resident: int, scratch: Sequence[int]
) -> list[ResidencyInterval]:
    """Slide both windows over the accesses: [tail, begin) and [begin, head).

    One loop with local variables: it is the hottest of a search.
    """
    nodes = len(problem.graph.nodes)
    total = problem.budget - resident
    rooms = [total - nbytes for nbytes in scratch]
    most = PREFETCH_FACTOR * total
    swaps = problem.swaps
    items = [_Item(use, swaps.get(use[0], ())) for use in problem.moving()]
    accesses, places, bounds, begun = _accesses(problem, items, nodes)
    transfers: set[int] = set()  # accesses that took over a storage from the last one
    intervals: list[ResidencyInterval] = []
    head = tail = 0
    inside = outside = ahead = 0
    count = len(accesses)
    for node, room in enumerate(rooms):
        # Extend the swap-in window by as many accesses as fit.
        while head < count:
            item = accesses[head]
            if item.held:
                item.held = False
                transfers.add(head)
                head += 1
                continue
            if not item.count:
                nbytes = item.nbytes
                if ahead + nbytes > most or inside + nbytes > room:
                    break
                ahead += nbytes
                if item.state == _UNMET:
                    item.state = _AWAITED
                else:
                    if item.state == _OUT:  # cancel the offload
                        outside -= nbytes
                        item.state = _IN
                    else:
                        while inside + outside + nbytes > room:
                            oldest = accesses[tail]
                            if oldest.state == _OUT and oldest.released_by == tail:
                                outside -= oldest.nbytes
                                intervals.append(oldest.leave(node - 1, kept=True))
                            tail += 1
                        item.enter(node, places[head], prefetched=True)
                    inside += nbytes
            item.count += 1
            head += 1
        # Make room for storages that the node writes for the first time.
        begin, end = bounds[node], bounds[node + 1]
        fresh = [item for item in begun[node] if item.state == _AWAITED]
        need = inside
        for item in fresh:
            need += item.nbytes
        while need + outside > room:
            if tail < begin:  # await the oldest offload
                item = accesses[tail]
                if item.state == _OUT and item.released_by == tail:
                    outside -= item.nbytes
                    intervals.append(item.leave(node - 1, kept=True))
                tail += 1
                continue
            head -= 1  # cancel the farthest prefetch
            item = accesses[head]
            if head in transfers:
                transfers.remove(head)
                item.held = True
                continue
            item.count -= 1
            if item.count:
                continue
            ahead -= item.nbytes
            if item.state == _AWAITED:
                item.state = _UNMET
                continue
            inside -= item.nbytes
            need -= item.nbytes
            if item.last >= item.start:  # it was to leave, which was cancelled
                intervals.append(item.leave(node - 1, kept=True))
            else:
                item.state = _HOST
        for item in fresh:
            item.enter(node, node, prefetched=False)
        inside = need
        # Free or offload storages that no other node in the window uses.
        for index in range(begin, end):
            item = accesses[index]
            item.last = node
            if item.count > 1:
                item.count -= 1
                continue
            ends = node == item.final
            if not ends and node not in item.leaves_after:
                item.held = True
                continue
            item.count = 0
            inside -= item.nbytes
            ahead -= item.nbytes
            if ends and not item.host_resident:
                intervals.append(item.leave(node, kept=False))
            else:
                outside += item.nbytes
                item.state = _OUT
                item.released_by = index
    for item in items:
        if item.state == _IN:
            item.last = nodes
            intervals.append(item.leave(nodes, kept=False))
        elif item.state == _OUT:  # host-resident
            intervals.append(item.leave(nodes - 1, kept=True))
    return intervals


def _accesses(
    problem: SchedulingProblem, items: Sequence[_Item], count: int
) -> tuple[list[_Item], list[int], list[int], list[list[_Item]]]:
    """Return accesses in order: items, nodes, starts of nodes' accesses, first uses."""
    of_node: list[list[_Item]] = [[] for _ in range(count + 1)]
    begun: list[list[_Item]] = [[] for _ in range(count + 1)]
    for item, use in zip(items, problem.moving(), strict=True):
        for position in use[2]:  # the last may be the end
            of_node[position].append(item)
        if use[2] and not use[4]:
            begun[use[2][0]].append(item)
    del of_node[count:]
    sizes = list(map(len, of_node))
    places = [*itertools.chain(*(itertools.repeat(i, n) for i, n in enumerate(sizes)))]
    starts = [0, *itertools.accumulate(sizes)]
    return [*itertools.chain(*of_node)], places, starts, begun


def on_demand(
    problem: SchedulingProblem,
) -> tuple[list[ResidencyInterval], MemoryLedger]:
    """Offload with the layer of the last use, and prefetch one layer ahead.

    Compute waits at the end of a node for the node's offloads. A prefetch starts with
    the node before the one that needs it, if there is room (vDNN, section 3.2).
    """
    intervals, occupancy = problem.least()
    for i, interval in enumerate(intervals):
        before = interval.start - 1
        if (
            interval.copied_in
            and before >= 0
            and occupancy.fits(before, interval.nbytes)
        ):
            occupancy.add(before, before, interval.nbytes)
            intervals[i] = interval._replace(start=before)
    return intervals, occupancy


# Transfer-aware scheduler: copies run when the links have time for them.
#
# The schedule is cyclic: persistent storages are offloaded in one step and prefetched
# in the next, and copies in flight at the end of a step are awaited only where their
# bytes are needed.


def timed(problem: SchedulingProblem) -> tuple[list[ResidencyInterval], MemoryLedger]:
    """Schedule copies by the links' time, as far as the budget allows.

    A storage that fits over a whole gap stays resident. An offload may last until its
    link has finished; a prefetch starts just early enough for the link to finish it and
    those behind it in time. Where the budget does not allow this, intervals are shorter
    and compute waits.
    """
    occupancy, links = problem.least_ledger(), problem.profile
    count, uses = len(occupancy), problem.uses
    clock = Clock([links.node_ms[node.name] for node in problem.graph.nodes])
    # 1. Keep storages over gaps with enough room, the shortest gaps first.
    swaps = _remaining_gaps(problem, occupancy, clock)
    kept = {name for name, gaps in problem.swaps.items() if swaps.get(name) != gaps}
    order = [name for name in problem.swaps if name not in kept]
    order += [name for name in problem.swaps if name in kept and name in swaps]
    intervals = [i for name in order for i in split(uses[name], swaps[name], count)]
    # 2. Extend intervals for the time of their copies, where there is room.
    intervals = _extend_offloads(intervals, occupancy, clock, links.out_bytes_per_ms)
    intervals = _advance_prefetches(intervals, occupancy, clock, links.in_bytes_per_ms)
    # 3. Cancel copies between intervals that have become adjacent.
    moved = _joined(intervals, problem.away, count)
    moved |= {name: () for name in kept - moved.keys() if uses[name].persistent}
    return problem.with_unmoved(moved, kept), occupancy


def _remaining_gaps(
    problem: SchedulingProblem, occupancy: MemoryLedger, clock: "Clock"
) -> Swaps:
    """Keep storages over gaps with room, shortest first; return the other gaps."""
    starts = clock.two_steps()
    gaps = [
        (starts[j] - starts[i + 1], name, i, j)
        for name, pairs in problem.swaps.items()
        for i, j in pairs
    ]
    gaps.sort(key=itemgetter(0))
    left: dict[str, list[tuple[int, int]]] = {}
    uses, take, count, away = problem.uses, occupancy.take, len(occupancy), problem.away
    for _, name, i, j in gaps:
        # A storage that is away between steps has to leave over that gap.
        must = j >= count and name in away
        if must or not take(i + 1, j - 1, uses[name][1]):
            left.setdefault(name, []).append((i, j))
    return {name: sorted(pairs) for name, pairs in left.items()}


def _gap_pairs(
    intervals: Sequence[ResidencyInterval], count: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (interval before a gap, interval behind it, node offset of the latter)."""
    of_storage: dict[str, list[int]] = {}
    for i, interval in enumerate(intervals):
        if interval.copied_in or interval.kept_on_host:
            of_storage.setdefault(interval.storage, []).append(i)
    for indices in of_storage.values():
        for i, j in itertools.pairwise(indices):
            yield i, j, 0
        if intervals[indices[0]].host_resident:
            yield indices[-1], indices[0], count


def _extend_offloads(
    intervals: list[ResidencyInterval],
    occupancy: MemoryLedger,
    clock: "Clock",
    bytes_per_ms: float,
) -> list[ResidencyInterval]:
    """Extend intervals by the time of their offloads, where there is room."""
    found, n = list(intervals), len(occupancy)
    returns = {i: found[j].start + later for i, j, later in _gap_pairs(found, n)}
    # Copies follow each other on the link; waiting for one delays all later nodes.
    link_free = delay = 0.0
    for i in leaving(found, n):
        interval = found[i]
        shift = interval.last - interval.last % n
        begin = max(link_free, clock.start(interval.last - shift + 1) + delay)
        link_free = begin + interval.nbytes / bytes_per_ms
        done = clock.after(link_free - delay) + shift
        # An interval ends at the latest where its storage is fetched again.
        limit = min(done, returns[i])
        if not interval.host_resident:
            limit = min(limit, n)
        stop = occupancy.room_after(interval.stop, limit - 1, interval.nbytes)
        occupancy.add(interval.stop + 1, stop, interval.nbytes)
        delay += max(0.0, link_free - clock.start(stop + 1 - shift) - delay)
        if stop > interval.stop:
            found[i] = interval._replace(stop=stop)
    return found


def _advance_prefetches(
    intervals: list[ResidencyInterval],
    occupancy: MemoryLedger,
    clock: "Clock",
    bytes_per_ms: float,
) -> list[ResidencyInterval]:
    """Start prefetches early enough for their link, where there is room."""
    found, n = list(intervals), len(occupancy)
    earliest = {j: found[i].stop + 1 - later for i, j, later in _gap_pairs(found, n)}
    for j, want in latest_starts(found, clock, bytes_per_ms).items():
        interval, start = found[j], found[j].start
        if not interval.host_resident:
            want = max(0, want)
        start = occupancy.room_before(start, max(want, earliest[j]), interval.nbytes)
        if start < interval.start:
            occupancy.add(start, interval.start - 1, interval.nbytes)
            found[j] = interval._replace(start=start)
    return found


def _joined(
    intervals: Sequence[ResidencyInterval], away: frozenset[str], count: int
) -> dict[str, Sequence[ResidencyInterval]]:
    """Join adjacent intervals of each storage and cancel the copies between them.

    A persistent storage that is then always resident has no intervals at all, unless it
    must be host-resident.
    """
    of_storage: dict[str, list[ResidencyInterval]] = {}
    for interval in intervals:
        known = of_storage.setdefault(interval.storage, [])
        if known and interval.copied_in and known[-1].stop + 1 >= interval.start:
            known[-1] = join(known[-1], interval)
        else:
            known.append(interval)
    found: dict[str, Sequence[ResidencyInterval]] = {}
    for storage, known in of_storage.items():
        first, last = known[0], known[-1]
        if not first.host_resident and len(known) == 1:
            found[storage] = known
            continue
        # The last interval and the first one of the next step may meet as well.
        if first.host_resident and last.stop + 1 >= first.start + count:
            if len(known) > 1:
                known = [*known[1:-1], join(last, shifted(first, count))]
            elif storage not in away:
                known = []
        here = (shifted(s, count) if s.start < 0 else s for s in known)
        found[storage] = sorted(here, key=lambda interval: interval.start)
    return found


# Start times of nodes and ideal times of copies, without regard to memory.
#
# Positions are those of nodes, and cyclic. A link makes one copy after another, and
# compute never waits.


class Clock:
    """Start times of nodes without any waiting, at cyclic positions."""

    def __init__(self, node_ms: Sequence[float]) -> None:
        self._starts = list(itertools.accumulate(node_ms, initial=0.0))
        self.count = len(node_ms)

    def start(self, position: int) -> float:
        """Return the start time of a position."""
        if 0 <= position < self.count:
            return self._starts[position]
        step, at = divmod(position, max(1, self.count))
        return step * self._starts[-1] + self._starts[at]

    def two_steps(self) -> list[float]:
        """Return the start times of the nodes of two consecutive steps."""
        *within, end = self._starts
        return [*within, *(end + start for start in within)]

    def after(self, ms: float) -> int:
        """Return the first position that starts at a time or later."""
        step, rest = self._step(ms)
        return step * self.count + bisect.bisect_left(self._starts, rest)

    def before(self, ms: float) -> int:
        """Return the last position that starts at a time or earlier."""
        step, rest = self._step(ms)
        return step * self.count + bisect.bisect_right(self._starts, rest) - 1

    def _step(self, ms: float) -> tuple[int, float]:
        whole = self._starts[-1]
        if 0 <= ms <= whole or not whole:
            return 0, ms
        step = math.floor(ms / whole)
        return step, ms - step * whole


def trim_to_copies(
    intervals: Sequence[ResidencyInterval], clock: Clock, links: Profile, share: float
) -> list[ResidencyInterval]:
    """Shorten intervals to the time of their copies at a share of the links' rates."""
    found = list(intervals)
    starts = latest_starts(found, clock, share * links.in_bytes_per_ms)
    ends = earliest_ends(found, clock, share * links.out_bytes_per_ms)
    for i, start in starts.items():
        begin = min(max(found[i].start, start), found[i].needed)
        found[i] = found[i]._replace(start=begin)
    for i, end in ends.items():
        found[i] = found[i]._replace(stop=max(min(found[i].stop, end), found[i].last))
    return found


def latest_starts(
    intervals: Sequence[ResidencyInterval], clock: Clock, bytes_per_ms: float
) -> dict[int, int]:
    """Return the latest start (node) of each prefetch that makes compute wait for none.

    Returns:
        Node by index of the interval, in the order of first uses.
    """
    coming = [i for i, interval in enumerate(intervals) if interval.copied_in]
    coming.sort(key=lambda i: intervals[i].needed)
    wanted = []
    link_busy = math.inf
    for i in reversed(coming):
        finish = min(clock.start(intervals[i].needed), link_busy)
        link_busy = finish - intervals[i].nbytes / bytes_per_ms
        wanted.append(clock.before(link_busy))
    return dict(zip(coming, reversed(wanted), strict=True))


def earliest_ends(
    intervals: Sequence[ResidencyInterval], clock: Clock, bytes_per_ms: float
) -> dict[int, int]:
    """Return the earliest node at which each offload is complete.

    Returns:
        Node by index of the interval.
    """
    found = {}
    link_free = -math.inf
    for i in leaving(intervals, clock.count):
        interval = intervals[i]
        later = interval.last - interval.last % clock.count
        begin = max(link_free, clock.start(interval.last - later + 1))
        link_free = begin + interval.nbytes / bytes_per_ms
        found[i] = clock.after(link_free) + later
    return found


def leaving(intervals: Sequence[ResidencyInterval], count: int) -> list[int]:
    """Return indices of intervals with an offload, in the order of last uses."""
    found = [i for i, interval in enumerate(intervals) if interval.copied_out]
    return sorted(found, key=lambda i: intervals[i].last % count)
