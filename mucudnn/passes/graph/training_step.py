"""Derive the graphs of a training step from a network's forward graph.

`build_step` is the only derivation: `Trainer` runs what it returns, memory studies plan
it. A training step gets gradients and updates. Evaluation returns the network's
answers, the tensor that is compared with the labels, beside loss and accuracy.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mucudnn.arguments import check_choice, check_integer, check_type
from mucudnn.ir.graph import IMAGE, LABEL, PERSISTENT, Graph, Node
from mucudnn.ir.optimizers import DynamicLossScale, Optimizer, loss_scale_of
from mucudnn.ir.tensor import Role
from mucudnn.ir.traits import Rows
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.fusion import Offers, fuse_elementwise
from mucudnn.passes.graph.precision import (
    LOSS_SCALES,
    to_mixed_precision,
    with_copies_of_parameters,
    with_scale_as_state,
)
from mucudnn.passes.graph.split_axis import pieces_of
from mucudnn.passes.graph.updates import (
    STEP,
    When,
    accumulation_graphs,
    with_computed_gradients,
    with_updates,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecipe:
    """Device-independent description of a training step: optimizer, precision, fusion.

    Attributes:
        optimizer: Update rule.
        update_when: Whether updates come "early" or "late"; a dynamic loss scale makes
            them late.
        micro_batches: Number of batches of the graph in one step. Several need another
            graph, for all of them but the last.
        precision: Narrow type of convolutions and products, in `LOSS_SCALES`; None for
            the network's own.
        loss_scale: Factor of the loss's gradient, divided out by the updates; None for
            the usual one of the precision.
        fuse: Whether chains of elementwise operations become single kernels.
        shared_gradients: Whether gradients are summed with those of other ranks, which
            may have other layouts; they then have the layouts of parameters.
        inference: Whether the step ends at the network's answers, without gradients.
    """

    optimizer: Optimizer
    update_when: When = "early"
    micro_batches: int = 1
    precision: str | None = None
    loss_scale: DynamicLossScale | float | str | None = None
    fuse: bool = True
    shared_gradients: bool = False
    inference: bool = False


Complete = Callable[[Graph], Graph]
"""A graph with gradients -> the (last part of the) step, with updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoices:
    """Choices that depend on a device and a budget: measured, estimated, or fixed.

    Attributes:
        layout: (forward graph, whether it is trained) -> the same graph with images in
            a layout.
        epilogue: Selects convolutions with fused bias and ReLU.
        library: Marks nodes of a graph for a library's kernels.
        split: Splits a graph with gradients, which the given function completes.
        keep_copies: Decides whether a step keeps converted copies of parameters, so
            that no step converts them; not called for several micro-batches, whose
            totals are wide.
    """

    layout: Callable[[Graph, bool], Graph] = lambda graph, trains: graph
    epilogue: Offers | None = None
    library: Callable[[Graph], Graph] = lambda graph: graph
    split: Callable[[Graph, Complete], Graph] = lambda graph, complete: graph
    keep_copies: Callable[[Graph], bool] = lambda step: True


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """The graphs of one network, before nodes are ordered and results in place.

    Attributes:
        steps: Graphs of a step: one, or one for all micro-batches but the last and one
            for the last.
        parts: Number of micro-batches in one step.
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


def build_step(
    forward: Graph,
    recipe: StepRecipe,
    choices: StepChoices = StepChoices(),
    evaluation: Graph | None = None,
) -> StepGraphs:
    """Build all graphs of a step from a network, and from its form for evaluation.

    Raises:
        ValueError: The graphs do not belong together, a name is unknown, or a number is
            out of range: there is not one micro-batch, or the loss scale is not
            positive or more than the type of the loss holds.
    """
    graph = build_gradients(forward, recipe, choices)
    graph = choices.split(graph, lambda g: complete_step(g, recipe, choices)[-1])
    steps = complete_step(graph, recipe, choices)
    if evaluation is not None:
        evaluation = _rewritten(evaluation, recipe, choices, trains=False)
        for spec in evaluation.with_role(*PERSISTENT):
            known = steps[0].tensors.get(spec.name)
            if known is None or (known.shape, known.dtype) != (spec.shape, spec.dtype):
                raise ValueError(
                    f"the graph for evaluation is of another network: {spec.name!r} "
                    f"{spec.shape} is not in the one for training"
                )
        answers = answers_of(evaluation)
        if answers is not None and answers not in evaluation.outputs:
            evaluation = replace(evaluation, outputs=(*evaluation.outputs, answers))
        evaluation = choices.library(evaluation)
    weights = tuple(spec.name for spec in forward.with_role(*PERSISTENT))
    return StepGraphs(steps, recipe.micro_batches, evaluation, weights)


def build_gradients(
    forward: Graph, recipe: StepRecipe, choices: StepChoices = StepChoices()
) -> Graph:
    """Build the part of a step that can be split: all but the updates."""
    check_choice("update_when", recipe.update_when, ("early", "late"))
    if recipe.inference:
        forward = up_to_answers(forward)
        return choices.library(_rewritten(forward, recipe, choices, trains=False))
    forward = _rewritten(forward, recipe, choices, trains=True)
    scale = _loss_scale(recipe)
    if isinstance(scale, DynamicLossScale):
        graph = with_scale_as_state(training_graph(forward, loss_scale=None), scale)
    else:
        graph = training_graph(forward, loss_scale=scale)
    if not graph.gradients:
        raise ValueError(
            "the loss depends on no parameter, so there is nothing to train; add a "
            "layer with parameters, such as conv or linear"
        )
    return choices.library(graph)


def complete_step(
    graph: Graph, recipe: StepRecipe, choices: StepChoices = StepChoices()
) -> tuple[Graph, ...]:
    """Return the graphs of a step from what `build_gradients` built, perhaps split."""
    if recipe.inference:
        return (graph,)
    parts = check_integer("micro_batches", recipe.micro_batches, least=1)
    scale = _loss_scale(recipe)
    scaling = scale if isinstance(scale, DynamicLossScale) else None
    updates: dict[str, Any] = {
        "optimizer": recipe.optimizer,
        "when": recipe.update_when,
        "gradient_scale": 1.0 if isinstance(scale, DynamicLossScale) else 1 / scale,
        "scaling": scaling,
    }
    # Sums over micro-batches or ranks are in the layout of the parameter.
    transposed = parts == 1 and not recipe.shared_gradients
    graph = with_computed_gradients(graph, transposed=transposed)
    if parts > 1:
        return accumulation_graphs(graph, mini_batches=parts, **updates)
    # Low-precision copies of parameters spare casts, if they fit.
    copied = with_copies_of_parameters(graph)
    if copied.nodes != graph.nodes:
        step = with_updates(copied, **updates)
        if choices.keep_copies(step):
            return (step,)
    return (with_updates(graph, **updates),)


def can_fuse(forward: Graph, recipe: StepRecipe) -> bool:
    """Return whether a step without fusion is another step."""
    # The other step may fit a smaller budget: a fused node needs its operands at once,
    # and saves other tensors for its gradient.
    return recipe.fuse and fuse_elementwise(forward) is not forward


def _loss_scale(recipe: StepRecipe) -> DynamicLossScale | float:
    return loss_scale_of(
        recipe.loss_scale, LOSS_SCALES.get(recipe.precision or "", 1.0)
    )


def _rewritten(
    forward: Graph, recipe: StepRecipe, choices: StepChoices, *, trains: bool
) -> Graph:
    """Return a forward graph in its precision and layout, fused."""
    if recipe.precision is not None:
        forward = to_mixed_precision(forward, recipe.precision)
    forward = choices.layout(forward, trains)
    return fuse_elementwise(forward, choices.epilogue) if recipe.fuse else forward


def check_network(graph: Graph) -> None:
    """Raise `TypeError` or `ValueError` if `Trainer` cannot feed a network's inputs."""
    check_type(
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


def answers_of(graph: Graph) -> str | None:
    """Return the tensor (N, …) first compared with the labels, or None."""
    batch = graph.tensors[IMAGE].shape[:1]
    for node in graph.nodes:
        if LABEL in node.inputs:
            for name in node.inputs:
                if name != LABEL and graph.tensors[name].shape[:1] == batch:
                    return name
    return None


def up_to_answers(forward: Graph) -> Graph:
    """Return a network up to the tensor that the loss compares with labels."""
    answers = answers_of(forward)
    if answers is None:
        raise ValueError(
            "no tensor is compared with the labels, so the network's predictions are "
            "unknown"
        )
    wanted, nodes = {answers}, []
    for node in reversed(forward.nodes):
        if not wanted.isdisjoint(node.outputs):
            nodes.append(node)
            wanted.update(node.inputs)
    used = {name for node in nodes for name in node.tensors} | {answers}
    used |= {forward.storages[name] for name in used}
    tensors = {name: spec for name, spec in forward.tensors.items() if name in used}
    return replace(
        forward,
        tensors=tensors,
        nodes=tuple(reversed(nodes)),
        outputs=(answers,),
    )


# Adapt a training step to one rank, whose batch is a row range of the global batch.
#
# A rank's graph is built for its own rows. Random numbers depend on an element's
# position in the global batch, so that a rank draws the same numbers as a single
# device. Batch normalisation may be decomposed, so that the statistics of all ranks can
# be merged in between.


def draw_rows(graph: Graph, rows: Rows) -> Graph:
    """Return a step that draws the random numbers of a row range of a larger batch."""
    nodes = list(graph.nodes)
    for i, node in enumerate(nodes):
        how = node.traits.batch
        if node.traits.random and how is not None and how.sliced is not None:
            inputs = [graph.tensors[name] for name in node.inputs]
            attrs = how.sliced(node.attrs, inputs, rows)
            nodes[i] = replace(node, attrs=MappingProxyType(dict(attrs)))
    return replace(graph, nodes=tuple(nodes))


def decompose(graph: Graph) -> Graph:
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
    return replace(graph, tensors=tensors, nodes=tuple(nodes))
