"""How a mini-batch is shared out among devices that are not there, and what it brings.

Times are those of tables, of recordings, or estimates; the split is the planner's. What
it is compared with: equal shares, shares in proportion to speed, one device alone, and
the bound that no split beats.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.errors import PlanningError
from mucudnn.ir.devices import get_device
from mucudnn.ir.fleet import AllReduce, Fleet
from mucudnn.ir.graph import Graph
from mucudnn.notebook import drawn
from mucudnn.passes.fleet import (
    FleetPlan,
    best_batch,
    equal_shares,
    proportional_shares,
    split_batch,
    step_bound_ms,
)
from mucudnn.studies.fleet_devices import FleetDevice, parse_device, ranks_of
from mucudnn.studies.memory_findings import StepSpec

__all__ = ["FleetStudy", "Link", "study_fleet"]

_LATENCY_MS = 0.02
"""Of a message between devices; assumed."""

_ELEMENT = 4


@dataclass(frozen=True, slots=True)
class Link:
    """What the devices are joined by.

    Attributes:
        bytes_per_s: Of the slowest link, one direction; None: of the slowest device's
            link to its host.
        all_reduce_ms: What the sum of all gradients takes, if it was measured.
    """

    bytes_per_s: float | None = None
    all_reduce_ms: float | None = None


_UNKNOWN = Link()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStudy:
    """What came of it.

    Attributes:
        title: The network.
        fleet: Who takes part.
        sources: Device -> where its times are from.
        link: Where the all-reduce's time is from.
        plan: The planner's split.
        equal: Equal shares; None where one does not fit.
        proportional: Shares in proportion to speed; None where one does not fit.
        alone: The whole batch on each rank by itself; None where it does not fit.
        bound_ms: No split takes less.
    """

    title: str
    fleet: Fleet
    sources: Mapping[str, str]
    link: str
    plan: FleetPlan
    equal: FleetPlan | None
    proportional: FleetPlan | None
    alone: tuple[float | None, ...]
    bound_ms: float

    @property
    def fastest_alone_ms(self) -> float | None:
        """The batch on the fastest device by itself; None where it fits on none."""
        return min((ms for ms in self.alone if ms is not None), default=None)

    def speedup(self, other: FleetPlan | None) -> float | None:
        """How many times faster the planner's split is."""
        return None if other is None else other.step_ms / self.plan.step_ms

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        rows = zip(
            self.fleet.ranks,
            self.plan.shares,
            self.plan.idle_ms,
            self.alone,
            strict=True,
        )
        fastest = self.fastest_alone_ms
        return {
            "schema": 1,
            "model": self.title,
            "batch": self.plan.batch,
            "sources": dict(self.sources),
            "all_reduce": self.link,
            "all_reduce_ms": self.plan.all_reduce_ms,
            "ranks": [
                {
                    "name": rank.name,
                    "samples": share.samples,
                    "passes": share.passes,
                    "time_ms": share.time_ms,
                    "idle_ms": idle,
                    "alone_ms": alone,
                }
                for rank, share, idle, alone in rows
            ],
            "planned_ms": self.plan.step_ms,
            "equal_ms": self.equal and self.equal.step_ms,
            "proportional_ms": self.proportional and self.proportional.step_ms,
            "bound_ms": self.bound_ms,
            "samples_per_s": self.plan.samples_per_s,
            "speedup_over_equal": self.speedup(self.equal),
            "speedup_over_proportional": self.speedup(self.proportional),
            "speedup_over_fastest": fastest and fastest / self.plan.step_ms,
        }

    def _repr_html_(self) -> str:
        """For notebooks."""
        return drawn("fleet_study", self)


def study_fleet(
    step: StepSpec,
    devices: Sequence[str],
    *,
    most: int | None = None,
    link: Link = _UNKNOWN,
    at_least: int = 0,
    memory: int | None = None,
    planned: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> FleetStudy:
    """Share out a step's mini-batch among devices.

    What does an old card beside a new one bring?::

        step = StepSpec(model="resnet18", batch=256)
        study_fleet(step, ["k80", "p100"]).plan.samples

    Args:
        step: The step; its batch is that of all devices together.
        devices: As `fleet_devices` reads them.
        most: The largest batch; if given, the one with the most samples a second from
            the step's own up to this is taken.
        link: What the devices are joined by.
        at_least: Samples of every rank; with 0 a slow one may be left out.
        memory: Bytes that a step may use on each device, if less than it has.
        planned: Whether steps that need more are also planned within that memory, by
            offload and recomputation; they are where that is faster than several
            smaller steps. Of estimated devices only.
        progress: Called with what is being done, how much is done, and of how much.

    Raises:
        ValueError: A device is not known, there is none, or a size is out of range.
        PlanningError: The batch does not fit.
        CacheError: A file is no table of steps.
        BackendUnavailableError: A recording is missing, or is something else.
    """
    kinds = [parse_device(text) for text in devices]
    largest = step.batch if most is None else most
    graph = functools.cache(step.graph)
    reduce, words = _all_reduce(kinds, link, graph(1))
    found = []
    for by_plan in (False, True)[: 1 + planned]:
        ranks = []
        for i, kind in enumerate(kinds):
            progress(f"what a step takes on {kind.title}", i, len(kinds))
            ranks += ranks_of(kind, step, largest, graph, limit=memory, planned=by_plan)
        fleet = Fleet(tuple(ranks), reduce)
        progress("shares", 0, 1)
        found.append((fleet, _shared(fleet, step.batch, most, at_least)))
    fleet, plan = _fastest(found)
    return FleetStudy(
        title=step.title,
        fleet=fleet,
        sources={kind.title: kind.source for kind in kinds},
        link=words,
        plan=plan,
        equal=_fitting(equal_shares, fleet, plan.batch),
        proportional=_fitting(proportional_shares, fleet, plan.batch),
        alone=_alone(fleet, plan.batch),
        bound_ms=step_bound_ms(fleet, plan.batch),
    )


Shared = FleetPlan | PlanningError


def _shared(fleet: Fleet, batch: int, most: int | None, at_least: int) -> Shared:
    """The best split of a batch, or the best of a range; why there is none."""
    try:
        if most is None:
            return split_batch(fleet, batch, at_least=at_least)
        return best_batch(fleet, batch, most, at_least=at_least)
    except PlanningError as e:
        return e


def _fastest(found: Sequence[tuple[Fleet, Shared]]) -> tuple[Fleet, FleetPlan]:
    """The one with the most samples a second.

    Raises:
        PlanningError: The batch fits on none.
    """
    fitting = [(f, plan) for f, plan in found if isinstance(plan, FleetPlan)]
    if fitting:
        return max(fitting, key=lambda one: one[1].samples_per_s)
    raise next(error for _, error in found[::-1] if isinstance(error, PlanningError))


def _fitting(
    shares: Callable[[Fleet, int], FleetPlan], fleet: Fleet, batch: int
) -> FleetPlan | None:
    try:
        return shares(fleet, batch)
    except PlanningError:
        return None


def _alone(fleet: Fleet, batch: int) -> tuple[float | None, ...]:
    """The whole batch on each rank; ranks that are alike are looked at once."""
    known: dict[Any, float | None] = {}
    for i, rank in enumerate(fleet.ranks):
        kind = rank.table, rank.memory, rank.accumulates
        if kind not in known:
            found = _fitting(split_batch, fleet.alone(i), batch)
            known[kind] = None if found is None else found.step_ms
    return tuple(
        known[rank.table, rank.memory, rank.accumulates] for rank in fleet.ranks
    )


def _all_reduce(
    kinds: Sequence[FleetDevice], link: Link, graph: Graph
) -> tuple[AllReduce, str]:
    """What summing the gradients takes, and where that is from."""
    if link.all_reduce_ms is not None:
        return AllReduce(measured_ms=link.all_reduce_ms), "as given"
    rates = {kind.name: get_device(kind.name).out.value for kind in kinds if kind.name}
    rate = link.bytes_per_s or min(rates.values(), default=None)
    if rate is None:
        return AllReduce(), "not counted: no link is known"
    reduce = AllReduce(
        nbytes=_ELEMENT * graph.parameter_count,
        bytes_per_ms=rate / 1e3,
        latency_ms=_LATENCY_MS,
    )
    whose = "as given" if link.bytes_per_s else "the slowest device's to its host"
    return reduce, (
        f"a ring over {rate / 1e9:g} GB/s ({whose}), {1e3 * _LATENCY_MS:g} µs a "
        "message (assumed), after the backward pass"
    )
