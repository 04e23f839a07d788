"""Derive the graphs of a training step from a network's forward graphs.

A training step gets gradients and updates. Evaluation returns the network's answers,
the tensor that is compared with the labels, beside loss and accuracy.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from mucudnn.arguments import an_integer, of_type, one_of
from mucudnn.ir.graph import IMAGE, LABEL, PERSISTENT, Graph, Node
from mucudnn.ir.optimizers import DynamicLossScale, Optimizer, loss_scale_of
from mucudnn.ir.tensor import Role
from mucudnn.ir.traits import Rows
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.fusion import Offers, fused
from mucudnn.passes.graph.precision import (
    LOSS_SCALES,
    lowered,
    with_copies_of_parameters,
    with_scale_as_state,
)
from mucudnn.passes.graph.split_axis import pieces_of
from mucudnn.passes.graph.updates import (
    STEP,
    When,
    accumulating,
    with_computed_gradients,
    with_updates,
)

Divided = Callable[[Graph], Graph]
"""A training graph without updates -> the same graph, perhaps split."""


Layout = Callable[[Graph, bool], Graph]
"""(forward graph, whether it is trained) -> the same graph with images in a layout."""


Libraries = Callable[[Graph], Graph]
"""A graph -> the same graph, some nodes marked for a library's kernels."""


@dataclass(frozen=True, slots=True)
class TrainingGraphs:
    """The graphs of one network.

    Attributes:
        steps: Graphs of a training step: one, or one for all parts but the last and one
            for the last.
        parts: Number of batches of the graphs in one step.
        evaluation: Graph for evaluation, if any.
        weights: Names of parameters and running statistics, without optimizer state.
    """

    steps: tuple[Graph, ...]
    parts: int
    evaluation: Graph | None
    weights: tuple[str, ...]

    @property
    def all(self) -> tuple[Graph, ...]:
        """Graphs of the step, then that for evaluation."""
        return self.steps if self.evaluation is None else (*self.steps, self.evaluation)


def training_graphs(
    training: Graph,
    evaluation: Graph | None,
    optimizer: Optimizer,
    *,
    when: When,
    parts: int,
    precision: str | None,
    loss_scale: DynamicLossScale | float | str | None,
    divided: Divided | None = None,
    fuse: bool = True,
    offers: Offers | None = None,
    layout: Layout | None = None,
    libraries: Libraries | None = None,
    keep_copies: Callable[[Graph], bool] = lambda step: True,
    shared: bool = False,
) -> TrainingGraphs:
    """Build all graphs of a trainer; see `Trainer` for the arguments.

    `divided` splits a training graph without updates, `layout` sets the layout of
    images, `offers` selects convolutions with fused epilogues, `libraries` marks nodes
    for a library. `keep_copies` decides whether a step keeps converted copies of
    parameters, so that no step converts them. Gradients that are `shared` with other
    ranks, which may have other layouts, have the layouts of parameters.

    Raises:
        ValueError: The graphs do not belong together, or a setting is out of range.
        TypeError: A graph is no `Graph`.
    """
    one_of("update_when", when, ("early", "late"))
    forward = [training] if evaluation is None else [training, evaluation]
    for graph in forward:
        _check_inputs(graph)
    if precision is not None:
        one_of("precision", precision, LOSS_SCALES)
        forward = [lowered(graph, precision) for graph in forward]
    if layout is not None:
        forward = [layout(graph, graph is forward[0]) for graph in forward]
    if fuse:
        forward = [fused(graph, offers) for graph in forward]
    usual = 1.0 if precision is None else LOSS_SCALES[precision]
    steps = step_graphs(
        forward[0],
        optimizer,
        when=when,
        parts=parts,
        loss_scale=loss_scale_of(loss_scale, usual),
        divided=divided,
        libraries=libraries,
        keep_copies=keep_copies,
        shared=shared,
    )
    weights = tuple(spec.name for spec in forward[0].with_role(*PERSISTENT))
    if evaluation is not None:
        _check_same_network(forward[1], steps[0])
        evaluation = forward[1]
        answers = answers_of(evaluation)
        if answers is not None and answers not in evaluation.outputs:
            evaluation = replace(evaluation, outputs=(*evaluation.outputs, answers))
        if libraries is not None:
            evaluation = libraries(evaluation)
    return TrainingGraphs(steps, parts, evaluation, weights)


def step_graphs(
    forward: Graph,
    optimizer: Optimizer,
    *,
    when: When = "early",
    parts: int = 1,
    loss_scale: DynamicLossScale | float = 1.0,
    divided: Divided | None = None,
    libraries: Libraries | None = None,
    keep_copies: Callable[[Graph], bool] = lambda step: False,
    shared: bool = False,
) -> tuple[Graph, ...]:
    """Build the graphs of a training step, before the in-place pass.

    Args:
        forward: A network with its loss.
        optimizer: Optimizer of the step.
        when: Whether updates come "early" or "late".
        parts: Number of batches in one step; several need another graph, for all parts
            but the last.
        loss_scale: Factor of the loss's gradient, divided out by the updates. A dynamic
            one makes updates late.
        divided: Splits the graph before it gets updates.
        libraries: Marks nodes for a library, before the graph is split.
        keep_copies: Decides whether a step keeps converted copies of parameters; not
            called for several parts, whose totals are wide.
        shared: Whether gradients are summed with those of other ranks.

    Raises:
        ValueError: A name is unknown, there is not one part, or the scale is not
            positive, or more than the type of the loss holds.
    """
    if an_integer("the number of parts of a step", parts) < 1:
        raise ValueError(f"a step has at least one part, got {parts}")
    found = loss_scale_of(loss_scale, 1.0)
    if isinstance(found, DynamicLossScale):
        scaling: DynamicLossScale | None = found
        back = 1.0
        graph = with_scale_as_state(training_graph(forward, loss_scale=None), found)
    else:
        scaling, back = None, 1 / found
        graph = training_graph(forward, loss_scale=found)
    if libraries is not None:
        graph = libraries(graph)
    if divided is not None:
        graph = divided(graph)
    graph = with_computed_gradients(graph, turned=parts == 1 and not shared)
    if parts == 1:
        updated = partial(
            with_updates,
            optimizer=optimizer,
            when=when,
            gradient_scale=back,
            scaling=scaling,
        )
        copied = with_copies_of_parameters(graph)
        if copied.nodes != graph.nodes and keep_copies(step := updated(copied)):
            return (step,)
        return (updated(graph),)
    both = accumulating(
        graph, optimizer, parts, when=when, gradient_scale=back, scaling=scaling
    )
    return both.micro_step, both.last_step


def input_bytes(graphs: TrainingGraphs) -> int:
    """Return the bytes of the inputs of all graphs of a step."""
    return sum(s.nbytes for g in graphs.steps for s in g.with_role(Role.INPUT))


def _check_inputs(graph: Graph) -> None:
    of_type(
        "a network to train",
        graph,
        Graph,
        "a Graph, such as get_model('lenet')(batch) or GraphBuilder.build() returns",
    )
    known = (IMAGE, LABEL, STEP)
    found = [spec.name for spec in graph.with_role(Role.INPUT)]
    if not {IMAGE, LABEL} <= set(found) or not set(found) <= set(known):
        raise ValueError(
            f"a network to train has the inputs {IMAGE!r} and {LABEL!r}, this one has "
            f"{', '.join(found) or 'none'}"
        )


def _check_same_network(evaluation: Graph, training: Graph) -> None:
    """Check that training has every persistent tensor of evaluation."""
    for spec in evaluation.with_role(*PERSISTENT):
        known = training.tensors.get(spec.name)
        if known is None or (known.shape, known.dtype) != (spec.shape, spec.dtype):
            raise ValueError(
                f"the graph for evaluation is of another network: {spec.name!r} "
                f"{spec.shape} is not in the one for training"
            )


def answers_of(graph: Graph) -> str | None:
    """Return the tensor (N, …) first compared with the labels, or None."""
    batch = graph.tensors[IMAGE].shape[:1]
    for node in graph.nodes:
        if LABEL in node.inputs:
            for name in node.inputs:
                if name != LABEL and graph.tensors[name].shape[:1] == batch:
                    return name
    return None


def up_to(graph: Graph, *outputs: str) -> Graph:
    """Return the part of a forward graph that computes some of its tensors."""
    for name in outputs:
        if name not in graph.tensors:
            raise ValueError(f"the graph has no tensor {name!r}")
    wanted, nodes = set(outputs), []
    for node in reversed(graph.nodes):
        if not wanted.isdisjoint(node.outputs):
            nodes.append(node)
            wanted.update(node.inputs)
    used = {name for node in nodes for name in node.tensors} | set(outputs)
    used |= {graph.storages[name] for name in used}
    tensors = {name: spec for name, spec in graph.tensors.items() if name in used}
    return replace(
        graph,
        tensors=MappingProxyType(tensors),
        nodes=tuple(reversed(nodes)),
        outputs=outputs,
    )


# Adapt a training step to one rank, whose batch is a row range of the global batch.
#
# A rank's graph is built for its own rows. Random numbers depend on an element's
# position in the global batch, so that a rank draws the same numbers as a single
# device. Batch normalisation may be decomposed, so that the statistics of all ranks can
# be merged in between.


def drawing_rows(graph: Graph, rows: Rows) -> Graph:
    """Return a step that draws the random numbers of a row range of a larger batch."""
    nodes = tuple(_drawing(graph, node, rows) for node in graph.nodes)
    return replace(graph, nodes=nodes)


def in_pieces(graph: Graph) -> Graph:
    """Return a step whose cross-sample operations are decomposed."""
    tensors = dict(graph.tensors)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.traits.batch is not None:
            nodes.append(node)
            continue
        between, pieces = pieces_of(tensors, node)
        tensors.update((spec.name, spec) for spec in between)
        nodes += pieces or (node,)
    return replace(graph, tensors=MappingProxyType(tensors), nodes=tuple(nodes))


def _drawing(graph: Graph, node: Node, rows: Rows) -> Node:
    how = node.traits.batch
    if not node.traits.random or how is None or how.sliced is None:
        return node
    inputs = [graph.tensors[name] for name in node.inputs]
    attrs = how.sliced(node.attrs, inputs, rows)
    return replace(node, attrs=MappingProxyType(dict(attrs)))
