"""Baselines and a lower bound that load-balanced splits are compared with."""

from mucudnn.ir.fleet import Fleet
from mucudnn.passes.fleet.plan import FleetPlan, plan_of, times_of
from mucudnn.passes.fleet.share_times import ShareTimes

__all__ = ["best_rate", "equal_shares", "proportional_shares", "step_bound_ms"]


def equal_shares(fleet: Fleet, batch: int) -> FleetPlan:
    """Give every rank the same share, as data-parallel training usually does."""
    each, more = divmod(batch, len(fleet.ranks))
    return plan_of(fleet, [each + (i < more) for i in range(len(fleet.ranks))])


def proportional_shares(fleet: Fleet, batch: int) -> FleetPlan:
    """Share in proportion to each rank's speed at an equal share.

    Samples left by rounding go to the ranks that lost the most.
    """
    times = times_of(fleet, batch)
    equal = -(-batch // len(times))
    speeds = [_speed(of, min(equal, of.most)) for of in times]
    exact = [batch * speed / sum(speeds) for speed in speeds]
    samples = [int(share) for share in exact]
    lost = sorted(range(len(exact)), key=lambda i: samples[i] - exact[i])
    for i in lost[: batch - sum(samples)]:
        samples[i] += 1
    return plan_of(fleet, samples, times)


def step_bound_ms(fleet: Fleet, batch: int) -> float:
    """Return a lower bound of the step: every rank at its best throughput."""
    rates = sum(best_rate(of) for of in times_of(fleet, batch))
    return batch / rates + fleet.all_reduce_ms


def best_rate(times: ShareTimes) -> float:
    """Return the highest throughput at any share, in samples per millisecond."""
    rates = (_speed(times, n) for n in times.corners())
    return max(rates, default=0.0)


def _speed(times: ShareTimes, samples: int) -> float:
    return samples / times.time_ms(samples) if samples else 0.0
