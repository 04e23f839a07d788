"""Transfer-aware scheduler: copies run when the links have time for them.

The schedule is cyclic: persistent storages are offloaded in one step and prefetched in
the next, and copies in flight at the end of a step are awaited only where their bytes
are needed.
"""

import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter

from mucudnn.passes.scheduling.intervals import (
    ResidencyInterval,
    Swaps,
    join,
    shifted,
    split,
)
from mucudnn.passes.scheduling.occupancy import Occupancy
from mucudnn.passes.scheduling.problem import Problem
from mucudnn.passes.scheduling.transfers import Clock, latest_starts, leaving

__all__ = ["timed"]


def timed(problem: Problem) -> tuple[list[ResidencyInterval], Occupancy]:
    """Schedule copies by the links' time, as far as the budget allows.

    A storage that fits over a whole gap stays resident. An offload may last until its
    link has finished; a prefetch starts just early enough for the link to finish it and
    those behind it in time. Where the budget does not allow this, intervals are shorter
    and compute waits.
    """
    least, occupancy = problem.least()
    links = problem.profile
    clock = Clock([links.node_ms[node.name] for node in problem.graph.nodes])
    # 1. Keep storages over gaps with enough room, the shortest gaps first.
    swaps = _remaining_gaps(problem, occupancy, clock)
    kept = {name for name, gaps in problem.swaps.items() if swaps.get(name) != gaps}
    intervals = [interval for interval in least if interval.storage not in kept]
    for use in (problem.uses[name] for name in problem.swaps if name in kept):
        if not use.persistent or use.storage in swaps:
            intervals += split(use, swaps.get(use.storage, ()), len(occupancy))
    # 2. Extend intervals for the time of their copies, where there is room.
    intervals = _extend_offloads(intervals, occupancy, clock, links.out_bytes_per_ms)
    intervals = _advance_prefetches(intervals, occupancy, clock, links.in_bytes_per_ms)
    # 3. Cancel copies between intervals that have become adjacent.
    return list(_joined(intervals, problem.away, len(occupancy))), occupancy


def _remaining_gaps(problem: Problem, occupancy: Occupancy, clock: Clock) -> Swaps:
    """Keep storages over gaps with room, shortest first; return the other gaps."""
    starts = clock.two_steps()
    gaps = [
        (starts[j] - starts[i + 1], name, i, j)
        for name, pairs in problem.swaps.items()
        for i, j in pairs
    ]
    gaps.sort(key=itemgetter(0))
    left: dict[str, list[tuple[int, int]]] = {}
    for _, name, i, j in gaps:
        nbytes = problem.uses[name].nbytes
        must = j >= len(occupancy) and name in problem.away
        if not must and occupancy.fits_over(i + 1, j - 1, nbytes):
            occupancy.add(i + 1, j - 1, nbytes)
        else:
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
    occupancy: Occupancy,
    clock: Clock,
    bytes_per_ms: float,
) -> list[ResidencyInterval]:
    """Extend intervals by the time of their offloads, where there is room."""
    found, n = list(intervals), len(occupancy)
    returns = {i: found[j].start + later for i, j, later in _gap_pairs(found, n)}
    link_free = delay = 0.0
    for i in leaving(found, n):
        interval = found[i]
        shift = interval.last - interval.last % n
        begin = max(link_free, clock.start(interval.last - shift + 1) + delay)
        link_free = begin + interval.nbytes / bytes_per_ms
        done = clock.after(link_free - delay) + shift
        stop = interval.stop
        limit = min(done, returns[i])
        if not interval.host_resident:
            limit = min(limit, n)
        stop = occupancy.room_after(stop, limit - 1, interval.nbytes)
        occupancy.add(interval.stop + 1, stop, interval.nbytes)
        delay += max(0.0, link_free - clock.start(stop + 1 - shift) - delay)
        if stop > interval.stop:
            found[i] = interval._replace(stop=stop)
    return found


def _advance_prefetches(
    intervals: list[ResidencyInterval],
    occupancy: Occupancy,
    clock: Clock,
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
        occupancy.add(start, interval.start - 1, interval.nbytes)
        found[j] = interval._replace(start=start)
    return found


def _joined(
    intervals: Sequence[ResidencyInterval], away: frozenset[str], count: int
) -> Iterator[ResidencyInterval]:
    """Join adjacent intervals and cancel the copies between them.

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
    for storage, known in of_storage.items():
        first, last = known[0], known[-1]
        if len(known) == 1 and not first.host_resident:
            yield first
            continue
        if first.host_resident and last.stop + 1 >= first.start + count:
            if len(known) > 1:
                known = [*known[1:-1], join(last, shifted(first, count))]
            elif storage not in away:
                continue
        here = (shifted(s, count) if s.start < 0 else s for s in known)
        yield from sorted(here, key=lambda interval: interval.start)
