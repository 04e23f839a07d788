"""Choose one plan for every distinct convolution of some graphs."""

from collections.abc import Mapping
from types import MappingProxyType

from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.graph import Graph
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["Plans", "fixed_plans", "plan_convolutions", "plans_by_node"]

Plans = Mapping[ConvProblem, ConvPlan]
"""Problem -> its plan."""


def plan_convolutions(
    tuner: Tuner, graphs: tuple[Graph, ...], plans: Plans | None = None
) -> Plans:
    """Plan every distinct convolution of some graphs.

    Graphs are planned together, as they may share a total workspace. Existing plans are
    kept where they are within the tuner's limit.
    """
    problems = dict.fromkeys(
        node.attrs["problem"]
        for graph in graphs
        for node in graph.nodes
        if node.op == "conv"
    )
    limit = tuner.workspace_limit
    if tuner.total_workspace is not None:
        limit = tuner.total_workspace
    known = {
        problem: plan
        for problem, plan in (plans or {}).items()
        if problem in problems and plan.workspace <= limit
    }
    missing = [problem for problem in problems if problem not in known]
    made = dict(zip(missing, tuner.plan(missing), strict=True)) if missing else {}
    return MappingProxyType(known | made)


def fixed_plans(
    tuner: Tuner,
    graphs: tuple[Graph, ...],
    budget: MemoryBudget | None,
    plans: Plans | None = None,
) -> Plans:
    """Return the plans that are fixed before graphs are placed.

    Unless the budget has `convolutions="fixed"`, only the plans that are given are
    fixed.
    """
    if budget is None or budget.convolutions == "fixed":
        return plan_convolutions(tuner, graphs, plans)
    return plans or {}


def plans_by_node(graph: Graph, plans: Plans) -> dict[str, ConvPlan]:
    """Return the plan of each convolution node."""
    return {n.name: plans[n.attrs["problem"]] for n in graph.nodes if n.op == "conv"}
