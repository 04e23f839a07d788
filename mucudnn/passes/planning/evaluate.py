"""A request and residencies in, a schedule of a whole training step out.

Residency -> rematerialized graph -> in-place -> convolution plans -> schedule. The
bytes that are free while a convolution runs become its workspace, so that memory saved
on tensors buys faster algorithms.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mucudnn.ir.conv import ConvPlan
from mucudnn.passes.liveness import ALIGNMENT, rounded
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.rewrite import Rewritten
from mucudnn.passes.registry import name_of
from mucudnn.passes.residency import Residency
from mucudnn.passes.scheduling import intervals_of
from mucudnn.passes.scheduling.costs import (
    fastest_of,
    first_plans,
    timed_by,
    workspaces_of,
)
from mucudnn.passes.scheduling.intervals import ResidencyInterval, emit, refuse_more
from mucudnn.passes.scheduling.occupancy import Occupancy
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.passes.scheduling.step_time import step_ms
from mucudnn.passes.simulate import simulate

__all__ = ["Draft", "check_residency", "draft", "grown", "plan_residency"]

_REFUSE_WHAT_IS_LEAST = ("timed", "on_demand")
"""Schedulers that refuse nothing but what does not fit with the shortest intervals."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A step of which copies and convolutions are decided, and no program is written.

    Attributes:
        request: What was asked.
        residency: Of tensors.
        ready: The graph that comes of it.
        plans: Convolution node -> how to run it.
        intervals: When storages are on the device.
        occupancy: Their ledger, workspaces included.
    """

    request: StepRequest
    residency: Mapping[str, Residency]
    ready: Rewritten
    plans: Mapping[str, ConvPlan]
    intervals: Sequence[ResidencyInterval]
    occupancy: Occupancy

    def step_ms(self, below: float = math.inf) -> float:
        """The plan's predicted time; infinity where that is not below a limit."""
        known, graph = self.ready.profile, self.ready.graph
        times = known.node_ms
        node_ms = [
            self.plans[node.name].time_ms
            if node.name in self.plans
            else times[node.name]
            for node in graph.nodes
        ]
        moved = {i.storage for i in self.intervals if i.copied_in or i.copied_out}
        nbytes = {name: graph.tensors[name].nbytes for name in moved}
        rates = known.out_bytes_per_ms, known.in_bytes_per_ms
        lost_ms = known.lost_ms
        return step_ms(self.intervals, node_ms, nbytes, rates, lost_ms, below)

    def plan(self) -> StepPlan:
        """The step with its program, simulated."""
        request, ready = self.request, self.ready
        workspaces = workspaces_of(ready.profile, self.plans)
        peak, _ = self.occupancy.peak()
        schedule = emit(ready.graph, self.intervals, workspaces, peak, ready.away)
        return StepPlan(
            schedule=schedule,
            intervals=tuple(self.intervals),
            plans=self.plans,
            residency=self.residency,
            prediction=simulate(schedule, timed_by(ready.profile, self.plans)),
            policy=name_of(request.policy),
            scheduler=name_of(request.timing),
            budget=request.budget,
        )


def draft(request: StepRequest, residency: Mapping[str, Residency]) -> Draft:
    """Decide about copies and convolutions of a step whose residencies are decided.

    Args:
        request: What is asked; its policy is not, but gives the decision its name.
        residency: Of tensors; what is left out is kept.

    Raises:
        PlanningError: It cannot fit; says how many bytes short, and at which node.
    """
    ready = request.rewritten(residency)
    chosen = first_plans(ready.profile, request.convolutions, request.plans)
    intervals, occupancy = intervals_of(
        request.timing, ready.problem(chosen, request.budget)
    )
    if request.convolutions == "dynamic":
        chosen = grown(ready, chosen, occupancy)
    return Draft(request, residency, ready, chosen, intervals, occupancy)


def plan_residency(
    request: StepRequest, residency: Mapping[str, Residency]
) -> StepPlan:
    """Schedule a step whose residencies are decided: see `draft`.

    Raises:
        PlanningError: It cannot fit; says how many bytes short, and at which node.
    """
    return draft(request, residency).plan()


def check_residency(request: StepRequest, residency: Mapping[str, Residency]) -> None:
    """Refuse what cannot be scheduled; takes less time than scheduling.

    Raises:
        PlanningError: The residencies do not fit the budget.
    """
    if request.timing not in _REFUSE_WHAT_IS_LEAST:
        plan_residency(request, residency)
        return
    refuse_more(*request.need(residency), request.budget)


def grown(
    ready: Rewritten, plans: Mapping[str, ConvPlan], occupancy: Occupancy
) -> dict[str, ConvPlan]:
    """The fastest plan in what is free at each convolution; the ledger follows."""
    found = dict(plans)
    for position, node in enumerate(ready.graph.nodes):
        front = ready.profile.fronts.get(node.name)
        if front is None:
            continue
        before = rounded(plans[node.name].workspace)
        free = occupancy.budget - occupancy[position] + before
        if free < math.inf:
            free -= free % ALIGNMENT
        plan = fastest_of([p for p in front if p.workspace <= free])
        occupancy.add(position, position, rounded(plan.workspace) - before)
        found[node.name] = plan
    return found
