"""Place a step whose tensors all stay on the device, by sizes alone."""

from dataclasses import replace

from mucudnn.ir.graph import Graph, Phase
from mucudnn.ir.placement import VIRTUAL
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.optimizer_updates import updates_last
from mucudnn.passes.ordering import Order, ordered
from mucudnn.passes.planning.place_step import PlacedStep, place_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.runtime.profiling.mapping_costs import mapping_costs
from mucudnn.runtime.training.step.convolution_plans import Plans, plans_by_node
from mucudnn.runtime.training.step.sizes import size_profile
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["resident_step"]


def resident_step(
    tuner: Tuner, graph: Graph, order: str | Order, plans: Plans, placement: str
) -> PlacedStep:
    """Place a graph whose tensors all stay on the device.

    Where updates can be batched they come last, unless that takes more memory.
    """
    placed = _placed(tuner, graph, order, plans, placement)
    last = updates_last(graph)
    ops = {node.op for node in graph.nodes if node.phase is Phase.UPDATE}
    kernels = (tuner.backend.kernels.get(op) for op in ops)
    batched = any(kernel is not None and kernel.together for kernel in kernels)
    if last.nodes == graph.nodes or not batched:
        return placed
    other = _placed(tuner, last, order, plans, placement)
    return other if other.nbytes <= placed.nbytes else placed


def _placed(
    tuner: Tuner, graph: Graph, order: str | Order, plans: Plans, placement: str
) -> PlacedStep:
    """Place a graph with all tensors resident, in-place pass included."""
    final = in_place(graph)
    sizes = size_profile(tuner, final, plans)
    if placement == VIRTUAL:
        sizes = replace(sizes, chunks=mapping_costs(tuner.backend))
    chosen = plans_by_node(final, plans)
    scratch = {name: plan.workspace for name, plan in chosen.items() if plan.workspace}
    return place_step(
        StepRequest(
            ordered(order, final, {**sizes.workspaces, **scratch}),
            sizes,
            policy="keep_all",
            convolutions="fixed",
            plans=chosen,
            placement=placement,
        )
    )
