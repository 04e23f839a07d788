"""Schedulers: when offloads and prefetches run."""

from mucudnn.passes.registry import ALL, Strategies, name_of
from mucudnn.passes.scheduling.intervals import MemoryLedger, ResidencyInterval
from mucudnn.passes.scheduling.problem import Scheduler, SchedulingProblem
from mucudnn.passes.scheduling.schedulers import adaptive_window, on_demand, timed

__all__ = [
    "SCHEDULERS",
    "Scheduler",
    "SchedulingProblem",
    "adaptive_window",
    "intervals_of",
    "on_demand",
    "timed",
]

SCHEDULERS: Strategies[Scheduler] = Strategies(
    "scheduler",
    (on_demand, adaptive_window, timed),
    group="mucudnn.schedulers",
    reserved=(ALL,),
)
"""Schedulers by name; `register` or an entry point of the group adds more."""


def intervals_of(
    scheduler: str | Scheduler, problem: SchedulingProblem
) -> tuple[list[ResidencyInterval], MemoryLedger]:
    """Run a scheduler, possibly a user's, and check its result.

    Raises:
        PlanningError: Nothing fits.
        TypeError: The scheduler did not return intervals and their ledger.
        ValueError: The scheduler is unknown.
    """
    found: object = SCHEDULERS.resolve(scheduler)(problem)
    match found:
        case (list() as intervals, MemoryLedger() as ledger):
            kinds = {*map(type, intervals)}
            if all(issubclass(kind, ResidencyInterval) for kind in kinds):
                return intervals, ledger
    raise TypeError(
        f"scheduler {name_of(scheduler)!r} returned {type(found).__name__}; it must "
        "return a list of intervals and their ledger, as problem.least() does"
    )
