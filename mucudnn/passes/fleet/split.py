"""The fastest way to share out a mini-batch: everybody ends at the same time.

    minimise    max of t_i(n_i) + all-reduce
    subject to  sum of n_i = N,  at_least <= n_i <= what rank i can take

("Accelerating Deep Learning Frameworks with Micro-batches", Oyama et al., CLUSTER 2018,
trains on unequal devices so; how it divides is not published.) Times never fall with
the share, so within a time T rank i takes at most c_i(T) samples, and T is enough if
and only if those add up to N. The least such T is one of the times of the tables; it is
bisected down to the last bit, so the result is exact.
"""

from collections import Counter
from collections.abc import Sequence

from mucudnn.arguments import an_integer
from mucudnn.errors import PlanningError
from mucudnn.ir.fleet import Fleet
from mucudnn.passes.fleet.plan import FleetPlan, plan_of, times_of
from mucudnn.passes.fleet.share_times import ShareTimes

__all__ = ["best_batch", "split_batch"]

_MOST = 1 << 20


def split_batch(fleet: Fleet, batch: int, *, at_least: int = 0) -> FleetPlan:
    """Share out a mini-batch so that a step takes the least time.

    Of all ways that take no longer, no rank but the slowest has more than it can do in
    less time than the slowest takes.

    Args:
        fleet: Who takes part.
        batch: Samples of all ranks together.
        at_least: Samples of every rank; with 0 a slow one may have none.

    Raises:
        ValueError: The batch has fewer samples than that.
        PlanningError: It does not fit on the fleet.
    """
    an_integer("batch", batch, 1, _MOST)
    times = times_of(fleet, batch)
    _check(fleet, times, batch, at_least)
    kinds = Counter(times)
    level = _least_time(kinds, batch, at_least)
    base = [max(at_least, of.most_before(level)) for of in times]
    room = [of.most_by(level) - n for of, n in zip(times, base, strict=True)]
    samples = _filled(base, room, batch - sum(base))
    return plan_of(fleet, samples, times)


def best_batch(fleet: Fleet, least: int, most: int, *, at_least: int = 0) -> FleetPlan:
    """The mini-batch of a range that trains the most samples a second, shared out.

    Args:
        fleet: Who takes part.
        least: The smallest that is wanted.
        most: The largest.
        at_least: Samples of every rank.

    Raises:
        ValueError: The range is empty, or too small for `at_least`.
        PlanningError: Not even the smallest fits on the fleet.
    """
    an_integer("least", least, 1, _MOST)
    an_integer("most", most, least, _MOST)
    times = times_of(fleet, most)
    _check(fleet, times, least, at_least)
    kinds = Counter(times)
    floor = max(of.time_ms(at_least) for of in kinds)
    best, chosen = -1.0, least
    for level in sorted({ms for of in kinds for ms in of.times_ms}):
        taken = min(most, _taken(kinds, level, at_least))
        if taken < least:
            continue
        rate = taken / (max(level, floor) + fleet.all_reduce_ms)
        if rate > best:
            best, chosen = rate, taken
        if taken == most:
            break
    return split_batch(fleet, chosen, at_least=at_least)


def _check(
    fleet: Fleet, times: Sequence[ShareTimes], batch: int, at_least: int
) -> None:
    an_integer("at_least", at_least, 0)
    if batch < at_least * len(times):
        raise ValueError(
            f"a batch of {batch} has fewer than {at_least} samples for each of "
            f"{len(times)} ranks"
        )
    for rank, of in zip(fleet.ranks, times, strict=True):
        if of.most < at_least:
            raise PlanningError(
                f"{rank.name} cannot take {at_least} samples a step: at most {of.most}"
            )
    together = sum(of.most for of in times)
    if together < batch:
        raise PlanningError(
            f"the fleet takes at most {together} samples a step, not {batch}; a "
            "smaller batch, more memory or gradient accumulation would do"
        )


def _taken(kinds: Counter[ShareTimes], level: float, at_least: int) -> int:
    """Samples that a fleet takes within a time, of every rank at least so many."""
    return sum(n * max(at_least, of.most_by(level)) for of, n in kinds.items())


def _least_time(kinds: Counter[ShareTimes], batch: int, at_least: int) -> float:
    """The least time in which the fleet takes a batch; one of the tables' times."""
    low = 0.0
    if _taken(kinds, low, at_least) >= batch:
        return low
    high = max(of.time_ms(of.most) for of in kinds)
    while low < (middle := low + (high - low) / 2) < high:
        if _taken(kinds, middle, at_least) >= batch:
            # Nothing happens between the times of the tables.
            high = max(of.time_ms(of.most_by(middle)) for of in kinds)
        else:
            low = middle
    return high


def _filled(base: Sequence[int], room: Sequence[int], left: int) -> list[int]:
    """Share out what is left among those that have room, as evenly as can be."""
    samples = list(base)
    open_ranks = sorted((i for i, n in enumerate(room) if n > 0), key=room.__getitem__)
    for place, i in enumerate(open_ranks):
        given = min(room[i], -(-left // (len(open_ranks) - place)))
        samples[i] += given
        left -= given
    return samples
