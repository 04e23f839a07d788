"""Split a mini-batch among ranks such that the slowest rank ends as early as possible.

    minimise    max of t_i(n_i) + all-reduce
    subject to  sum of n_i = N,  at_least <= n_i <= what rank i can take

Oyama et al., "Accelerating Deep Learning Frameworks with Micro-batches", CLUSTER 2018,
train on unequal devices this way, but do not publish how they divide. Times never fall
with the share, so within a time T rank i takes at most c_i(T) samples, and T is enough
if and only if these add up to N. The least such T is one of the times of the tables; it
is bisected down to the last bit, so the result is exact.
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
    """Split a mini-batch so that a step takes the least time.

    Args:
        fleet: The ranks.
        batch: Samples of all ranks together.
        at_least: Minimum samples of every rank; with 0 a slow rank may have none.

    Raises:
        ValueError: The batch has fewer samples than the ranks require.
        PlanningError: The batch does not fit on the fleet.
    """
    an_integer("batch", batch, 1, _MOST)
    times = times_of(fleet, batch)
    _check(fleet, times, batch, at_least)
    kinds = Counter(times)
    level = _least_time(kinds, batch, at_least)
    base = [max(at_least, of.most_before(level)) for of in times]
    room = [of.most_by(level) - n for of, n in zip(times, base, strict=True)]
    samples = _distribute(base, room, batch - sum(base))
    return plan_of(fleet, samples, times)


def best_batch(fleet: Fleet, least: int, most: int, *, at_least: int = 0) -> FleetPlan:
    """Choose and split the mini-batch with the highest throughput in a range.

    Errors are those of `split_batch`.
    """
    an_integer("least", least, 1, _MOST)
    an_integer("most", most, least, _MOST)
    times = times_of(fleet, most)
    _check(fleet, times, least, at_least)
    kinds = Counter(times)
    floor = max(of.time_ms(at_least) for of in kinds)
    best, chosen = -1.0, least
    for level in sorted({ms for of in kinds for ms in of.times_ms}):
        taken = min(most, _samples_within(kinds, level, at_least))
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


def _samples_within(kinds: Counter[ShareTimes], level: float, at_least: int) -> int:
    """Return the samples a fleet takes within a time, at least `at_least` per rank."""
    return sum(n * max(at_least, of.most_by(level)) for of, n in kinds.items())


def _least_time(kinds: Counter[ShareTimes], batch: int, at_least: int) -> float:
    """Return the least of the tables' times in which the fleet takes a batch."""
    low = 0.0
    if _samples_within(kinds, low, at_least) >= batch:
        return low
    high = max(of.time_ms(of.most) for of in kinds)
    while low < (middle := low + (high - low) / 2) < high:
        if _samples_within(kinds, middle, at_least) >= batch:
            # Only the times of the tables matter: step down to the next one.
            high = max(of.time_ms(of.most_by(middle)) for of in kinds)
        else:
            low = middle
    return high


def _distribute(base: Sequence[int], room: Sequence[int], left: int) -> list[int]:
    """Distribute the remaining samples evenly among ranks that have room."""
    samples = list(base)
    open_ranks = sorted((i for i, n in enumerate(room) if n > 0), key=room.__getitem__)
    for place, i in enumerate(open_ranks):
        given = min(room[i], -(-left // (len(open_ranks) - place)))
        samples[i] += given
        left -= given
    return samples
