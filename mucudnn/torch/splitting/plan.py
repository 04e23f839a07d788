"""Plan a PyTorch step whole, in slices of its batch, or in strips of its images.

1. `prepare` rewrites operations that could not be cut, by others with equal values.
2. `traits` follows the batch axis (or the height) from the inputs through the graph.
   Rules (`batch_rules`, `strip_rules`) tell for each call which rows its results have
   when it reads some rows of its operands. The nodes' traits then say how to cut them.
3. `plan_splitting` of the passes cuts the graph into numbers of slices or strips. Each
   candidate is a lowered graph of its own (`_SliceCalls` writes the calls), which is
   measured with its updates and planned under the same budget.
4. The candidate that is predicted to be fastest runs.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.errors import PlanningError, UnsupportedError
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.sizes import exact_bytes
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.ir.traits import Rows
from mucudnn.passes.planning.cutting import AUTO, HEIGHT, Split, SplitStep
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.split_search import plan_splitting
from mucudnn.torch.lowering.lowered import (
    Call,
    Layout,
    Lowered,
    Number,
    Operand,
    mapped,
)
from mucudnn.torch.plan import TorchPlan
from mucudnn.torch.planning import Planner, too_small
from mucudnn.torch.splitting.axes import Axis, Cut, layout_of_rows
from mucudnn.torch.splitting.prepare import FillsAndLosses, Norms, ShapeOperands
from mucudnn.torch.splitting.recurrent import LAYER, LayersWithoutWorkspace
from mucudnn.torch.splitting.traits import SplittableStep, follow_rows

_IMAGES = 3
"""Least number of axes of images, (N, C, *spatial)."""


def split_candidates(
    lowered: Lowered,
    names: Sequence[str],
    make: Callable[[Lowered], Planner],
    split: Split,
) -> "SplitCandidates | None":
    """Return a step whole and in parts; None if `auto` finds nothing to cut.

    `names` are those of the step's inputs; it has no updates in place. `make` adds
    them, and measures a step.

    Raises:
        UnsupportedError: A number of parts was given and nothing can be cut.
    """
    strips = isinstance(split, str) and split.startswith(HEIGHT)
    step = (_along_height if strips else _along_batch)(lowered, names)
    if step is None and split == AUTO:  # one sample, perhaps a large one
        step = _along_height(lowered, names)
    if step is not None:
        return SplitCandidates(lowered, step, make)
    if strips:
        raise UnsupportedError(
            f"split={split!r} runs a step in spatial tiles, but its batch has no "
            "images, (N, C, height, width) or with a depth, or none of its "
            "operations can be tiled; pass a number of micro-batches"
        )
    if split != AUTO:
        raise UnsupportedError(
            f"the step cannot run in {split} micro-batches: its batch has one sample, "
            "or none of its operations can be split; split='height' uses spatial "
            "tiles, split='auto' runs the step whole if it cannot be split"
        )
    return None


def _along_batch(lowered: Lowered, names: Sequence[str]) -> SplittableStep | None:
    """Make a step splittable along its batch; None if nothing can be cut."""
    shapes = _batch_shapes(lowered, names)
    samples = next((shape[0] for shape in shapes.values() if shape), 0)
    given = [name for name, shape in shapes.items() if shape[:1] == (samples,)]
    if samples < 2:
        return None
    axes = dict.fromkeys(given, Axis(0))
    ready = FillsAndLosses(lowered).rewritten()
    # Samples are strided in the tensors of an LSTM.
    if any(node.op == LAYER for node in lowered.graph.nodes):
        ready = LayersWithoutWorkspace(Norms(ready).rewritten()).rewritten()
        found = follow_rows(ready, axes, None)
    else:
        found = follow_rows(ready, axes, samples)
    return found if found.cuts and axes.keys() & found.axes.keys() else None


def _along_height(lowered: Lowered, names: Sequence[str]) -> SplittableStep | None:
    """Make a step splittable along the height of its images, or depth of volumes.

    Images are the tensors of the batch with the most axes, (N, C, *spatial). Tensors
    with one axis less are labels, (N, *spatial). None if nothing can be cut.
    """
    shapes = _batch_shapes(lowered, names)
    most = max(map(len, shapes.values()), default=0)
    if most < _IMAGES:
        return None
    images = {
        name: Axis(2 if len(shape) == most else 1)
        for name, shape in shapes.items()
        if len(shape) >= most - 1
    }
    ready = lowered
    for rewriter in (FillsAndLosses, ShapeOperands, Norms):
        ready = rewriter(ready).rewritten()
    found = follow_rows(ready, images, None)
    return found if found.cuts and images.keys() & found.axes.keys() else None


def _batch_shapes(
    lowered: Lowered, names: Sequence[str]
) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the batch's tensors, whose names begin with `batch.`."""
    inputs = zip(names, lowered.inputs, strict=True)
    batch = [t for n, t in inputs if t is not None and n.startswith("batch.")]
    return {name: lowered.layouts[name].shape for name in batch}


class SplitCandidates:
    """A step whole and in parts, each lowered and measured when it is planned."""

    def __init__(
        self,
        whole: Lowered,
        splittable: SplittableStep,
        make: Callable[[Lowered], Planner],
    ) -> None:
        self._whole, self._splittable, self._make = whole, splittable, make
        self._planners: list[Planner] = []

    def plan(self, budget: float, split: Split) -> tuple[Planner, TorchPlan]:
        """Return the fastest plan within a budget, and its planner.

        Raises:
            PlanningError: Nothing fits; reports the minimum feasible budget.
        """
        try:
            found = plan_splitting(self.step(lambda p: p.request(budget)), split)
        except PlanningError as e:
            if e.least_bytes is None:
                raise
            least = e.least_bytes - self._planners[0].caller_bytes
            raise too_small(
                f"neither whole nor in parts does the step fit into "
                f"{exact_bytes(int(budget))}; the least budget that works is "
                f"{exact_bytes(least)}",
                *(budget, least),
            ) from None
        chosen = found.chosen
        if chosen.request is None or chosen.plan is None:
            raise PlanningError("the step has no plan")
        planner = self._planner(chosen.request.graph)
        plan = chosen.plan
        if planner.tiers:
            plan = planner.plan_request(chosen.request)
        described = replace(planner.describe(plan, budget), splitting=found)
        if chosen.parts > 1:  # its graph is not the whole step's
            described = replace(described, unplanned_bytes=0)
        return planner, described

    def step(self, request: Callable[[Planner], StepRequest]) -> SplitStep:
        """Return the candidates, of whose planners `request` returns what to plan."""
        return SplitStep(
            self._splittable.lowered.graph,
            self._complete,
            lambda graph: self._planner(graph).profile,
            lambda graph, profile: request(self._planner(graph)),
        )

    def _complete(self, graph: Graph) -> Graph:
        """Return the graph of a candidate with its updates; remember its planner."""
        lowered = self._whole
        if graph is not self._splittable.lowered.graph:
            lowered = _SliceCalls(self._splittable, graph).lowered()
        planner = self._make(lowered)
        self._planners.append(planner)
        return planner.lowered.graph

    def _planner(self, graph: Graph) -> Planner:
        nodes = graph.nodes
        return next(p for p in self._planners if p.lowered.graph.nodes is nodes)


# Calls of a graph that was cut into slices or strips.


_ROWS = re.compile(r"[@\[]")
"""Separates the name of a tensor from which rows of it a tensor has."""


class _SliceCalls:
    """Writes the calls and layouts of a step's graph that the passes have cut."""

    def __init__(self, splittable: SplittableStep, graph: Graph) -> None:
        self._splittable, self._graph = splittable, graph
        self._whole = splittable.lowered
        self._calls: dict[str, Call] = {}
        self._layouts: dict[str, Layout] = {
            name: self._whole.layouts[name] for name in graph.inputs
        }

    def lowered(self) -> Lowered:
        """Return the cut graph with calls and layouts."""
        nodes = tuple(self._node(node) for node in self._graph.nodes)
        tensors = {name: self._spec(spec) for name, spec in self._graph.tensors.items()}
        graph = replace(self._graph, tensors=tensors, nodes=nodes)
        return replace(
            self._whole, graph=graph, calls=self._calls, layouts=self._layouts
        )

    def _node(self, node: Node) -> Node:
        """Write the call of a node; return the node as it is planned."""
        whole = self._whole.graph.by_name.get(node.name)
        if whole is not None:
            # A node that stays whole. Operands beyond its own are gathered results of
            # slices, which stand in for its last operand.
            call = self._whole.calls[node.name]
            more = len(node.inputs) - len(whole.inputs)
            if more:
                last = len(whole.inputs) - 1
                parts = [Operand(i) for i in range(last, last + more + 1)]
                args = (parts if v == [Operand(last)] else v for v in call.args)
                call = replace(call, args=tuple(args))
            self._calls[node.name] = call
            for name in node.outputs:
                self._layouts[name] = self._whole.layouts[name]
            traits = replace(node.traits, batch=None, strips=None)
            return replace(node, traits=traits)
        if "rows" in node.attrs or "strip" in node.attrs:
            return self._slice(node)
        if node.op == "slice":
            self._view(node)
        elif node.op == "concat":
            self._concat(node)
        else:
            # What a slice computes is added to the sum of those before.
            self._layouts[node.outputs[0]] = self._layouts[node.inputs[0]]
            self._calls[node.name] = Call(
                torch.ops.aten.add_.Tensor, (Operand(0), Operand(1)), {}, (None,)
            )
        return replace(node, attrs=MappingProxyType({}))

    def _spec(self, spec: TensorSpec) -> TensorSpec:
        """Return a tensor as lowered graphs have it: bytes, and inputs are state."""
        if spec.name in self._graph.inputs:
            return replace(spec, role=Role.STATE, shape=(spec.nbytes,))
        known = spec.name in self._whole.graph.tensors
        return replace(spec, shape=(spec.nbytes,)) if known else spec

    def _slice(self, node: Node) -> Node:
        """Write the call of a slice or strip; return its node."""
        first = node.name.rpartition("@")[0]
        whole = self._whole.graph.by_name[first]
        cut = self._splittable.cuts[first]
        for name, of, axis in zip(
            node.outputs, whole.outputs, cut.outputs, strict=True
        ):
            layout = self._whole.layouts[of]
            if axis is not None:
                layout = layout_of_rows(layout, axis, self._rows(name))
            self._layouts[name] = layout
        if "strip" in node.attrs:
            call: Call = node.attrs["strip"]
        else:
            # Operands that are there as a whole are narrowed by the call.
            axes = self._splittable.axes
            narrowed = {
                i: axis
                for i, axis in cut.inputs.items()
                if axes.get(whole.inputs[i]) != axis
            }
            shape = self._layouts[node.outputs[0]].shape
            call = slice_call(
                self._whole.calls[first], cut, node.attrs["rows"], shape, narrowed
            )
            call = replace(call, random=node.traits.random)
        # A slice may overwrite operands that have the layout of its result.
        overwrites: tuple[int, ...] = ()
        if call.into is not None:
            result = self._layouts[node.outputs[0]]
            nbytes = self._graph.tensors[node.outputs[0]].nbytes
            overwrites = tuple(
                i
                for i in node.traits.overwrites
                if self._layouts[node.inputs[i]] == result
                and self._graph.tensors[node.inputs[i]].nbytes == nbytes
            )
        if not overwrites:
            call = replace(call, into=None, first=False)
        self._calls[node.name] = call
        traits = replace(node.traits, overwrites=overwrites)
        return replace(node, attrs=MappingProxyType({}), traits=traits)

    def _view(self, node: Node) -> None:
        """Write the view of a row range of an uncut tensor."""
        (held,), (view,) = node.inputs, node.outputs
        axis = self._axis(held)
        spec, count = self._graph.tensors[view], self._rows(view)
        start = spec.offset // (spec.nbytes // count)
        self._layouts[view] = layout_of_rows(self._layouts[held], axis, count, start)
        rows = axis.index, start * axis.each, count * axis.each
        self._calls[node.name] = Call(_narrowed, (Operand(0), *rows), {}, (None,))

    def _concat(self, node: Node) -> None:
        """Write the concatenation of rows, with zeros around them, in one layout."""
        (joined,) = node.outputs
        axis, of = self._axis(joined), _ROWS.split(joined)[0]
        spec, layout = self._graph.tensors[joined], self._whole.layouts[of]
        if joined != of:
            layout = layout_of_rows(layout, axis, self._rows(joined))
        self._layouts[joined] = layout
        parts = [Operand(i) for i in range(len(node.inputs))]
        rows = [(a * axis.each, b * axis.each) for a, b in node.attrs["parts"]]
        before = node.attrs["before"] * axis.each
        items = spec.nbytes // layout.dtype.itemsize
        place = layout.shape, layout.stride, layout.offset, layout.dtype, layout.device
        self._calls[node.name] = Call(
            _concatenated, (parts, rows, before, axis.index, items, *place), {}, (None,)
        )

    def _rows(self, name: str) -> int:
        """Return the samples of a slice, or rows of a strip."""
        return self._graph.tensors[name].shape[-2]

    def _axis(self, name: str) -> Axis:
        return self._splittable.axes[_ROWS.split(name)[0]]


def slice_call(
    call: Call, cut: Cut, rows: Rows, shape: Sequence[int], narrowed: Mapping[int, Axis]
) -> Call:
    """Return a call for some samples, whose first result has a shape.

    Operands in `narrowed` are given whole, and the call reads a part along their axes.
    """
    leaves = {
        i: Number(
            _narrowed,
            (Operand(i), axis.index, rows.start * axis.each, rows.count * axis.each),
        )
        for i, axis in narrowed.items()
    }

    def narrow(leaf: Any) -> Any:
        return leaves.get(leaf.index, leaf) if isinstance(leaf, Operand) else leaf

    args, kwargs = mapped([[*call.args], dict(call.kwargs)], narrow)
    for position in cut.shaped:
        args[position] = list(shape)
    for position in cut.counted:
        args[position] = rows.count * next(iter(cut.inputs.values())).each
    found = replace(call, args=tuple(args), kwargs=kwargs)
    # A mean over the batch is a sum of means weighted by the slices' shares.
    if not cut.averaged:
        return found
    weighted = (call.function, rows.count / rows.total, *args)
    return replace(found, function=_weighted, args=weighted, into=None)


def _narrowed(tensor: torch.Tensor, axis: int, start: int, count: int) -> torch.Tensor:
    """Return a view of some entries along an axis."""
    return tensor.narrow(axis, start, count)


def _weighted(function: Any, share: float, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the mean over a slice times the slice's share of the batch."""
    mean: torch.Tensor = function(*args, **kwargs)
    return mean.mul_(share)


def _concatenated(
    parts: Sequence[torch.Tensor],
    rows: Sequence[tuple[int, int]],
    before: int,
    axis: int,
    items: int,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Concatenate row ranges of parts in memory of a given layout.

    `before` rows of zeros come first; rows behind the parts are zeros as well.
    """
    memory = torch.empty(items, dtype=dtype, device=device)
    whole = memory.as_strided(shape, stride, offset)
    start = before
    for part, (first, past) in zip(parts, rows, strict=True):
        target = whole.narrow(axis, start, past - first)
        source = part.narrow(axis, first, past - first)
        for d, step in enumerate(stride):
            if step == 0:  # every entry is the same bytes
                target, source = target.narrow(d, 0, 1), source.narrow(d, 0, 1)
        target.copy_(source)
        start += past - first
    if before:
        whole.narrow(axis, 0, before).zero_()
    if start < shape[axis]:
        whole.narrow(axis, start, shape[axis] - start).zero_()
    return whole
