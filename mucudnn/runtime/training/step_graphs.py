"""From a graph to what an executor runs: plans, workspaces, a schedule, places.

Every convolution is planned by the tuner under its workspace limit. The workspaces of
one stream share the arena with the tensors: each is there while its node runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.graph import Graph
from mucudnn.ir.schedule import Schedule
from mucudnn.passes.ordering import Order, ordered
from mucudnn.passes.placement.layout import Layout, lay_out
from mucudnn.passes.scheduling.keep_all import keep_all
from mucudnn.runtime.training.profiler import kernel_workspaces
from mucudnn.runtime.tuning.plan_texts import restore_plans
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["Plans", "Prepared", "plan_convolutions", "prepare"]

Plans = Mapping[ConvProblem, ConvPlan]
"""How each convolution is run."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A graph with every decision made.

    Attributes:
        schedule: What runs when.
        layout: Where everything is that is not on the device all the time.
        plans: Convolution node -> its plan.
    """

    schedule: Schedule
    layout: Layout
    plans: Mapping[str, ConvPlan] = field(default_factory=lambda: MappingProxyType({}))


def prepare(
    tuner: Tuner,
    graph: Graph,
    *,
    order: str | Order = "builder",
    plans: Plans | None = None,
) -> Prepared:
    """Plan, schedule and place a graph whose tensors all stay on the device.

    Args:
        tuner: Plans the convolutions.
        graph: What is run.
        order: In which order; a name in `ORDERS`, or a function.
        plans: Made before; what is missing is planned now.

    Raises:
        PlanningError: A convolution has no plan within the limit.
    """
    known = plan_convolutions(tuner, (graph,), plans)
    chosen = {
        node.name: known[node.attrs["problem"]]
        for node in graph.nodes
        if node.op == "conv"
    }
    for plan in dict.fromkeys(chosen.values()):
        restore_plans(tuner.backend, tuner.cache, plan)
    workspaces = kernel_workspaces(tuner.backend, graph)
    workspaces |= {n: plan.workspace for n, plan in chosen.items() if plan.workspace}
    final = ordered(order, graph, workspaces)
    schedule = keep_all(final, workspaces)
    return Prepared(schedule, lay_out(schedule), MappingProxyType(chosen))


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
