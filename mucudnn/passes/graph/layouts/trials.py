"""Trials that have to be timed before layouts are chosen: each node in both layouts.

A trial is a node with its gradients, or the transposition of an image and its gradient;
filter gradients are not transposed back, as updates read them as they are
(`computed_gradients`). All trials form one graph of independent nodes, so that any
profiler of graphs can time them. Equal trials are timed once.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from mucudnn.ir.channels_last import last
from mucudnn.ir.graph import Graph, Node, Role
from mucudnn.ir.tensor import TensorSpec
from mucudnn.passes.graph.gradients import RULES
from mucudnn.passes.graph.layouts.channels_last import (
    alone,
    alone_channels_last,
    free,
    turn,
)
from mucudnn.passes.graph.layouts.choice import LayoutCosts, image_edges
from mucudnn.passes.graph.tape import Tape, fed_by_parameters

__all__ = ["LayoutTrials", "layout_trials"]


@dataclass(frozen=True, slots=True)
class LayoutTrials:
    """Graph of trials, and the number of the trial of each node and image.

    Attributes:
        graph: All trials side by side.
        first: Trial with channels first of each node that supports channels last.
        last: Trial of the same nodes with channels last.
        turned: Trial of transposing each image with several nodes; None if both
            layouts have the same bytes.
    """

    graph: Graph
    first: Mapping[str, int]
    last: Mapping[str, int]
    turned: Mapping[str, int | None]

    def costs(self, node_ms: Mapping[str, float]) -> LayoutCosts:
        """Return the costs of layouts from the times of the nodes of `graph`."""
        total: dict[int | None, float] = {None: 0.0}
        for node in self.graph.nodes:
            number = int(node.name.partition(":")[0])
            total[number] = total.get(number, 0.0) + node_ms[node.name]
        first, other, turned = (
            MappingProxyType({name: total[trial] for name, trial in of.items()})
            for of in (self.first, self.last, self.turned)
        )
        return LayoutCosts(first, other, turned)


def layout_trials(
    graph: Graph, nodes: Collection[str], *, trains: bool
) -> LayoutTrials:
    """Return the trials of a forward graph, with gradients if it is to be trained.

    `nodes` are those that may have channels last.
    """
    fed = fed_by_parameters(graph) if trains else set()
    trials = _Trials()
    first: dict[str, int] = {}
    other: dict[str, int] = {}
    for node in graph.nodes:
        if node.name in nodes:
            one = _with_wanted_gradients(alone(graph, node), fed)
            first[node.name] = trials.add(one)
            one = _with_wanted_gradients(alone_channels_last(graph, node), fed)
            other[node.name] = trials.add(one)
    images = (graph.tensors[name] for name in image_edges(graph, nodes))
    fed = fed - _weights(graph)
    turned = {
        spec.name: None if free(spec) else trials.add(_transposition(spec, fed))
        for spec in images
        if spec.layout == "NCHW"
    }
    return LayoutTrials(trials.graph(), first, other, turned)


def _weights(graph: Graph) -> set[str]:
    """Return parameters and their casts."""
    found = {spec.name for spec in graph.with_role(Role.PARAMETER)}
    for node in graph.nodes:
        if node.op == "cast" and found.issuperset(node.inputs):
            found.update(node.outputs)
    return found


class _Trials:
    """A graph of trials in which equal trials appear once."""

    def __init__(self) -> None:
        self._tensors: dict[str, TensorSpec] = {}
        self._nodes: list[Node] = []
        self._known: dict[Hashable, int] = {}

    def add(self, one: Graph) -> int:
        """Add the trial of a node and its gradients; return its number."""
        key = _signature(one)
        if key not in self._known:
            self._known[key] = len(self._known)
            self._put(_with_gradients(one), f"{self._known[key]}:")
        return self._known[key]

    def graph(self) -> Graph:
        """Return all trials as one graph."""
        return Graph(MappingProxyType(self._tensors), tuple(self._nodes), ())

    def _put(self, trial: Graph, prefix: str) -> None:
        for name, spec in trial.tensors.items():
            alias = None if spec.alias is None else prefix + spec.alias
            own = replace(spec, name=prefix + name, alias=alias)
            self._tensors[own.name] = own
        for node in trial.nodes:
            reads, writes, mutates = (
                tuple(prefix + name for name in names)
                for names in (node.inputs, node.outputs, node.mutates)
            )
            self._nodes.append(
                replace(
                    node,
                    name=prefix + node.name,
                    inputs=reads,
                    outputs=writes,
                    mutates=mutates,
                )
            )


def _with_wanted_gradients(one: Graph, fed: Collection[str]) -> Graph:
    """Mark the inputs whose gradients are wanted as parameters."""

    def role(spec: TensorSpec) -> Role:
        if spec.name in one.producers or spec.role is Role.STATE:
            return spec.role
        return Role.PARAMETER if spec.name in fed else Role.INPUT

    tensors = {t: replace(spec, role=role(spec)) for t, spec in one.tensors.items()}
    return replace(one, tensors=MappingProxyType(tensors))


def _transposition(spec: TensorSpec, fed: Collection[str]) -> Graph:
    source = replace(spec, alias=None, offset=0)
    made = last(spec, f"{spec.name}:NHWC")
    tensors = {source.name: source, made.name: replace(made, role=Role.ACTIVATION)}
    node = turn(tensors, source.name, made)
    return _with_wanted_gradients(Graph(MappingProxyType(tensors), (node,), ()), fed)


def _with_gradients(one: Graph) -> Graph:
    (node,) = one.nodes
    tape = Tape(one)
    if tape.wants(node.outputs[0]) and node.op in RULES:
        tape.seed(node.outputs[0], None)
        RULES[node.op](tape, node)
    return Graph(MappingProxyType(tape.tensors), tuple(tape.nodes), ())


def _signature(one: Graph) -> Hashable:
    """Return everything a trial's time depends on."""
    (node,) = one.nodes
    specs = (one.tensors[name] for name in node.tensors)
    return (
        node.op,
        tuple(sorted((k, v) for k, v in node.attrs.items() if k != "seed")),
        tuple((s.shape, s.dtype, s.role, s.layout) for s in specs),
        tuple(node.tensors.index(name) for name in node.tensors),
    )
