"""How the convolutions of a step's graphs are run: planned by the tuner, or before."""

from collections.abc import Mapping
from types import MappingProxyType

from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.graph import Graph
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["Plans", "plan_convolutions"]

Plans = Mapping[ConvProblem, ConvPlan]
"""How each convolution is run."""


def plan_convolutions(
    tuner: Tuner, graphs: tuple[Graph, ...], plans: Plans | None = None
) -> Plans:
    """One plan for every distinct convolution of some graphs.

    Args:
        tuner: Plans what is not known.
        graphs: Planned together, as a limit on all workspaces together demands.
        plans: Made before; kept where they are within the tuner's limit.
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
