"""Residency intervals of storages, and the ledger of memory in use.

A storage that is never moved has one interval, from its first use to its last; an
offloaded storage has several, with copies in between. Offloaded parameters and state
are host-resident: they are prefetched and offloaded in every step, and their intervals
may begin in one step and end in the next. Positions are those of nodes. The budget
limits the bytes at every position, so it holds whatever time copies take: compute waits
for late copies.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import NamedTuple

from mucudnn.errors import PlanningError
from mucudnn.ir.graph import Graph
from mucudnn.ir.schedule import (
    Alloc,
    Compute,
    Free,
    Instruction,
    Schedule,
    SwapIn,
    SwapOut,
    Wait,
)
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.liveness import Use

Swaps = Mapping[str, Sequence[tuple[int, int]]]
"""Gaps between uses over which each storage is offloaded."""


class ResidencyInterval(NamedTuple):
    """One interval of a storage in device memory.

    Positions in the next step continue those of this step. A named tuple is made in a
    quarter of a dataclass's time, and every trial of a search makes thousands.

    Attributes:
        storage: Name of the storage.
        nbytes: Size in bytes.
        start: First node at which the storage is resident.
        stop: Last node at which it is resident; after `last` while it is copied out.
        needed: First node that uses the storage; it awaits the prefetch.
        last: Last node that uses the storage.
        copied_in: Whether the storage is prefetched from the host.
        copied_out: Whether the storage is copied to the host after `last`.
        kept_on_host: Whether the host has a valid copy afterwards.
        host_resident: Whether the storage is a host-resident parameter or state.
    """

    storage: str
    nbytes: int
    start: int
    stop: int
    needed: int
    last: int
    copied_in: bool = False
    copied_out: bool = False
    kept_on_host: bool = False
    host_resident: bool = False


def split(
    use: Use, gaps: Sequence[tuple[int, int]], end: int
) -> list[ResidencyInterval]:
    """Return the shortest intervals of a storage that is offloaded over gaps.

    There is no copy out if the host's copy is still valid.
    """
    if use.persistent:
        return sorted(_swapped(use, gaps), key=lambda interval: interval.start)
    if not gaps:
        return [unsplit(use, end)]
    first, last = use.positions[0], min(use.positions[-1], end)
    begins = (first, *(j for _, j in gaps))
    ends = (*(i for i, _ in gaps), last)
    return [
        ResidencyInterval(
            use.storage,
            use.nbytes,
            start,
            stop,
            start,
            stop,
            start != first,
            leaves and _written(use, start, stop),
            leaves,
        )
        for start, stop in zip(begins, ends, strict=True)
        for leaves in [stop != last]
    ]


def unsplit(use: Use, end: int) -> ResidencyInterval:
    """Return the single interval of a storage without offload; `end` counts nodes."""
    storage, nbytes, positions, _, _ = use
    first, last = positions[0], min(positions[-1], end)
    # A named tuple's own constructor takes twice as long.
    fields = storage, nbytes, first, last, first, last, False, False, False, False
    return tuple.__new__(ResidencyInterval, fields)


def _swapped(use: Use, gaps: Sequence[tuple[int, int]]) -> Iterator[ResidencyInterval]:
    """Yield the intervals between the gaps of a host-resident storage."""
    following = (*(i for i, _ in gaps[1:]), gaps[0][0] + use.period)
    for (_, start), stop in zip(gaps, following, strict=True):
        interval = ResidencyInterval(
            use.storage,
            use.nbytes,
            start,
            stop,
            start,
            stop,
            copied_in=True,
            copied_out=_written(use, start, stop),
            kept_on_host=True,
            host_resident=True,
        )
        yield shifted(interval, -use.period) if start >= use.period else interval


def _written(use: Use, start: int, stop: int) -> bool:
    """Return whether any use in a range of positions writes."""
    period = use.period
    for write in use.writes:
        if start <= write <= stop or (period and start <= write + period <= stop):
            return True
    return False


def in_period(first: int, last: int, period: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges of one period that a cyclic range (inclusive) covers."""
    if last - first + 1 >= period:
        return ((0, period - 1),)
    start = first % period
    stop = start + last - first
    if stop < period:
        return ((start, stop),)
    return ((start, period - 1), (0, stop - period))


def shifted(interval: ResidencyInterval, nodes: int) -> ResidencyInterval:
    """Return the interval with its positions shifted by a number of nodes."""
    return interval._replace(
        start=interval.start + nodes,
        stop=interval.stop + nodes,
        needed=interval.needed + nodes,
        last=interval.last + nodes,
    )


def join(before: ResidencyInterval, after: ResidencyInterval) -> ResidencyInterval:
    """Join two adjacent intervals of a storage, without the copies in between."""
    return before._replace(
        stop=after.stop,
        last=after.last,
        copied_out=after.copied_out or (before.copied_out and after.kept_on_host),
        kept_on_host=after.kept_on_host,
    )


def least_occupancy(
    intervals: Iterable[ResidencyInterval],
    workspaces: Sequence[int],
    resident: int,
    budget: float,
) -> "MemoryLedger":
    """Return the ledger of intervals on top of the resident bytes."""
    n = len(workspaces)
    change = [0] * (n + 1)
    change[0] = resident
    for interval in intervals:
        nbytes, stop = interval.nbytes, interval.stop
        change[min(interval.start, n)] += nbytes
        if stop < n:
            change[stop + 1] -= nbytes
        # An interval across the end of the step also occupies the step's beginning.
        elif interval.host_resident:
            change[0] += nbytes
            change[stop - n + 1] -= nbytes
        else:
            change[n] -= nbytes
    used = itertools.accumulate(change)
    return MemoryLedger(
        [nbytes + rest for nbytes, rest in zip(workspaces, used, strict=False)], budget
    )


def check_fits(nbytes: int, node: str, budget: float) -> None:
    """Raise a `PlanningError` if the peak of `nbytes` at `node` exceeds the budget."""
    if nbytes > budget:
        raise budget_error(node, nbytes, budget)


def budget_error(
    node: str, nbytes: int, budget: float, remedy: str = ""
) -> PlanningError:
    """Return the error for a budget that is too small."""
    short = nbytes - int(budget)
    return PlanningError(
        f"{exact_bytes(short)} short: node {node!r} needs {exact_bytes(nbytes)}, "
        f"the budget is {exact_bytes(int(budget))}" + (remedy and f"; {remedy}"),
        node=node,
        short_by=short,
        least_bytes=nbytes,
    )


def emit(
    graph: Graph,
    intervals: Sequence[ResidencyInterval],
    workspaces: Mapping[str, int],
    peak_bytes: int,
    away: Iterable[str] = (),
) -> Schedule:
    """Emit the instructions of residency intervals.

    Before each node, starting intervals are allocated and their prefetches started, and
    the prefetches that the node needs are awaited. After it, offloads start, and ending
    intervals are awaited and freed. Results stay resident at the end. Storages in
    `away` are host-resident even if no node uses them.
    """
    n = len(graph.nodes)
    arrivals: list[list[Instruction]] = [[] for _ in range(n + 1)]
    waits: list[list[Instruction]] = [[] for _ in range(n + 1)]
    copies: list[list[Instruction]] = [[] for _ in range(n + 1)]
    departures: list[list[Instruction]] = [[] for _ in range(n + 1)]
    # Intervals of persistent storages wrap around the end of the step.
    for interval in intervals:
        name, stop = interval.storage, min(interval.stop, n)
        end = departures[interval.stop % n if interval.host_resident else stop]
        arrivals[interval.start].append(Alloc(name))
        if interval.copied_in:
            arrivals[interval.start].append(SwapIn(name))
            waits[interval.needed % n].append(Wait(name))
        if interval.copied_out:
            copies[interval.last % n].append(SwapOut(name))
            end.append(Wait(name))
        end.append(Free(name))
    program: list[Instruction] = []
    for i, node in enumerate(graph.nodes):
        program += [*arrivals[i], *waits[i], Compute(node.name)]
        program += [*copies[i], *departures[i]]
    swapped = [interval for interval in intervals if interval.host_resident]
    return Schedule(
        graph,
        tuple(program),
        workspaces,
        peak_bytes,
        hosted=tuple(dict.fromkeys([*(i.storage for i in swapped), *away])),
        live_across=tuple(i.storage for i in swapped if i.stop >= n),
    )


# Ledger of the bytes in use at every node of a step.


_WIDTH = 32
"""Number of positions per chunk of a ledger."""


class MemoryLedger:
    """Ledger of bytes at every node position.

    Positions are cyclic: those beyond the last belong to the next step, negative ones
    to the step before. Positions are stored in chunks with their maxima, so that
    operations on long ranges are cheap.
    """

    def __init__(self, workspaces: Sequence[int], budget: float) -> None:
        self._bytes = list(workspaces)
        self.budget = budget
        chunks = range(0, len(self._bytes), _WIDTH)
        self._most = [max(self._bytes[at : at + _WIDTH]) for at in chunks]
        self._everywhere = [0] * len(chunks)

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, position: int) -> int:
        at = position % len(self._bytes)
        return self._bytes[at] + self._everywhere[at // _WIDTH]

    def copy(self) -> "MemoryLedger":
        """Return a ledger of the same bytes."""
        found = copy(self)
        found._bytes = [*self._bytes]
        found._most, found._everywhere = [*self._most], [*self._everywhere]
        return found

    def add(self, start: int, stop: int, nbytes: int) -> None:
        """Add `nbytes` at every position from `start` to `stop` (inclusive)."""
        if not nbytes or start > stop:
            return
        if start >= 0 and stop < len(self._bytes):
            self._add(start, stop, nbytes)
            return
        for first, last in in_period(start, stop, len(self._bytes)):
            self._add(first, last, nbytes)

    def _add(self, first: int, last: int, nbytes: int) -> None:
        low, high = first // _WIDTH, last // _WIDTH
        if low == high:
            self._add_within(low, first, last, nbytes)
            return
        self._add_within(low, first, (low + 1) * _WIDTH - 1, nbytes)
        if high - low > 1:
            whole = slice(low + 1, high)
            self._most[whole] = [used + nbytes for used in self._most[whole]]
            self._everywhere[whole] = [n + nbytes for n in self._everywhere[whole]]
        self._add_within(high, high * _WIDTH, last, nbytes)

    def _add_within(self, chunk: int, first: int, last: int, nbytes: int) -> None:
        now = [used + nbytes for used in self._bytes[first : last + 1]]
        self._bytes[first : last + 1] = now
        if nbytes < 0:  # the maximum may have been in this range
            now = self._bytes[chunk * _WIDTH : (chunk + 1) * _WIDTH]
            self._most[chunk] = max(now) + self._everywhere[chunk]
            return
        most = max(now) + self._everywhere[chunk]
        if most > self._most[chunk]:
            self._most[chunk] = most

    def fits(self, position: int, nbytes: int) -> bool:
        """Return whether `nbytes` more fit at one position."""
        return self[position] + nbytes <= self.budget

    def take(self, start: int, stop: int, nbytes: int) -> bool:
        """Add bytes over an inclusive range if they fit; return whether they did."""
        chunk, within = start // _WIDTH, 0 <= start <= stop < len(self._bytes)
        if not within or stop // _WIDTH > chunk:
            fits = self.fits_over(start, stop, nbytes)
            if fits:
                self.add(start, stop, nbytes)
            return fits
        # A search asks for millions of short ranges.
        used = self._bytes[start : stop + 1]
        most = max(used) + self._everywhere[chunk] + nbytes
        if most > self.budget:
            return False
        self._bytes[start : stop + 1] = [n + nbytes for n in used]
        if most > self._most[chunk]:
            self._most[chunk] = most
        return True

    def fits_over(self, start: int, stop: int, nbytes: int) -> bool:
        """Return whether `nbytes` more fit from `start` to `stop` (inclusive)."""
        if start > stop:
            return True
        if start < 0 or stop >= len(self._bytes):
            return self.room_after(start - 1, stop, nbytes) >= stop
        room, low, high = self.budget - nbytes, start // _WIDTH, stop // _WIDTH
        most = self._most
        if high - low > 1 and max(most[low + 1 : high]) > room:
            return False
        end = stop if low == high else low * _WIDTH + _WIDTH - 1
        for chunk, first, last in ((low, start, end), (high, high * _WIDTH, stop)):
            if most[chunk] > room:
                first = max(first, start)
                used = max(self._bytes[first : last + 1])
                if used + self._everywhere[chunk] > room:
                    return False
        return True

    def room_before(self, position: int, floor: int, nbytes: int) -> int:
        """Return the first position of the free range right before `position`.

        The range has room for `nbytes` more and does not go below `floor`. If it is
        empty, the result is `position`.
        """
        room, count = self.budget - nbytes, len(self._bytes)
        while position > floor:
            at = (position - 1) % count
            chunk = at // _WIDTH
            end = max(floor, position - 1 - (at - chunk * _WIDTH))
            if self._most[chunk] <= room:
                position = end
                continue
            rest = room - self._everywhere[chunk]
            while position > end:
                if self._bytes[at] > rest:
                    return position
                at -= 1
                position -= 1
        return position

    def room_after(self, position: int, ceiling: int, nbytes: int) -> int:
        """Return the last position of the free range right after `position`.

        The range has room for `nbytes` more and does not go above `ceiling`. If it is
        empty, the result is `position`.
        """
        room, count = self.budget - nbytes, len(self._bytes)
        while position < ceiling:
            at = (position + 1) % count
            chunk = at // _WIDTH
            last = min((chunk + 1) * _WIDTH, count) - 1
            end = min(ceiling, position + 1 + last - at)
            if self._most[chunk] <= room:
                position = end
                continue
            rest = room - self._everywhere[chunk]
            while position < end:
                if self._bytes[at] > rest:
                    return position
                at += 1
                position += 1
        return position

    def peak(self) -> tuple[int, int]:
        """Return the maximum and its first position; (0, 0) if empty."""
        if not self._bytes:
            return 0, 0
        most = max(self._most)
        chunk = self._most.index(most)
        start = chunk * _WIDTH
        within = self._bytes[start : start + _WIDTH]
        return most, start + within.index(most - self._everywhere[chunk])
