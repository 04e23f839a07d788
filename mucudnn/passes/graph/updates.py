"""Append optimizer updates and gradient accumulation to a training graph.

An update reads its gradient and overwrites its parameter, so it follows their last
other use. Run as early as possible, it frees the gradient at once; run at the end, all
gradients are alive together, which a global norm and dynamic loss scaling require.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.initializers import Constant
from mucudnn.ir.operations import make_node
from mucudnn.ir.optimizers import (
    AdaGrad,
    Adam,
    DynamicLossScale,
    Momentum,
    Optimizer,
    RmsProp,
    Sgd,
)
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.passes.graph.autodiff import LOSS_SCALE
from mucudnn.passes.graph.precision import (
    COUNTS,
    LOSS_SCALES,
    copies_of_parameters,
    overflow_checks,
    scale_adjustment,
)
from mucudnn.passes.liveness import finished, with_nodes_after

LEARNING_RATE = "lr"
"""Name of the scalar input with the learning rate."""

STEP = "step"
"""Name of the scalar int64 input that counts steps from 0."""

When = Literal["early", "late"]


def with_updates(
    graph: Graph,
    optimizer: Optimizer,
    *,
    when: When = "early",
    gradient_scale: float = 1.0,
    scaling: DynamicLossScale | None = None,
) -> Graph:
    """Return a training graph with an update of every parameter that has a gradient.

    Adds the scalar input `lr`, for Adam also `step`, and the optimizer's state, which
    starts at zero.

    Args:
        graph: A training graph.
        optimizer: The update rule.
        when: "early": as soon as a parameter and its gradient have no further use;
            "late": after all other nodes.
        gradient_scale: Factor of gradients, such as 1 / loss scale.
        scaling: Policy of the loss scale in the graph's state; updates then run at
            the end, as any gradient may overflow.

    Raises:
        ValueError: The graph has no gradients, `when` is unknown, or the graph has
            another tensor under a name that updates need.
    """
    if not graph.gradients:
        raise ValueError("the graph has no gradients; pass it to training_graph first")
    if when not in ("early", "late"):
        raise ValueError(f'updates run "early" or "late", not {when!r}')
    tensors, initializers = dict(graph.tensors), dict(graph.initializers)
    copies = copies_of_parameters(graph)
    op, slots, hyperparameters = _kernel(optimizer)

    def declared(spec: TensorSpec) -> str:
        known = tensors.setdefault(spec.name, spec)
        if known != spec:
            raise ValueError(f"updates need {spec}, but the graph has {known}")
        return spec.name

    updates: dict[str, Node] = {}
    for w, gradient in graph.gradients.items():
        spec = graph.tensors[w]
        rate = TensorSpec(LEARNING_RATE, (), spec.dtype, Role.INPUT)
        inputs = [w, gradient, declared(rate)]
        if isinstance(optimizer, Adam):
            inputs.append(declared(TensorSpec(STEP, (), "int64", Role.INPUT)))
        state = [
            declared(replace(spec, name=f"{w}:{slot}", role=Role.STATE))
            for slot in slots
        ]
        initializers.update(dict.fromkeys(state, Constant(0.0)))
        # Biases and the scales of normalizations have one axis, and do not decay.
        decay = optimizer.weight_decay if len(spec.shape) > 1 else 0.0
        attrs = {**hyperparameters, "weight_decay": decay}
        attrs["gradient_scale"] = gradient_scale
        if graph.tensors[gradient].layout != spec.layout:
            attrs["turned"] = True
        if w in copies:
            attrs["copied"] = True
            state.append(copies[w])
        scales: tuple[str, ...] = ()
        if scaling is not None:
            attrs["scaled"], scales = True, (LOSS_SCALE, COUNTS)
        updates[w] = make_node(
            tensors,
            name=f"{w}:{op}",
            op=op,
            inputs=(*inputs, *state, *scales),
            outputs=(),
            attrs=attrs,
            phase=Phase.UPDATE,
            mutates=(w, *state),
        )
    if scaling is not None:
        checks = overflow_checks(graph, graph.gradients.values())
        last = scale_adjustment(graph, scaling)
        nodes = (*graph.nodes, *checks, *updates.values(), last)
    elif when == "late":
        nodes = (*graph.nodes, *updates.values())
    else:
        nodes = with_nodes_after(graph, _earliest(graph, updates, copies))
    return replace(
        graph,
        tensors=tensors,
        nodes=nodes,
        initializers=initializers,
    )


def _earliest(
    graph: Graph, updates: Mapping[str, Node], copies: Mapping[str, str]
) -> Mapping[int, list[Node]]:
    """Return updates by the last use of the parameter, its copy, and its gradient."""
    storages = graph.storages
    read = {storages[t]: i for i, node in enumerate(graph.nodes) for t in node.inputs}
    known = finished(graph, graph.gradients.values())
    at: dict[int, list[Node]] = {}
    for w, node in updates.items():
        done = [read.get(storages[t], -1) for t in (w, copies.get(w, w))]
        at.setdefault(max(*done, known[graph.gradients[w]]), []).append(node)
    return at


def updates_last(graph: Graph) -> Graph:
    """Return the step with its updates at the end, where they may be one launch."""
    others = [node for node in graph.nodes if node.phase is not Phase.UPDATE]
    updates = [node for node in graph.nodes if node.phase is Phase.UPDATE]
    return replace(graph, nodes=(*others, *updates))


def _kernel(optimizer: Optimizer) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    """Return the update's operation, state per parameter, and hyperparameters."""
    match optimizer:
        case Sgd():
            return "sgd", (), {}
        case Momentum(_, momentum, nesterov):
            attrs = {"momentum": momentum, "nesterov": nesterov}
            return "momentum", ("momentum",), attrs
        case Adam(_, beta1, beta2, eps, _, decoupled):
            attrs = {"beta1": beta1, "beta2": beta2, "eps": eps, "decoupled": decoupled}
            return "adam", ("mean", "square"), attrs
        case AdaGrad(_, eps):
            return "adagrad", ("square",), {"eps": eps}
        case RmsProp(_, alpha, eps):
            return "rmsprop", ("square",), {"alpha": alpha, "eps": eps}


# Gradient accumulation: one update from the summed gradients of several mini-batches.
#
# There are two graphs: one adds gradients to totals that persist between steps, the
# other adds the last gradients, updates by the mean, and clears the totals.


def accumulation_graphs(
    graph: Graph,
    optimizer: Optimizer,
    mini_batches: int,
    *,
    when: When = "early",
    gradient_scale: float = 1.0,
    scaling: DynamicLossScale | None = None,
) -> tuple[Graph, Graph]:
    """Build the graphs that update by the mean gradient of several mini-batches.

    The other arguments are those of `with_updates`.

    Returns:
        The graph that adds to the totals, for all mini-batches but the last; and the
        one that adds the last gradients, updates the parameters and clears the totals.
        It declares all persistent tensors of both graphs and of the optimizer.

    Raises:
        ValueError: As `with_updates`, or fewer than 2 mini-batches.
    """
    if mini_batches < 2:
        raise ValueError(
            f"accumulation takes at least 2 mini-batches, got {mini_batches}"
        )
    micro = _with_totals(graph)
    scale = gradient_scale / mini_batches
    totals = {w: f"{w}:total" for w in graph.gradients}
    updated = with_updates(
        replace(micro, gradients=totals),
        optimizer,
        when=when,
        gradient_scale=scale,
        scaling=scaling,
    )
    return micro, replace(_with_clearing(updated), gradients=graph.gradients)


def updated_by(graph: Graph) -> tuple[str, ...]:
    """Return the tensors that updates read: totals if there are any, else gradients."""
    totals = ((f"{w}:total", gradient) for w, gradient in graph.gradients.items())
    return tuple(total if total in graph.tensors else g for total, g in totals)


def _with_totals(graph: Graph) -> Graph:
    """Add each gradient to its total as soon as it is final."""
    tensors, initializers = dict(graph.tensors), dict(graph.initializers)
    known = finished(graph, graph.gradients.values())
    ready: dict[int, list[Node]] = {}
    for w, gradient in graph.gradients.items():
        spec = graph.tensors[w]
        total = TensorSpec(f"{w}:total", spec.shape, spec.dtype, Role.STATE)
        tensors[total.name] = total
        initializers[total.name] = Constant(0.0)
        node = make_node(
            tensors,
            f"{w}:accumulate",
            "accumulate",
            (total.name, gradient),
            (),
            {"factor": 1.0},
            Phase.UPDATE,
            (total.name,),
        )
        ready.setdefault(known[gradient], []).append(node)
    return replace(
        graph,
        tensors=tensors,
        nodes=with_nodes_after(graph, ready),
        initializers=initializers,
    )


def _with_clearing(graph: Graph) -> Graph:
    """Clear totals behind the updates, their last readers."""
    # Fill with zeros instead of multiplying: infinity times zero is not a number.
    # Consecutive updates stay together, so that they may be one launch.
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
    return replace(graph, tensors=tensors, nodes=tuple(nodes))


def _clear(tensors: dict[str, TensorSpec], total: str) -> Node:
    name = f"{total}.cleared"
    tensors[name] = replace(tensors[total], name=name, role=Role.GRADIENT, alias=total)
    return make_node(tensors, name, "fill", (), (name,), {"value": 0.0}, Phase.UPDATE)


# Let updates read gradients in the dtype and layout in which they were computed.
#
# A parameter is cast or transposed before a product reads it, so its gradient is cast
# or transposed back. Where only an update would read the result, the update reads the
# computed gradient instead; it still computes in the parameter's dtype.


def with_computed_gradients(graph: Graph, *, transposed: bool = True) -> Graph:
    """Return a training graph whose gradients are not cast or transposed back.

    With `transposed` a gradient may have another layout than its parameter; not if it
    is added to a total in the parameter's layout.
    """
    readers = Counter(name for node in graph.nodes for name in node.inputs)

    def converts_back(node: Node) -> bool:
        if node.op == "to_channels_first":
            return transposed
        return node.op == "cast" and graph.tensors[node.inputs[0]].dtype in LOSS_SCALES

    found: dict[str, str] = {}
    removed: set[str] = set()
    # Follow conversions back to the gradient as it was computed.
    for w, gradient in graph.gradients.items():
        computed = gradient
        while (node := graph.producers.get(computed)) is not None and converts_back(
            node
        ):
            # A gradient must have no reader, what precedes it only the conversion.
            alone = readers[computed] == int(computed != gradient)
            if not alone or computed in graph.outputs:
                break
            removed.add(computed)
            (computed,) = node.inputs
        found[w] = computed
    tensors = {n: spec for n, spec in graph.tensors.items() if n not in removed}
    return replace(
        graph,
        tensors=tensors,
        nodes=tuple(n for n in graph.nodes if removed.isdisjoint(n.outputs)),
        gradients={**graph.gradients, **found},
    )
