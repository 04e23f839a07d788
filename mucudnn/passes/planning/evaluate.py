"""A request and residencies in, a schedule of a whole training step out.

Residency -> rematerialized graph -> in-place -> convolution plans -> schedule. The
bytes that are free while a convolution runs become its workspace, so that memory saved
on tensors buys faster algorithms.
"""

import math
from collections.abc import Mapping

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
from mucudnn.passes.scheduling.intervals import emit
from mucudnn.passes.scheduling.occupancy import Occupancy
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.passes.simulate import simulate

__all__ = ["check_residency", "grown", "plan_residency"]

_REFUSE_WHAT_IS_LEAST = ("timed", "on_demand")
"""Schedulers that refuse nothing but what does not fit with the shortest intervals."""


def plan_residency(
    request: StepRequest, residency: Mapping[str, Residency]
) -> StepPlan:
    """Schedule a step whose residencies are decided.

    Args:
        request: What is asked; its policy is not, but gives the decision its name.
        residency: Of tensors; what is left out is kept.

    Raises:
        PlanningError: It cannot fit; says how many bytes short, and at which node.
    """
    ready = request.rewritten(residency)
    known = ready.profile
    chosen = first_plans(known, request.convolutions, request.plans)
    intervals, occupancy = intervals_of(
        request.timing, ready.problem(chosen, request.budget)
    )
    if request.convolutions == "dynamic":
        chosen = grown(ready, chosen, occupancy)
    workspaces = workspaces_of(known, chosen)
    peak, _ = occupancy.peak()
    schedule = emit(ready.graph, intervals, workspaces, peak, ready.away)
    return StepPlan(
        schedule=schedule,
        intervals=tuple(intervals),
        plans=chosen,
        residency=residency,
        prediction=simulate(schedule, timed_by(known, chosen)),
        policy=name_of(request.policy),
        scheduler=name_of(request.timing),
        budget=request.budget,
    )


def check_residency(request: StepRequest, residency: Mapping[str, Residency]) -> None:
    """Refuse what cannot be scheduled; takes less time than scheduling.

    Raises:
        PlanningError: The residencies do not fit the budget.
    """
    if request.timing not in _REFUSE_WHAT_IS_LEAST:
        plan_residency(request, residency)
        return
    ready = request.rewritten(residency)
    plans = first_plans(ready.profile, request.convolutions, request.plans)
    ready.problem(plans, request.budget).least()


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
