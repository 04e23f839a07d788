"""A mini-batch shared out, and what that costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.errors import PlanningError
from mucudnn.ir.fleet import Fleet
from mucudnn.passes.fleet.share_times import ShareTimes, share_times

__all__ = ["FleetPlan", "Share", "plan_of", "times_of"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank does of a mini-batch.

    Attributes:
        samples: Its part; 0 where the others are faster without it.
        passes: Steps that it runs as; their gradients are summed.
        time_ms: Of all of them.
    """

    samples: int
    passes: int
    time_ms: float


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A mini-batch shared out.

    Attributes:
        shares: One a rank.
        all_reduce_ms: What summing the gradients takes.
    """

    shares: tuple[Share, ...]
    all_reduce_ms: float

    @property
    def samples(self) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(share.samples for share in self.shares)

    @property
    def batch(self) -> int:
        """Samples of all ranks."""
        return sum(self.samples)

    @property
    def compute_ms(self) -> float:
        """Until the slowest rank has its gradients."""
        return max(share.time_ms for share in self.shares)

    @property
    def step_ms(self) -> float:
        """Until all have the sum of all gradients."""
        return self.compute_ms + self.all_reduce_ms

    @property
    def idle_ms(self) -> tuple[float, ...]:
        """How long each rank waits for the slowest."""
        return tuple(self.compute_ms - share.time_ms for share in self.shares)

    @property
    def samples_per_s(self) -> float:
        """Of the fleet."""
        return 1e3 * self.batch / self.step_ms


def times_of(fleet: Fleet, most: int) -> tuple[ShareTimes, ...]:
    """The times of each rank's shares; ranks that are alike have one object."""
    known: dict[Any, ShareTimes] = {}
    found = []
    for rank in fleet.ranks:
        kind = rank.table.points, rank.memory, rank.accumulates
        if kind not in known:
            known[kind] = share_times(rank, most)
        found.append(known[kind])
    return tuple(found)


def plan_of(
    fleet: Fleet, samples: Sequence[int], times: Sequence[ShareTimes] | None = None
) -> FleetPlan:
    """What given shares cost.

    Args:
        fleet: Who takes them.
        samples: One number a rank.
        times: Of each rank's shares, if they are known.

    Raises:
        ValueError: There are more or fewer shares than ranks.
        PlanningError: A share does not fit.
    """
    if len(samples) != len(fleet.ranks):
        raise ValueError(
            f"there are {len(samples)} shares for {len(fleet.ranks)} ranks"
        )
    known = times_of(fleet, max(samples)) if times is None else times
    shares = []
    for rank, share, of in zip(fleet.ranks, samples, known, strict=True):
        if share > of.most:
            raise PlanningError(
                f"{rank.name} takes at most {of.most} samples a step, not {share}"
            )
        shares.append(Share(share, of.passes(share), of.time_ms(share)))
    return FleetPlan(tuple(shares), fleet.all_reduce_ms)
