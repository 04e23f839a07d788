"""Every scheduler that ships, in one table."""

from mucudnn.passes.registry import ALL, Strategies, name_of
from mucudnn.passes.scheduling.adaptive_window import adaptive_window
from mucudnn.passes.scheduling.intervals import ResidencyInterval
from mucudnn.passes.scheduling.occupancy import Occupancy
from mucudnn.passes.scheduling.on_demand import on_demand
from mucudnn.passes.scheduling.problem import Problem, Scheduler
from mucudnn.passes.scheduling.transfer_aware import timed

__all__ = [
    "SCHEDULERS",
    "Problem",
    "Scheduler",
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
"""When copies run; more join by `register` or by an entry point of the group."""


def intervals_of(
    scheduler: str | Scheduler, problem: Problem
) -> tuple[list[ResidencyInterval], Occupancy]:
    """What a scheduler decides, checked: it may be somebody's own.

    Raises:
        PlanningError: Nothing fits.
        TypeError: It returned something else than intervals and their ledger.
        ValueError: It is not known.
    """
    found: object = SCHEDULERS.resolve(scheduler)(problem)
    match found:
        case (list() as intervals, Occupancy() as ledger):
            kinds = {*map(type, intervals)}
            if all(issubclass(kind, ResidencyInterval) for kind in kinds):
                return intervals, ledger
    raise TypeError(
        f"scheduler {name_of(scheduler)!r} returned {type(found).__name__}; a list of "
        "intervals and their ledger are wanted, such as problem.least() has"
    )
