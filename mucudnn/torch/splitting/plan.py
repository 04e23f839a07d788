"""Plan a PyTorch step whole, in slices of its batch or in strips.

Every candidate is a lowered graph of its own with measurements of its own, planned
under the same budget; what is predicted to be fastest runs.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.errors import PlanningError, UnsupportedError
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import exact_bytes
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.ir.traits import Rows
from mucudnn.passes.planning.cutting import AUTO, HEIGHT, Split, SplitStep
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.split_search import plan_splitting
from mucudnn.torch.lowering.lowered import Call, Layout, Lowered, Number, Operand
from mucudnn.torch.plan import TorchPlan
from mucudnn.torch.planning import Planner
from mucudnn.torch.splitting.axes import Axis, Cut, of_rows
from mucudnn.torch.splitting.prepare import (
    prepared,
    with_norms_in_parts,
    without_shape_operands,
)
from mucudnn.torch.splitting.traits import Batched, with_batches, with_strips

_IMAGES = 3
"""Axes that images have at least, (N, C, *spatial)."""


def batched_step(lowered: Lowered, names: Sequence[str]) -> Batched | None:
    """A step of which is known where the batch is.

    Args:
        lowered: The step, without updates in place.
        names: Of its inputs, in order; those of a batch begin with `batch.`.

    Returns:
        None if no tensor of the batch has an axis, or there is one sample only.
    """
    shapes = _batch_shapes(lowered, names)
    samples = next((shape[0] for shape in shapes.values() if shape), 0)
    given = [name for name, shape in shapes.items() if shape[:1] == (samples,)]
    if samples < 2:
        return None
    found = with_batches(prepared(lowered), given, samples)
    return found if found.cuts and set(given) & found.axes.keys() else None


def stripped_step(lowered: Lowered, names: Sequence[str]) -> Batched | None:
    """A step of which is known where the height of its images is, depth of volumes.

    Images are the tensors of the batch with the most axes, (N, C, *spatial); those with
    one less are labels, (N, *spatial).

    Args:
        lowered: The step, without updates in place.
        names: Of its inputs, in order; those of a batch begin with `batch.`.

    Returns:
        None if there are no images, or nothing is computed by their rows.
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
    ready = with_norms_in_parts(without_shape_operands(prepared(lowered)))
    found = with_strips(ready, images)
    return found if found.cuts and images.keys() & found.axes.keys() else None


def _batch_shapes(
    lowered: Lowered, names: Sequence[str]
) -> Mapping[str, tuple[int, ...]]:
    """Tensors of the batch, and their sizes."""
    of_name = zip(names, lowered.inputs, strict=True)
    batch = [t for n, t in of_name if t is not None and n.startswith("batch.")]
    return {name: lowered.layouts[name].shape for name in batch}


def in_parts(
    lowered: Lowered,
    names: Sequence[str],
    make: Callable[[Lowered], Planner],
    *,
    strips: bool = False,
) -> "_Candidates | None":
    """What plans a step whole and in parts, or strips; None if none can be cut."""
    batched = stripped_step(lowered, names) if strips else batched_step(lowered, names)
    return None if batched is None else _Candidates(lowered, batched, make)


def plan_in_parts(
    lowered: Lowered,
    names: Sequence[str],
    make: Callable[[Lowered], Planner],
    budget: float,
    split: Split,
) -> tuple[Planner, TorchPlan]:
    """The fastest way to run a step within a budget, whole or in parts.

    Args:
        lowered: The step, without updates in place.
        names: Of its inputs.
        make: Measures a step, with its updates.
        budget: Bytes.
        split: `auto`, a number of parts, `height` or `height:4`.

    Raises:
        PlanningError: Nothing fits; says the least budget that works.
        UnsupportedError: A number of parts was given and nothing can be cut.
    """
    strips = isinstance(split, str) and split.startswith(HEIGHT)
    candidates = in_parts(lowered, names, make, strips=strips)
    if candidates is None and split == AUTO:  # one sample, perhaps a large one
        candidates = in_parts(lowered, names, make, strips=True)
    if candidates is None and strips:
        raise UnsupportedError(
            f"the step was to run in strips, split={split!r}, but its batch has no "
            "images, (N, C, height, width) or with a depth, or no operation on their "
            "rows can be cut; ask for a number of parts of its batch"
        )
    if candidates is None:
        if split == AUTO:
            planner = make(lowered)
            return planner, planner.plan(budget)
        raise UnsupportedError(
            f"the step was to run in {split} parts, but its batch has one sample, or "
            "no operation on it can be cut; split='height' cuts images, split='auto' "
            "runs it whole where nothing can be cut"
        )
    return candidates.planned(budget, split)


@dataclass(frozen=True)
class _Planned:
    graph: Graph
    planner: Planner


class _Candidates:
    """A step whole and in parts, each made and measured when it is asked for."""

    def __init__(
        self, whole: Lowered, batched: Batched, make: Callable[[Lowered], Planner]
    ) -> None:
        self._whole, self._batched, self._make = whole, batched, make
        self._made: list[_Planned] = []

    def planned(self, budget: float, split: Split) -> tuple[Planner, TorchPlan]:
        """The fastest within a budget.

        Raises:
            PlanningError: Nothing fits.
        """
        try:
            found = plan_splitting(self.step(budget), split)
        except PlanningError as e:
            given = self._made[0].planner.caller_bytes
            if e.least_bytes is None:
                raise
            least = e.least_bytes - given
            raise PlanningError(
                f"neither whole nor in parts does the step fit into "
                f"{exact_bytes(int(budget))}; the least budget that works is "
                f"{exact_bytes(least)}",
                short_by=least - int(budget),
                least_bytes=least,
            ) from None
        chosen = found.chosen
        if chosen.request is None or chosen.plan is None:
            raise PlanningError("the step has no plan")
        planner = self._planner(chosen.request.graph)
        plan = chosen.plan
        if planner.tiers:
            plan = planner.plan_request(chosen.request)
        return planner, replace(planner.describe(plan, budget), splitting=found)

    def step(self, budget: float) -> SplitStep:
        """What is planned, and how it is asked for."""

        def asked(graph: Graph, profile: Profile) -> StepRequest:
            return self._planner(graph).request(budget)

        return SplitStep(self._batched.graph, self._finished, self._costs, asked)

    def _finished(self, graph: Graph) -> Graph:
        """A step with its updates, and a planner of it."""
        whole = graph is self._batched.graph
        planner = self._make(self._whole if whole else in_slices(self._batched, graph))
        self._made.append(_Planned(planner.lowered.graph, planner))
        return planner.lowered.graph

    def _costs(self, graph: Graph) -> Profile:
        return self._planner(graph).profile

    def _planner(self, graph: Graph) -> Planner:
        nodes = graph.nodes
        return next(m.planner for m in self._made if m.graph.nodes is nodes)


# A PyTorch step in slices or strips: the passes' graph, and calls of its nodes.


_OF = re.compile(r"[@\[]")
"""What is behind it in a name tells which rows."""


def in_slices(batched: Batched, graph: Graph) -> Lowered:
    """The calls of a graph that was cut.

    Args:
        batched: The whole step.
        graph: The same, split along what it says.
    """
    return _Calls(batched, graph).lowered()


class _Calls:
    def __init__(self, batched: Batched, graph: Graph) -> None:
        self._batched, self._graph = batched, graph
        self._whole = batched.lowered
        self._calls: dict[str, Call] = {}
        self._layouts: dict[str, Layout] = {
            name: self._whole.layouts[name] for name in graph.inputs
        }

    def lowered(self) -> Lowered:
        """The graph, with calls and layouts of all that is in it."""
        nodes = tuple(self._written(node) for node in self._graph.nodes)
        tensors = {name: self._spec(spec) for name, spec in self._graph.tensors.items()}
        graph = replace(
            self._graph, tensors=MappingProxyType(tensors), nodes=tuple(nodes)
        )
        return replace(
            self._whole, graph=graph, calls=self._calls, layouts=self._layouts
        )

    def _written(self, node: Node) -> Node:
        """Note how a node is called; the node as it is planned."""
        known = self._whole.graph.by_name.get(node.name)
        if known is not None:
            more = len(node.inputs) - len(known.inputs)
            self._calls[node.name] = _given(self._whole.calls[node.name], known, more)
            for name in node.outputs:
                self._layouts[name] = self._whole.layouts[name]
            traits = replace(node.traits, batch=None, strips=None)
            return replace(node, traits=traits)
        if "rows" in node.attrs or "strip" in node.attrs:
            return self._slice(node)
        if node.op == "slice":
            self._view(node)
        elif node.op == "concat":
            self._join(node)
        else:
            self._add(node)
        return replace(node, attrs=MappingProxyType({}))

    def _spec(self, spec: TensorSpec) -> TensorSpec:
        """As PyTorch's tensors are described: inputs are state."""
        known = self._whole.graph.tensors.get(spec.name)
        if spec.name in self._graph.inputs:
            return replace(spec, role=Role.STATE, shape=(spec.nbytes,))
        return spec if known is None else replace(spec, shape=(spec.nbytes,))

    def _slice(self, node: Node) -> Node:
        first = node.name.rpartition("@")[0]
        whole = self._whole.graph.by_name[first]
        cut = self._batched.cuts[first]
        for name, of, axis in zip(
            node.outputs, whole.outputs, cut.outputs, strict=True
        ):
            layout = self._whole.layouts[of]
            if axis is not None:
                layout = of_rows(layout, axis, self._rows(name))
            self._layouts[name] = layout
        if "strip" in node.attrs:
            call: Call = node.attrs["strip"]
        else:
            call = self._sliced(self._whole.calls[first], whole, node, cut)
        overwrites = self._overwritten(node) if call.into is not None else ()
        if not overwrites:
            call = replace(call, into=None, first=False)
        self._calls[node.name] = call
        traits = replace(node.traits, overwrites=overwrites)
        return replace(node, attrs=MappingProxyType({}), traits=traits)

    def _sliced(self, call: Call, whole: Node, node: Node, cut: Cut) -> Call:
        axes = self._batched.axes
        narrowed = {
            i: axis
            for i, axis in cut.inputs.items()
            if axes.get(whole.inputs[i]) != axis
        }
        shape = self._layouts[node.outputs[0]].shape
        found = in_part(call, cut, node.attrs["rows"], shape, narrowed)
        return replace(found, random=node.traits.random)

    def _overwritten(self, node: Node) -> tuple[int, ...]:
        result = self._layouts[node.outputs[0]]
        nbytes = self._graph.tensors[node.outputs[0]].nbytes
        return tuple(
            i
            for i in node.traits.overwrites
            if self._layouts[node.inputs[i]] == result
            and self._graph.tensors[node.inputs[i]].nbytes == nbytes
        )

    def _view(self, node: Node) -> None:
        """Some rows of what is there as one."""
        (held,), (view,) = node.inputs, node.outputs
        axis = self._axis(held)
        spec, count = self._graph.tensors[view], self._rows(view)
        start = spec.offset // (spec.nbytes // count)
        self._layouts[view] = of_rows(self._layouts[held], axis, count, start)
        place = axis.index, start * axis.each, count * axis.each
        self._calls[node.name] = Call(_narrowed, (Operand(0), *place), {}, (None,))

    def _join(self, node: Node) -> None:
        """Rows put together, as the whole tensor lies or would; zeros around them."""
        (joined,) = node.outputs
        axis, of = self._axis(joined), _OF.split(joined)[0]
        spec, layout = self._graph.tensors[joined], self._whole.layouts[of]
        if joined != of:
            layout = of_rows(layout, axis, self._rows(joined))
        self._layouts[joined] = layout
        parts = [Operand(i) for i in range(len(node.inputs))]
        rows = [(a * axis.each, b * axis.each) for a, b in node.attrs["parts"]]
        before = node.attrs["before"] * axis.each
        items = spec.nbytes // layout.dtype.itemsize
        lies = layout.shape, layout.stride, layout.offset, layout.dtype, layout.device
        self._calls[node.name] = Call(
            _joined, (parts, rows, before, axis.index, items, *lies), {}, (None,)
        )

    def _rows(self, name: str) -> int:
        """Samples of a slice, or rows of a strip."""
        return self._graph.tensors[name].shape[-2]

    def _add(self, node: Node) -> None:
        """What a slice leaves, added to the sum of those before."""
        self._layouts[node.outputs[0]] = self._layouts[node.inputs[0]]
        self._calls[node.name] = Call(
            torch.ops.aten.add_.Tensor, (Operand(0), Operand(1)), {}, (None,)
        )

    def _axis(self, name: str) -> Axis:
        return self._batched.axes[_OF.split(name)[0]]


def _given(call: Call, node: Node, more: int) -> Call:
    """A call with so many operands more: the last is what slices have left."""
    if not more:
        return call
    last = len(node.inputs) - 1
    left = [Operand(i) for i in range(last, last + more + 1)]
    args = tuple(left if value == [Operand(last)] else value for value in call.args)
    return replace(call, args=args)


def in_part(
    call: Call,
    cut: Cut,
    rows: Rows,
    shape: Sequence[int],
    narrowed: Mapping[int, Axis],
) -> Call:
    """A call for some samples.

    Args:
        call: For all of them.
        cut: How it is cut.
        rows: Which samples.
        shape: Of its first result.
        narrowed: Operands that are given whole, of which it reads what it needs.
    """
    leaves = {
        i: Number(
            _narrowed,
            (Operand(i), axis.index, rows.start * axis.each, rows.count * axis.each),
        )
        for i, axis in narrowed.items()
    }
    args = [_put(leaves, value) for value in call.args]
    for position in cut.shaped:
        args[position] = list(shape)
    for position in cut.counted:
        args[position] = rows.count * next(iter(cut.inputs.values())).each
    kwargs = {key: _put(leaves, value) for key, value in call.kwargs.items()}
    found = replace(call, args=tuple(args), kwargs=kwargs)
    if not cut.averaged:
        return found
    weighed = (call.function, rows.count / rows.total, *args)
    return replace(found, function=_weighed, args=weighed, into=None)


def _put(leaves: Mapping[int, Number], value: Any) -> Any:
    """An argument with some operands replaced."""
    match value:
        case Operand(index):
            return leaves.get(index, value)
        case list() | tuple():
            return type(value)(_put(leaves, v) for v in value)
        case _:
            return value


def _narrowed(tensor: torch.Tensor, axis: int, start: int, count: int) -> torch.Tensor:
    """Some entries along an axis."""
    return tensor.narrow(axis, start, count)


def _weighed(function: Any, share: float, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A mean's share in that of the whole batch."""
    mean: torch.Tensor = function(*args, **kwargs)
    return mean.mul_(share)


def _joined(
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
    """Rows of parts behind each other, in memory that is laid out as is said.

    Some are zeros before them, as many as are said, and all that are behind them.
    """
    memory = torch.empty(items, dtype=dtype, device=device)
    whole = memory.as_strided(shape, stride, offset)
    start = before
    for part, (first, past) in zip(parts, rows, strict=True):
        mine = whole.narrow(axis, start, past - first)
        part = part.narrow(axis, first, past - first)
        for d, step in enumerate(stride):
            if step == 0:  # every entry is the same bytes
                mine, part = mine.narrow(d, 0, 1), part.narrow(d, 0, 1)
        mine.copy_(part)
        start += past - first
    if before:
        whole.narrow(axis, 0, before).zero_()
    if start < shape[axis]:
        whole.narrow(axis, start, shape[axis] - start).zero_()
    return whole
