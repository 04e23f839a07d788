"""The time-aware scheduler: copies when the links have time for them.

Its schedule is cyclic: what outlives the step is swapped out in one step and in in the
next, and what is being copied as a step ends is waited for where its bytes are needed,
not before.
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
    """Leave and return as the links' time demands, as far as the budget admits.

    What fits over a whole gap stays. A copy out may take until its link has done it;
    a copy back begins just early enough for the link to finish it and those after it
    in time. Where the budget does not admit that, it leaves sooner or returns later,
    and compute waits.
    """
    least, occupancy = problem.least()
    links = problem.profile
    clock = Clock([links.node_ms[node.name] for node in problem.graph.nodes])
    swaps = _not_kept(problem, occupancy, clock)
    kept = {name for name, gaps in problem.swaps.items() if swaps.get(name) != gaps}
    intervals = [interval for interval in least if interval.storage not in kept]
    for use in (problem.uses[name] for name in problem.swaps if name in kept):
        if not use.persistent or use.storage in swaps:
            intervals += split(use, swaps.get(use.storage, ()), len(occupancy))
    intervals = _linger(intervals, occupancy, clock, links.out_bytes_per_ms)
    intervals = _return_early(intervals, occupancy, clock, links.in_bytes_per_ms)
    return list(_joined(intervals, problem.away, len(occupancy))), occupancy


def _not_kept(problem: Problem, occupancy: Occupancy, clock: Clock) -> Swaps:
    """Gaps that remain once what has room over a whole gap is kept over it.

    The shortest gaps first.
    """
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


def _pairs(
    intervals: Sequence[ResidencyInterval], count: int
) -> Iterator[tuple[int, int, int]]:
    """Indices of intervals between which a storage is swapped out and in again.

    And how many nodes to add to the positions of the second.
    """
    of_storage: dict[str, list[int]] = {}
    for i, interval in enumerate(intervals):
        if interval.copied_in or interval.kept_on_host:
            of_storage.setdefault(interval.storage, []).append(i)
    for indices in of_storage.values():
        for i, j in itertools.pairwise(indices):
            yield i, j, 0
        if intervals[indices[0]].host_resident:
            yield indices[-1], indices[0], count


def _linger(
    intervals: list[ResidencyInterval],
    occupancy: Occupancy,
    clock: Clock,
    bytes_per_ms: float,
) -> list[ResidencyInterval]:
    """Give copies out the time that their link needs, where there is room."""
    found, n = list(intervals), len(occupancy)
    returns = {i: found[j].start + later for i, j, later in _pairs(found, n)}
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


def _return_early(
    intervals: list[ResidencyInterval],
    occupancy: Occupancy,
    clock: Clock,
    bytes_per_ms: float,
) -> list[ResidencyInterval]:
    """Begin copies back early enough for their link, where there is room."""
    found, n = list(intervals), len(occupancy)
    earliest = {j: found[i].stop + 1 - later for i, j, later in _pairs(found, n)}
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
    """Make one of intervals with nothing between them: the copies are cancelled.

    What then never leaves is on the device all the time and has no intervals at all,
    unless it must be away.
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
