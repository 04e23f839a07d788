"""The time-aware scheduler: copies when the links have time for them.

It goes round a step like round a circle: what outlives the step leaves in one step and
comes back in the next, and what is being copied as a step ends is waited for where its
bytes are needed, not before.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mucudnn.passes.scheduling.intervals import Stay, Swaps, join, shifted, split
from mucudnn.passes.scheduling.occupancy import Occupancy
from mucudnn.passes.scheduling.problem import Problem
from mucudnn.passes.scheduling.transfers import Clock, latest_starts

__all__ = ["timed"]


def timed(problem: Problem) -> tuple[list[Stay], Occupancy]:
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
    stays = [stay for stay in least if stay.storage not in kept]
    for use in (problem.uses[name] for name in problem.swaps if name in kept):
        if not use.persistent or use.storage in swaps:
            stays += split(use, swaps.get(use.storage, ()), len(occupancy))
    stays = _linger(stays, occupancy, clock, links.out_bytes_per_ms)
    stays = _return_early(stays, occupancy, clock, links.in_bytes_per_ms)
    return list(_joined(stays, problem.away, len(occupancy))), occupancy


def _not_kept(problem: Problem, occupancy: Occupancy, clock: Clock) -> Swaps:
    """Gaps that remain once what has room over a whole gap is kept over it.

    The shortest gaps first.
    """

    def absence(gap: tuple[str, int, int]) -> float:
        return clock.start(gap[2]) - clock.start(gap[1] + 1)

    gaps = [(name, i, j) for name, pairs in problem.swaps.items() for i, j in pairs]
    left: dict[str, list[tuple[int, int]]] = {}
    for name, i, j in sorted(gaps, key=absence):
        nbytes = problem.uses[name].nbytes
        must = name in problem.away and j >= len(occupancy)
        if not must and occupancy.fits_over(i + 1, j - 1, nbytes):
            occupancy.add(i + 1, j - 1, nbytes)
        else:
            left.setdefault(name, []).append((i, j))
    return {name: sorted(pairs) for name, pairs in left.items()}


def _pairs(stays: Sequence[Stay], count: int) -> Iterator[tuple[int, int, int]]:
    """Stays that a storage leaves from and comes back to: their indices.

    And how many nodes to add to the positions of the second.
    """
    of_storage: dict[str, list[int]] = {}
    for i, stay in enumerate(stays):
        of_storage.setdefault(stay.storage, []).append(i)
    for indices in of_storage.values():
        for i, j in itertools.pairwise(indices):
            yield i, j, 0
        if stays[indices[0]].visit:
            yield indices[-1], indices[0], count


def _linger(
    stays: list[Stay], occupancy: Occupancy, clock: Clock, bytes_per_ms: float
) -> list[Stay]:
    """Give copies out the time that their link needs, where there is room."""
    found, n = list(stays), len(occupancy)
    returns = {i: found[j].start + later for i, j, later in _pairs(found, n)}
    link_free = delay = 0.0
    leaving = [i for i, stay in enumerate(found) if stay.copied_out]
    for i in sorted(leaving, key=lambda i: found[i].last % n):
        stay = found[i]
        shift = stay.last - stay.last % n
        begin = max(link_free, clock.start(stay.last - shift + 1) + delay)
        link_free = begin + stay.nbytes / bytes_per_ms
        done = clock.after(link_free - delay) + shift
        stop = stay.stop
        limit = min(done, returns[i])
        if not stay.visit:
            limit = min(limit, n)
        stop = occupancy.room_after(stop, limit - 1, stay.nbytes)
        occupancy.add(stay.stop + 1, stop, stay.nbytes)
        delay += max(0.0, link_free - clock.start(stop + 1 - shift) - delay)
        if stop > stay.stop:
            found[i] = replace(stay, stop=stop)
    return found


def _return_early(
    stays: list[Stay], occupancy: Occupancy, clock: Clock, bytes_per_ms: float
) -> list[Stay]:
    """Begin copies back early enough for their link, where there is room."""
    found, n = list(stays), len(occupancy)
    earliest = {j: found[i].stop + 1 - later for i, j, later in _pairs(found, n)}
    coming = sorted(earliest, key=lambda j: found[j].needed)
    wanted = latest_starts([found[j] for j in coming], clock, bytes_per_ms)
    for j, want in zip(coming, wanted, strict=True):
        stay, start = found[j], found[j].start
        if not stay.visit:
            want = max(0, want)
        start = occupancy.room_before(start, max(want, earliest[j]), stay.nbytes)
        occupancy.add(start, stay.start - 1, stay.nbytes)
        found[j] = replace(stay, start=start)
    return found


def _joined(stays: Sequence[Stay], away: frozenset[str], count: int) -> Iterator[Stay]:
    """Make one of stays with nothing between them: the copies are cancelled.

    What then never leaves is on the device all the time and has no stays at all,
    unless it must be away.
    """
    of_storage: dict[str, list[Stay]] = {}
    for stay in stays:
        known = of_storage.setdefault(stay.storage, [])
        if known and stay.copied_in and known[-1].stop + 1 >= stay.start:
            known[-1] = join(known[-1], stay)
        else:
            known.append(stay)
    for storage, known in of_storage.items():
        first, last = known[0], known[-1]
        if first.visit and last.stop + 1 >= first.start + count:
            if len(known) > 1:
                known = [*known[1:-1], join(last, shifted(first, count))]
            elif storage not in away:
                continue
        here = (shifted(s, count) if s.start < 0 else s for s in known)
        yield from sorted(here, key=lambda stay: stay.start)
