"""Split of a mini-batch among ranks, and its cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.errors import PlanningError
from mucudnn.ir.fleet import Fleet
from mucudnn.passes.fleet.share_times import ShareTimes, share_times

__all__ = ["FleetPlan", "Share", "plan_of", "times_of"]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a mini-batch.

    Attributes:
        samples: Number of samples; 0 if the others are faster without this rank.
        passes: Number of steps the share runs as, with accumulated gradients.
        time_ms: Time of all these steps.
    """

    samples: int
    passes: int
    time_ms: float


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A mini-batch shared among ranks.

    Attributes:
        shares: One share per rank.
        all_reduce_ms: Time of the gradients' all-reduce.
    """

    shares: tuple[Share, ...]
    all_reduce_ms: float

    @property
    def samples(self) -> tuple[int, ...]:
        """Samples of each rank."""
        return tuple(share.samples for share in self.shares)

    @property
    def batch(self) -> int:
        """Total number of samples."""
        return sum(self.samples)

    @property
    def compute_ms(self) -> float:
        """Time until the slowest rank has its gradients."""
        return max(share.time_ms for share in self.shares)

    @property
    def step_ms(self) -> float:
        """Time of the step, all-reduce included."""
        return self.compute_ms + self.all_reduce_ms

    @property
    def idle_ms(self) -> tuple[float, ...]:
        """Time each rank waits for the slowest."""
        return tuple(self.compute_ms - share.time_ms for share in self.shares)

    @property
    def samples_per_s(self) -> float:
        """Throughput of the fleet in samples per second."""
        return 1e3 * self.batch / self.step_ms


def times_of(fleet: Fleet, most: int) -> tuple[ShareTimes, ...]:
    """Return the share times of each rank; equal ranks share one object."""
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
    """Return the plan of given shares; `times` are those of the ranks, if known."""
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
