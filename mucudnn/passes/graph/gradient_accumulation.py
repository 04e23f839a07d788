"""Gradient accumulation: one update from the summed gradients of several mini-batches.

There are two graphs: one adds gradients to totals that persist between steps, the other
adds the last gradients, updates by the mean, and clears the totals.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node, Phase, Role, TensorSpec
from mucudnn.ir.initializers import Constant
from mucudnn.ir.loss_scaling import DynamicLossScale
from mucudnn.ir.operations import make_node
from mucudnn.ir.optimizers import Optimizer
from mucudnn.passes.graph.dependencies import finished, with_nodes_after
from mucudnn.passes.graph.optimizer_updates import When, with_updates

__all__ = ["Accumulating", "accumulating", "updated_by"]


@dataclass(frozen=True, slots=True)
class Accumulating:
    """The two graphs of gradient accumulation.

    Attributes:
        micro_step: Adds to the totals; runs for all mini-batches but the last.
        last_step: Adds the last gradients, updates the parameters, clears the totals.
            It declares all persistent tensors of both graphs and of the optimizer.
    """

    micro_step: Graph
    last_step: Graph


def accumulating(
    graph: Graph,
    optimizer: Optimizer,
    mini_batches: int,
    *,
    when: When = "early",
    gradient_scale: float = 1.0,
    scaling: DynamicLossScale | None = None,
) -> Accumulating:
    """Build the graphs that update by the mean gradient of several mini-batches.

    The other arguments are those of `with_updates`.

    Raises:
        ValueError: As `with_updates`, or fewer than 2 mini-batches.
    """
    if mini_batches < 2:
        raise ValueError(
            f"accumulation takes at least 2 mini-batches, got {mini_batches}"
        )
    micro = _with_totals(graph)
    scale = gradient_scale / mini_batches
    totals = MappingProxyType({w: _total(w) for w in graph.gradients})
    updated = with_updates(
        replace(micro, gradients=totals),
        optimizer,
        when=when,
        gradient_scale=scale,
        scaling=scaling,
    )
    last = replace(_with_clearing(updated), gradients=graph.gradients)
    return Accumulating(micro, last)


def updated_by(graph: Graph) -> tuple[str, ...]:
    """Return the tensors that updates read: totals if there are any, else gradients."""
    totals = ((_total(w), gradient) for w, gradient in graph.gradients.items())
    return tuple(total if total in graph.tensors else g for total, g in totals)


def _total(parameter: str) -> str:
    return f"{parameter}:total"


def _with_totals(graph: Graph) -> Graph:
    """Add each gradient to its total as soon as it is final."""
    tensors, initializers = dict(graph.tensors), dict(graph.initializers)
    known = finished(graph, graph.gradients.values())
    ready: dict[int, list[Node]] = {}
    for w, gradient in graph.gradients.items():
        spec = graph.tensors[w]
        total = TensorSpec(_total(w), spec.shape, spec.dtype, Role.STATE)
        tensors[total.name] = total
        initializers[total.name] = Constant(0.0)
        node = make_node(
            tensors,
            f"{w}:accumulate",
            "accumulate",
            (total.name, gradient),
            (),
            MappingProxyType({"factor": 1.0}),
            Phase.UPDATE,
            (total.name,),
        )
        ready.setdefault(known[gradient], []).append(node)
    return replace(
        graph,
        tensors=MappingProxyType(tensors),
        nodes=with_nodes_after(graph, ready),
        initializers=MappingProxyType(initializers),
    )


def _with_clearing(graph: Graph) -> Graph:
    """Clear totals behind the updates, their last readers.

    Totals are filled with zeros, as infinity times zero is not a number. Consecutive
    updates stay together, so that they may be one launch.
    """
    tensors = dict(graph.tensors)
    totals = set(graph.gradients.values())
    last = {name: node for node in graph.nodes for name in node.inputs}
    nodes: list[Node] = []
    done: list[str] = []
    for node in graph.nodes:
        if node.phase is not Phase.UPDATE:
            nodes += (_clear(tensors, total) for total in done)
            done = []
        nodes.append(node)
        done += (t for t in node.inputs if t in totals and last[t] is node)
    nodes += (_clear(tensors, total) for total in done)
    return replace(graph, tensors=MappingProxyType(tensors), nodes=tuple(nodes))


def _clear(tensors: dict[str, TensorSpec], total: str) -> Node:
    name = f"{total}.cleared"
    tensors[name] = replace(tensors[total], name=name, role=Role.GRADIENT, alias=total)
    attrs = MappingProxyType({"value": 0.0})
    return make_node(tensors, name, "fill", (), (name,), attrs, Phase.UPDATE)
