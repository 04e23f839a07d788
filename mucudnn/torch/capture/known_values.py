"""Values that are known before a step: numbers that Python uses, indices of a mask.

A capture runs on tensors without data, but Python may ask for values. Three kinds are
known before every step, since they are computed from its inputs alone:

- `if step > 5` in an optimizer: the branch is recorded with its numbers as functions of
  the inputs, and evaluated again before every step.
- `x[:n]`, where `n` was computed from batch and buffers: the capture holds for one n.
- `x[mask]` and `mask.nonzero()`, where these determine the mask, too: PyTorch
  computes the indices before every step, as one more input of the graph. The capture
  holds for their number.

Values that depend on parameters, or that the step draws at random, are refused.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import sympy
import torch
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.symbol import SymT, symbol_is_type

from mucudnn.torch.costs.meters import meter_of
from mucudnn.torch.execution.devices import autocast_off
from mucudnn.torch.lowering.lowered import Layout, leaves_of

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Call:
    """A call whose operands are functions of a step's inputs.

    Attributes:
        function: The function of the call.
        args: Its arguments, with nodes for values that are computed before it.
        kwargs: Its arguments by name.
        nodes: The nodes that compute these values, in order, and for each of them
            those whose values nothing reads behind it.
        inputs: Input nodes, and their positions among the step's inputs.
        constants: Nodes of tensors that are no inputs, and these tensors.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    nodes: tuple[tuple[torch.fx.Node, Sequence[torch.fx.Node]], ...]
    inputs: tuple[tuple[torch.fx.Node, int], ...]
    constants: tuple[tuple[torch.fx.Node, torch.Tensor], ...]

    def of(self, given: Sequence[torch.Tensor]) -> Any:
        """Return the result for the inputs of a step."""
        values: dict[torch.fx.Node, Any] = dict(self.constants)
        values |= {node: given[at] for node, at in self.inputs}

        def result(function: Any, args: Any, kwargs: Any) -> Any:
            args, kwargs = torch.fx.node.map_arg((args, kwargs), values.__getitem__)
            return function(*args, **kwargs)

        for node, unread in self.nodes:
            values[node] = result(node.target, node.args, dict(node.kwargs))
            for read in unread:
                del values[read]
        found = result(self.function, self.args, self.kwargs)
        return int(found) if isinstance(found, bool) else found  # as its symbol is


@dataclass(frozen=True)
class Decision:
    """A branch that Python took during a capture, or a number that it used.

    Attributes:
        expression: Condition, or number, over `numbers`, named by their positions.
        numbers: Numbers in the expression.
        outcome: Value of the expression at the capture.
    """

    expression: Any
    numbers: tuple[_Call, ...] = field(repr=False)
    outcome: int


@dataclass(frozen=True)
class KnownTensors:
    """Tensors that are computed before the step, and are inputs of the graph.

    Attributes:
        call: Computes them.
        layouts: Their shapes, strides and types at the capture.
    """

    call: _Call = field(repr=False)
    layouts: tuple[Layout, ...]


Known = Decision | KnownTensors


def known_values(
    known: Sequence[Known], given: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Return a graph's inputs; None if Python would decide otherwise than it did."""
    inputs = list(given)
    outcomes: dict[Any, int] = {}  # parameters mostly have the same step
    for value in known:
        try:
            if isinstance(value, KnownTensors):
                found = _computed(value.call, inputs)
                if tuple(map(Layout.of, found)) != value.layouts:
                    return None
                inputs += found
                continue
            numbers = tuple([number.of(inputs) for number in value.numbers])
        except (RuntimeError, IndexError):
            return None  # sizes that were decided for another batch do not fit
        key = value.expression, numbers
        if key not in outcomes:
            outcomes[key] = _outcome(value.expression, numbers)
        if outcomes[key] != value.outcome:
            return None
    return inputs


def _computed(call: _Call, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad(), autocast_off(), torch._C.DisableTorchFunction():
        found = call.of(given)
    return [found] if isinstance(found, torch.Tensor) else list(found)


def _outcome(expression: Any, values: Sequence[Any]) -> int:
    names = {_place(i): value for i, value in enumerate(values)}
    return int(sympy_interp(PythonReferenceAnalysis, names, expression))


def _place(index: int) -> Any:
    return sympy.Symbol(f"n{index}", real=True)


_OF_INTEGERS = FloorDiv, Mod, PythonMod
"""Functions whose operands PyTorch takes for integers, though they may be floats."""


_ITEMS = frozenset({_aten._local_scalar_dense.default})
"""Operations that turn an element of a tensor into a Python number."""


_MOST_NODES = 256
"""Most operations between a value and the inputs that it is computed from."""


class KnownShapes(ShapeEnv):  # type: ignore[misc]  # PyTorch has no types here
    """Symbols of a capture, and values that are computed from its inputs.

    Args:
        names: Names of the step's inputs, in the order of its placeholders. Names of
            tensors that are computed before the step are appended.
        given: Present values of the inputs.
        fixed: Inputs that no branch may depend on.
        buffers: Inputs on which sizes and indices may depend, as on the batch.

    Attributes:
        known: The values that were used, in order.
        outcome: Outcome of every branch that values decide; None to find it out.
    """

    def __init__(
        self,
        names: list[str],
        given: Sequence[torch.Tensor],
        fixed: Collection[str],
        buffers: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.known: list[Known] = []
        self.outcome: Any = None
        self._names = names
        self._given = list(given)
        self._fixed = fixed
        self._buffers = buffers
        self._made: dict[Any, Sequence[torch.Tensor]] = {}

    def release_inputs(self) -> None:
        """Drop the inputs: PyTorch's caches of its methods keep this object alive."""
        self._given.clear()
        self._made.clear()

    def known_bytes(self, count: int) -> int:
        """Return the peak of computing the known values from the first inputs."""
        if not self.known:
            return 0
        given = self._given[:count]
        meter = meter_of(given[0].device)
        return meter.most_bytes([lambda: partial(known_values, self.known, given)])[0]

    # -- numbers

    def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the value of a node: PyTorch's, or that of the present inputs."""
        expression = sym_node.expr
        if expression.has(*_OF_INTEGERS) and any(
            symbol_is_type(s, SymT.UNBACKED_FLOAT) for s in expression.free_symbols
        ):
            raise GuardOnDataDependentSymNode(expression)
        try:
            return super().evaluate_sym_node(sym_node, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            if self.outcome is not None:
                return self.outcome
            decided = None
            if sym_node.pytype in (bool, int):
                decided = self._decided(sym_node.expr, sym_node.pytype is int)
            if decided is None:
                raise
            if sym_node.pytype is int:
                return sympy.Integer(decided)
            return sympy.true if decided else sympy.false

    def _decided(self, expression: Any, of_batch: bool) -> int | None:
        symbols = sorted(expression.free_symbols, key=str)
        numbers = [self._number(symbol, of_batch) for symbol in symbols]
        known = tuple(number for number in numbers if number is not None)
        if len(known) < len(symbols):
            return None
        names = {symbol: _place(i) for i, symbol in enumerate(symbols)}
        plain = expression.xreplace(names)
        with _disable_current_modes(), torch.no_grad():
            values = [number.of(self._given) for number in known]
        outcome = _outcome(plain, values)
        self.known.append(Decision(plain, known, outcome))
        return outcome

    def _number(self, symbol: Any, of_batch: bool) -> _Call | None:
        """Return a symbol as a function of the inputs; None if it is not one."""
        mode = get_proxy_mode()
        graph = None if mode is None else mode.tracer.graph
        for node in () if graph is None else reversed(graph.nodes):
            if node.target in _ITEMS and symbol in _symbols(node):
                return self._call(node.target, node.args, dict(node.kwargs), of_batch)
        return None

    def _call(
        self, function: Any, args: Any, kwargs: Any, of_batch: bool
    ) -> _Call | None:
        """Return a call as a function of the inputs; None if it is not one.

        With `of_batch`, it may depend on the batch and buffers only: counts of the
        optimizer change at every step, and only branches may depend on them.
        """
        leaves = pytree.tree_leaves((args, kwargs))
        pending = [n for n in leaves if isinstance(n, torch.fx.Node)]
        placed = pending[0].graph.find_nodes(op="placeholder") if pending else []
        places = {node: i for i, node in enumerate(placed)}
        nodes: set[torch.fx.Node] = set()
        inputs: dict[torch.fx.Node, int] = {}
        constants: dict[torch.fx.Node, torch.Tensor] = {}
        while pending:
            node = pending.pop()
            if node.op == "get_attr":
                constants[node] = getattr(get_proxy_mode().tracer.root, node.target)
            elif node in places:
                name = self._names[places[node]]
                mine = name in self._buffers or name.startswith(("batch.", _PREFIX))
                if name in self._fixed or (of_batch and not mine):
                    return None
                present = self._given[places[node]]
                if present.is_meta or isinstance(present, FakeTensor):
                    return None  # it has no data
                inputs[node] = places[node]
            elif node not in nodes:
                if len(nodes) > _MOST_NODES or not _same_again(node):
                    return None
                nodes.add(node)
                pending += node.all_input_nodes
        last = dict.fromkeys(n for n in leaves if isinstance(n, torch.fx.Node))
        steps: list[tuple[torch.fx.Node, Sequence[torch.fx.Node]]] = []
        for node in sorted(nodes, reverse=True):
            unread = [n for n in node.all_input_nodes if n not in last]
            last |= dict.fromkeys(unread)
            steps.append((node, [n for n in unread if n in nodes]))
        return _Call(
            *(function, args, kwargs, tuple(reversed(steps))),
            tuple(inputs.items()),
            tuple(constants.items()),
        )

    # -- tensors

    def tensors(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of an operation whose shapes depend on data.

        They become inputs of the graph. None if the shapes do not depend on data, or if
        the batch does not determine them.
        """
        if torch.Tag.dynamic_output_shape not in function.tags or function in _INDEXED:
            return None
        mode = get_proxy_mode()
        leaves = pytree.tree_leaves((args, kwargs))
        if mode is None or any(isinstance(v, torch.SymInt) for v in leaves):
            return None
        _, form, nodes = key = _key(function, args, kwargs)
        if key not in self._made:
            args, kwargs = pytree.tree_unflatten(nodes, form)
            call = self._call(function, args, kwargs, of_batch=True)
            if call is None:
                return None
            with _disable_current_modes():
                found = _computed(call, self._given)
            self.known.append(KnownTensors(call, tuple(map(Layout.of, found))))
            fakes = detect_fake_mode()
            self._made[key] = [self._input(mode.tracer, fakes, t) for t in found]
        made = tuple(map(to_fun, self._made[key]))  # new ones, which may be written
        return made[0] if len(function._schema.returns) == 1 else made

    def has_places(self, mask: torch.Tensor) -> bool:
        """Return whether the indices of a mask's elements are an input already."""
        return _key(_aten.nonzero.default, (mask,), {}) in self._made

    def _input(self, tracer: Any, fakes: Any, real: torch.Tensor) -> torch.Tensor:
        """Return a further input of the graph that is traced."""
        name = f"{_PREFIX}{len(self._given)}"
        self._names.append(name)
        self._given.append(real)
        fake = fakes.from_tensor(real, static_shapes=True)
        proxy = tracer.create_proxy("placeholder", name.replace(".", "_"), (), {})
        track_tensor_tree(fake, proxy, constant=None, tracer=tracer)
        return fake

    def with_inputs(self, module: torch.fx.GraphModule, before: int) -> None:
        """Move the inputs that were added behind the others, and return them as well.

        Args:
            module: The traced graph.
            before: Number of its inputs without them.
        """
        graph = module.graph
        inputs = graph.find_nodes(op="placeholder")
        if len(inputs) == before:
            return
        (output,) = graph.find_nodes(op="output")
        last = inputs[before - 1]
        for node in inputs[before:]:
            last.append(node)
            last = node
        output.args = ([*output.args[0], *inputs[before:]],)
        module.recompile()


_PREFIX = "known."
"""Beginning of the names of inputs that are computed before the step."""


def _key(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return a key of a call: the nesting of its arguments, and nodes for tensors."""
    leaves, form = pytree.tree_flatten((args, kwargs))
    nodes = [
        get_proxy_slot(from_fun(v), get_proxy_mode().tracer).proxy.node
        if isinstance(v, FunctionalTensor)
        else v
        for v in leaves
    ]
    return function, form, tuple(nodes)


def _same_again(node: torch.fx.Node) -> bool:
    """Return whether a node is deterministic and has no side effect."""
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded not in tags


def _symbols(node: torch.fx.Node) -> Collection[Any]:
    """Return the symbols in a node's result."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.expr.free_symbols  # type: ignore[no-any-return]
    return ()


# Operations whose results have shapes that depend on data.


_MASKS = (torch.bool, torch.uint8)

_INDEXED = frozenset({_aten.index.Tensor, _aten._unsafe_index.Tensor})

_WRITTEN = frozenset(
    {
        _aten.index_put.default,
        _aten.index_put_.default,
        _aten._unsafe_index_put.default,
        _aten._index_put_impl_.default,
    }
)


def of_known_shape(
    shapes: KnownShapes, function: Any, args: Any, kwargs: Any
) -> tuple[Any, Any, Any]:
    """Return a call with the shape that the batch determines, where it does.

    Masks become indices, and numbers that are sizes or places become those of the
    present batch.
    """
    args, kwargs = _with_numbers(function, args, kwargs)
    if function is _aten.masked_select.default:
        tensor, mask = torch.broadcast_tensors(*args)
        indices = _indices(shapes, [mask])
        if indices is not None:
            return _aten.index.Tensor, (tensor, indices), {}
    elif function in _INDEXED or (
        function in _WRITTEN and _is_row_by_row(shapes, *args[:3])
    ):
        indices = _indices(shapes, args[1])
        if indices is not None:
            args = (args[0], indices, *args[2:])
    return function, args, kwargs


def _with_numbers(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Replace symbols for sizes and places by numbers that the batch determines."""
    if not any(isinstance(v, torch.SymInt) for v in leaves_of(args, kwargs)):
        return args, kwargs
    counts = function.overloadpacket is _aten.arange
    takes = [
        (a.name, counts or "int" in str(a.type)) for a in function._schema.arguments
    ]
    known = dict(takes)
    first = [
        _numbered(value) if is_size else value
        for value, (_, is_size) in zip(args, takes, strict=False)
    ]
    named = {k: _numbered(v) if known.get(k) else v for k, v in kwargs.items()}
    return tuple(first), named


def _numbered(value: Any) -> Any:
    try:
        return pytree.tree_map_only(torch.SymInt, int, value)
    except GuardOnDataDependentSymNode:
        return value


def _indices(shapes: KnownShapes, given: Sequence[Any]) -> list[Any] | None:
    """Return indices in the place of masks; None if a mask is not known."""
    found: list[Any] = []
    for index in given:
        if not isinstance(index, torch.Tensor) or index.dtype not in _MASKS:
            found.append(index)
            continue
        places = shapes.tensors(_aten.nonzero.default, (index,), {})
        if places is None:
            return None
        found += places.unbind(1)
    return found


def _is_row_by_row(
    shapes: KnownShapes, tensor: torch.Tensor, indices: Any, values: torch.Tensor
) -> bool:
    """Return whether a write has one row, or index, for each true element of a mask."""
    tensors = [i for i in indices if isinstance(i, torch.Tensor)]
    masks = [i for i in tensors if i.dtype in _MASKS]
    if masks and any(i.dtype not in _MASKS and i.numel() > 1 for i in tensors):
        return True
    if len(masks) != 1 or values.dim() != tensor.dim() - masks[0].dim() + 1:
        return False
    place = [index is masks[0] for index in indices].index(True)
    # One row may be written to all of them.
    return values.shape[place] != 1 or shapes.has_places(masks[0])
