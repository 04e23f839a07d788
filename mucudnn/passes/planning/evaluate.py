"""Schedule a whole training step for given residencies.

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
from mucudnn.passes.scheduling.intervals import ResidencyInterval, check_fits, emit
from mucudnn.passes.scheduling.occupancy import Occupancy
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.passes.scheduling.step_time import step_ms
from mucudnn.passes.simulate import simulate

__all__ = [
    "Draft",
    "check_residency",
    "draft",
    "grow_workspace_plans",
    "plan_residency",
]

_COMPLETE_SCHEDULERS = ("timed", "on_demand")
"""Schedulers that succeed whenever the shortest residency intervals fit."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A step with copies and convolutions decided, but no program emitted yet.

    Attributes:
        request: The planning request.
        residency: Residencies of tensors.
        ready: The graph rewritten for them.
        plans: Plan of each convolution node.
        intervals: Residency intervals of storages.
        occupancy: Memory ledger, workspaces included.
    """

    request: StepRequest
    residency: Mapping[str, Residency]
    ready: Rewritten
    plans: Mapping[str, ConvPlan]
    intervals: Sequence[ResidencyInterval]
    occupancy: Occupancy

    def step_ms(self, below: float = math.inf) -> float:
        """Return the predicted time, or infinity if it is not below a limit."""
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
        """Emit and simulate the program of the step."""
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
    """Decide copies and convolution plans of a step with given residencies.

    Raises:
        PlanningError: The step cannot fit; has the shortfall and the node.
    """
    ready = request.rewritten(residency)
    chosen = first_plans(ready.profile, request.convolutions, request.plans)
    intervals, occupancy = intervals_of(
        request.timing, ready.problem(chosen, request.budget)
    )
    if request.convolutions == "dynamic":
        chosen = grow_workspace_plans(ready, chosen, occupancy)
    return Draft(request, residency, ready, chosen, intervals, occupancy)


def plan_residency(
    request: StepRequest, residency: Mapping[str, Residency]
) -> StepPlan:
    """Schedule a step with given residencies; errors are those of `draft`."""
    return draft(request, residency).plan()


def check_residency(request: StepRequest, residency: Mapping[str, Residency]) -> None:
    """Raise a `PlanningError` if residencies do not fit; faster than scheduling."""
    if request.timing not in _COMPLETE_SCHEDULERS:
        plan_residency(request, residency)
        return
    check_fits(*request.need(residency), request.budget)


def grow_workspace_plans(
    ready: Rewritten, plans: Mapping[str, ConvPlan], occupancy: Occupancy
) -> dict[str, ConvPlan]:
    """Choose the fastest plan that fits at each convolution; update the ledger."""
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
