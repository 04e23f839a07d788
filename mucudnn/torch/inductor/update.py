"""Compile the optimizer's update of each parameter by Inductor.

The update is lowered operation by operation (`lower_step`). Operations on single
elements that belong together, such as the nine of AdamW for one parameter, become one
node here, with one kernel that reads and writes each tensor once. It is a node of its
own for each parameter, which runs as soon as the gradient exists.

A kernel takes tensors as flat memory of a symbolic size, so that parameters of all
shapes share it. A tensor with another order of elements, such as a gradient that
Inductor has laid out channels last, is copied first. Learning rates, and what follows
from a step's count, are numbers that a kernel reads from memory.

Only operations are compiled whose bits are known: products and sums that the kernels of
eager mode round once (FMA) are rounded once here. A kernel is compared with these on
the processor that it runs on, and dropped if a bit differs. Square roots are the
exception: here they are rounded correctly, and those of Intel MKL, which eager mode
calls, are off by one in the last place now and then.

What is not compiled stays operation by operation: on other devices, for complex
tensors, reductions such as a norm, and parameters of one element.
"""

import logging
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.inductor_prims import fma
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.torch.capture.optimizers import with_dependencies
from mucudnn.torch.costs.measure import evaluate, evaluated
from mucudnn.torch.inductor.compiling import (
    SETTINGS,
    CompiledHalf,
    half_of,
    holds,
    symbol,
)
from mucudnn.torch.inductor.sizes import CompiledSizes
from mucudnn.torch.inductor.wrapper_text import define, read_wrapper
from mucudnn.torch.internals import replaced
from mucudnn.torch.lowering.lowered import (
    Call,
    Layout,
    Lowered,
    Named,
    NotCompiledError,
    Number,
    Operand,
    bound,
    named,
)

_aten = torch.ops.aten

_LOG = logging.getLogger(__name__)

_BLOCK = 1 << 15
"""Elements from which on kernels use several threads, as those of eager mode do."""

_TRIED = 50021
"""Elements that are compared with eager mode: blocks, and a part of a vector."""

_MOST = torch.finfo(torch.float32).max

_OVERFLOW = "value cannot be converted to type float without overflow"
"""Error of PyTorch for a finite number above `_MOST`."""

_DRAWS = 256
"""Draws of single values until numbers that follow from them are real."""


def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    if isinstance(alpha, int | float) and alpha in (1, -1):
        return x + y if alpha == 1 else x - y
    return _fused(y, alpha, x)


def _lerp(start: Any, end: Any, weight: Any) -> Any:
    weight = torch.as_tensor(weight, dtype=start.dtype)
    small = weight.abs() < 0.5
    factor = torch.where(small, weight, weight - 1)
    return _fused(end - start, factor, torch.where(small, start, end))


def _fused(x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z, rounded once."""
    if not isinstance(y, torch.Tensor):
        y = torch.full((), y, dtype=x.dtype, device=x.device)
    return fma(x, y, z)


_EXACT: Mapping[Any, Callable[..., Any]] = {
    _aten.add.Tensor: _add,
    _aten.sub.Tensor: lambda x, y, alpha=1: _add(x, y, -alpha),
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.lerp.Scalar: _lerp,
    _aten.addcmul.default: lambda x, y, z, value=1: _fused(y * value, z, x),
    _aten.addcdiv.default: lambda x, y, z, value=1: x + y * value / z,
}
"""Operations whose arguments may be numbers that differ from step to step.

Each is computed as its kernel of eager mode does it.
"""

_PLAIN = frozenset(
    {
        _aten.sqrt.default,
        _aten.neg.default,
        _aten.abs.default,
        _aten.sign.default,
        _aten.reciprocal.default,
        _aten.maximum.default,
        _aten.minimum.default,
        _aten.clamp.default,
        _aten.where.self,
    }
)
"""Other operations that are rounded once, or not at all."""


@dataclass(frozen=True)
class _Group:
    """Operations on single elements of one shape that become one.

    Attributes:
        nodes: The operations, in order.
        inputs: Tensors that they read: those of the kernel, and then single values
            that only numbers are computed from.
        count: How many of the inputs the kernel reads.
        outputs: Tensors that others read; new values of inputs come first.
        stores: Input that each of the first outputs is the new value of.
        numbers: Numbers that the kernel reads, with operands by name.
        scalars: Those of them that eager mode refuses if they overflow.
        layouts: Layouts of all tensors that the kernel reads or writes.
    """

    nodes: Sequence[Node]
    inputs: Sequence[str]
    count: int
    outputs: Sequence[str]
    stores: Sequence[str]
    numbers: Sequence[Number]
    scalars: Sequence[Number]
    layouts: Mapping[str, Layout]


def compile_updates(
    lowered: Lowered,
    targets: Sequence[str | None],
    apart: frozenset[str],
    compiled: CompiledSizes,
) -> Lowered:
    """Return an update with operations on single elements joined and compiled.

    Its last results are the new values of `targets`, None for one that is no tensor.
    Nodes of `apart` stay as they are.
    """
    graph = lowered.graph
    calls, layouts = dict(lowered.calls), dict(lowered.layouts)
    news = lowered.results[len(lowered.results) - len(targets) :]
    stores = {v: t for v, t in zip(news, targets, strict=True) if t not in (v, None)}
    joined: dict[str, Node] = {}
    for nodes in _groups(lowered, apart):
        group = _described(lowered, nodes, stores)
        name = group.outputs[0]
        try:
            calls[name] = _call_of(lowered, group, compiled)
        except Exception as e:  # Inductor, and operations that are tried, raise any
            _LOG.debug("%s runs operation by operation: %s", name, e)
            continue
        layouts.update(group.layouts)
        inputs, outputs = tuple(group.inputs), tuple(group.outputs)
        node = Node(name, "update", inputs, outputs, phase=Phase.UPDATE)
        joined.update((member.name, node) for member in nodes)
    every = (joined.get(node.name, node) for node in graph.nodes)
    left = {node.name: node for node in every}.values()
    made = {name: node for node in left for name in node.outputs}
    before = {n.name: [made[name] for name in n.inputs if name in made] for n in left}
    for first, node in pairwise(n for n in left if n.traits.random):
        before[node.name].append(first)
    seen: set[str] = set()
    ordered = [each for n in left for each in with_dependencies(n, before, seen)]
    graph = Graph(graph.tensors, tuple(ordered), graph.outputs)
    return replace(lowered, graph=graph, calls=calls, layouts=layouts)


# Groups.


def _groups(lowered: Lowered, apart: frozenset[str]) -> list[list[Node]]:
    """Find operations that can be one, so that no other has to run between two of them.

    The level of an operation is how many boundaries of groups lie between it and the
    end of the step. A path through another operation crosses two, so that operations
    of one level never wait for each other outside their group. Levels count from the
    end: scaled gradients, which wait for each other, are unscaled where they are used.
    """
    graph = lowered.graph
    level: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...] | None] = {}
    group: dict[str, list[Node]] = {}
    of_tensor: dict[Any, str] = {}
    for node in reversed(graph.nodes):
        name = node.name
        shape = shapes[name] = None if name in apart else _shape(lowered, node)
        level[name] = 0
        for reader in (n for t in node.outputs for n in graph.readers.get(t, ())):
            joins = shape is not None and shape == shapes[reader.name]
            level[name] = max(level[name], level[reader.name] + (not joins))
        if shape is None:
            continue
        mine = group[name] = [node]
        # Operations of one level that share a tensor are one group.
        for tensor in (*node.inputs, *node.outputs):
            if lowered.layouts[tensor].shape == shape:
                other = group[of_tensor.setdefault((tensor, level[name]), name)]
                if other is not mine:
                    mine += other
                    group.update((n.name, mine) for n in other)
    found = {id(nodes): nodes for nodes in group.values() if len(nodes) > 1}.values()
    return [sorted(n, key=lambda n: graph.positions[n.name]) for n in found]


def _shape(lowered: Lowered, node: Node) -> tuple[int, ...] | None:
    """Return the shape of an operation on single elements; None for any other one."""
    call = lowered.calls[node.name]
    leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
    numbers = any(isinstance(leaf, Number) for leaf in leaves)
    if call.function not in _EXACT and (numbers or call.function not in _PLAIN):
        return None
    (result,) = node.outputs
    shape = lowered.layouts[result].shape
    read = [node.inputs[v.index] for v in leaves if isinstance(v, Operand)]
    every = [lowered.layouts[name] for name in (*read, result)]
    fits = all(
        (at.dtype.is_floating_point or at.dtype is torch.bool)
        and at.device.type == "cpu"
        and not at.negative
        and at.shape in (shape, ())
        for at in every
    )
    alone = lowered.graph.tensors[result].alias is None
    return shape if fits and alone and math.prod(shape) > 1 else None


def _described(
    lowered: Lowered, nodes: Sequence[Node], stores: Mapping[str, str]
) -> _Group:
    """Return a group with what it reads and returns."""
    graph, layouts = lowered.graph, lowered.layouts
    members = {node.name for node in nodes}
    made = {name for node in nodes for name in node.outputs}
    read = dict.fromkeys(n for node in nodes for n in node.inputs if n not in made)
    arguments = [_named_arguments(lowered, node) for node in nodes]
    leaves = pytree.tree_leaves(arguments)
    # A second operand that is a number is a tensor to PyTorch, others are scalars.
    scalars = pytree.tree_leaves([(args[2:], kwargs) for args, kwargs in arguments])
    operands = {leaf.name for leaf in leaves if isinstance(leaf, Named)}
    kernel = [name for name in read if name in operands]
    others = {
        name: any(n.name not in members for n in graph.readers.get(name, ()))
        for name in made
    }
    outputs = [n for node in nodes for n in node.outputs if others[n] or n in stores]
    outputs += [n for n in made.intersection(lowered.results) if n not in outputs]
    stored = [
        name
        for name in outputs
        if stores.get(name) in kernel
        and layouts[stores[name]].dtype is layouts[name].dtype
    ]
    mine = {name: layouts[name] for name in (*kernel, *outputs)}
    for name in stored:
        if not others[name]:  # a new value that nothing else reads
            mine[name] = replace(layouts[stores[name]], offset=0)
    return _Group(
        nodes,
        [*kernel, *(name for name in read if name not in operands)],
        len(kernel),
        [*stored, *(name for name in outputs if name not in stored)],
        [stores[name] for name in stored],
        list(dict.fromkeys(v for v in leaves if isinstance(v, Number))),
        list(dict.fromkeys(v for v in scalars if isinstance(v, Number))),
        mine,
    )


def _named_arguments(lowered: Lowered, node: Node) -> Any:
    """Return arguments with tensors by name, and numbers that a kernel reads.

    Constants such as a decay are numbers, too: one kernel serves all of them.
    """
    call = lowered.calls[node.name]
    given = named((call.args, dict(call.kwargs)), node.inputs)
    if call.function not in _EXACT:
        return given
    return pytree.tree_map_only(float, lambda v: Number(float, (v,)), given)


# Kernels.


@dataclass(frozen=True)
class _Kernel:
    """A kernel for flat tensors of any size.

    Attributes:
        half: What Inductor has written.
        symbol: Symbol of the size.
        shapes: PyTorch's guards on it.
        dtype: Type of numbers: that in which operations are computed.
    """

    half: CompiledHalf
    symbol: Any
    shapes: ShapeEnv
    dtype: torch.dtype


def _call_of(lowered: Lowered, group: _Group, compiled: CompiledSizes) -> Call:
    """Return the call of a group's kernel."""
    kernel = group.inputs[: group.count]
    storages = {lowered.graph.storages[name] for name in kernel}
    orders = {_order(group.layouts[name]) for name in group.outputs}
    if len(storages) < len(kernel) or None in orders or len(orders) > 1:
        raise NotCompiledError("tensors of an update share memory, or differ in order")
    size = math.prod(group.layouts[group.outputs[0]].shape)
    threads = torch.get_num_threads() if size >= _BLOCK else 1
    operations = list(_operations(lowered, group))
    of_kernel = [group.layouts[name] for name in (*kernel, *group.outputs)]
    key = (
        repr(operations),
        tuple((layout.dtype, len(layout.shape) > 0) for layout in of_kernel),
        *(group.count, tuple(map(group.inputs.index, group.stores)), threads),
    )
    if key not in compiled.updates:
        compiled.updates[key] = None  # unless all of this works
        found = _compiled(operations, group, _TRIED if threads > 1 else 61)
        _check_bits(lowered, group, found)
        compiled.updates[key] = found
    if (found := compiled.updates[key]) is None:
        raise NotCompiledError("such an update could not be compiled before")
    return _bound_call(found, group, size)


def _order(layout: Layout) -> tuple[int, ...] | None:
    """Return the strides of axes longer than 1; None if there are gaps."""
    strides = [
        (s, n) for s, n in zip(layout.stride, layout.shape, strict=True) if n > 1
    ]
    expected = 1
    for stride, size in sorted(strides):
        if stride != expected:
            return None
        expected *= size
    return tuple(stride for stride, _ in strides)


def _operations(lowered: Lowered, group: _Group) -> Iterator[tuple[Any, ...]]:
    """Yield functions, arguments as places, and types and places of results."""
    places = {name: i for i, name in enumerate(group.inputs)}
    places |= {node.outputs[0]: -1 - i for i, node in enumerate(group.nodes)}
    numbers = {number: i for i, number in enumerate(group.numbers)}

    def placed(value: Any) -> Any:
        match value:
            case Number():
                return Number(float, (numbers[value],))
            case Named(name):
                return Operand(places[name])
        return value

    for node in group.nodes:
        given = _named_arguments(lowered, node)
        arguments = pytree.tree_map(placed, given)
        (result,) = node.outputs
        at = group.outputs.index(result) if result in group.outputs else -1
        dtype = lowered.layouts[result].dtype
        yield lowered.calls[node.name].function, arguments, dtype, at


def _compiled(
    operations: Sequence[tuple[Any, ...]], group: _Group, example: int
) -> _Kernel:
    """Compile a group's kernel.

    `example` is a size for which Inductor decides on threads.
    """
    layouts = [group.layouts[name] for name in group.inputs[: group.count]]
    double = any(layout.dtype is torch.float64 for layout in layouts)
    dtype = torch.float64 if double else torch.float32
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)

    def run(_: Any, *given: torch.Tensor) -> list[torch.Tensor]:
        *tensors, numbers = given
        values: list[torch.Tensor] = []

        def valued(leaf: Any) -> Any:
            match leaf:
                case Number(_, (index,)):
                    return numbers[index]
                case Operand(index):
                    tensor = tensors[index] if index >= 0 else values[-1 - index]
                    narrow = tensor.is_floating_point() and tensor.itemsize < 4
                    return tensor.float() if narrow else tensor  # rounded at the end
            return leaf

        for function, arguments, made, _ in operations:
            args, kwargs = pytree.tree_map(valued, arguments)
            values.append(_EXACT.get(function, function)(*args, **kwargs).to(made))
        results = {at: v for (*_, at), v in zip(operations, values, strict=True)}
        return [results[i] for i in range(len(group.outputs))]

    settings = {
        **SETTINGS,
        "emulate_precision_casts": True,
        # Without effect, but part of the key by which compiled graphs are cached.
        "profile_bandwidth_regex": "updates with fused products",
    }
    with mode, torch.no_grad(), enable_python_dispatcher():
        size = symbol(shapes, "size", example)
        tensors = [
            torch.empty([size] if at.shape else [], dtype=at.dtype, device="cpu")
            for at in layouts
        ]
        numbers = torch.empty(len(group.numbers), dtype=dtype, device="cpu")
        given = [size, *tensors, numbers]
        module = make_fx(run, decomposition_table=select_decomp_table())(*given)
    with (
        tracing(TracingContext(mode)),
        V.set_fake_mode(mode),
        torch.no_grad(),
        config.patch(settings),
        _fused_products(),
    ):
        found = compile_fx_inner(module, given)
    return _Kernel(half_of(found, module, []), size.node.expr, shapes, dtype)


@contextmanager
def _fused_products() -> Iterator[None]:
    """Have Inductor write products with sums for the CPU that are rounded once."""

    def written(function: str) -> Any:
        return staticmethod(lambda x, y, z: f"{function}({x}, {y}, {z})")

    # The passes of other sizes are compiled later, by what PyTorch has there.
    with (
        replaced(CppOverrides, fma=written("std::fma")),
        replaced(CppVecOverrides, fma=written("at::vec::fmadd")),
    ):
        yield


def _bound_call(found: _Kernel, group: _Group, size: int) -> Call:
    """Return the call of a kernel for tensors of a size."""
    tensors = [f"a{i}" for i in range(group.count)]
    numbers = [f"n{i}" for i in range(len(group.numbers))]
    given = [str(size), *tensors, "numbers"]
    wrapper = read_wrapper(found.half, "u_", given, {str(found.symbol): size})
    line = wrapper.lines[0]
    results = {value: f"r{i}" for i, value in enumerate(wrapper.results)}
    alone = len(wrapper.lines) == 1 and results.keys() == {*line.results}
    if not alone or line.changes or not holds(found.shapes, [found.symbol], [size]):
        raise NotCompiledError(f"an update of {size} elements is not a single kernel")
    body = []
    if numbers:
        checked = [group.numbers.index(number) for number in group.scalars]
        if found.dtype is torch.float32 and checked:
            fails = " or ".join(f"{_MOST!r} < abs(n{i}) < inf" for i in checked)
            body.append(f"if {fails}: raise RuntimeError({_OVERFLOW!r})")
        code = "d" if found.dtype is torch.float64 else "f"
        values = f"array({code!r}, ({', '.join(numbers)},))"
        body.append(f"numbers = torch.frombuffer({values}, dtype={found.dtype})")
    layouts = [group.layouts[name] for name in (*group.inputs[: group.count],)]
    made = [group.layouts[name] for name in group.outputs]
    for name, layout in zip(tensors, layouts, strict=True):
        if layout.shape and _order(layout) != _order(made[0]):
            copied = _empty(replace(made[0], dtype=layout.dtype))
            body.append(f"{name} = {copied}.copy_({name})")
    pointers = (results.get(p, p) if isinstance(p, str) else p for p in line.pointers)
    call = f"{line.name}({', '.join(map(str, pointers))})"
    stores = [group.inputs.index(name) for name in group.stores]
    functions = []
    for taken in ([], stores):
        memory = [f"a{i}" for i in taken] + [_empty(at) for at in made[len(taken) :]]
        assigned = [f"r{i} = {each}" for i, each in enumerate(memory)]
        returned = f"return {', '.join(results.values())},"
        lines = [*body, *assigned, call, returned]
        space = {**found.half.space, "array": array, "inf": math.inf}
        functions.append(define([*tensors, *numbers], lines, space, line.kernel))
    places = {name: i for i, name in enumerate(group.inputs)}
    return Call(
        functions[0],
        (
            *map(Operand, range(group.count)),
            *(bound(number, places) for number in group.numbers),
        ),
        {},
        tuple(range(len(made))),
        into=functions[1],
        stores=tuple(stores),
    )


def _empty(layout: Layout) -> str:
    made = f"{layout.shape}, {layout.stride}, dtype={layout.dtype}"
    return f"torch.empty_strided({made}, device='cpu')"


def _check_bits(lowered: Lowered, group: _Group, found: _Kernel) -> None:
    """Compare a kernel, out of place and in place, with the operations of its group."""
    generator = torch.Generator().manual_seed(0)
    given: list[torch.Tensor] = []
    for i, name in enumerate(group.inputs):
        layout = lowered.layouts[name]
        drawn = torch.rand(
            [_TRIED] if math.prod(layout.shape) > 1 else layout.shape,
            generator=generator,
            dtype=torch.float64,
        )
        # Moments may be negative.
        drawn = drawn - 0.3 * (i % 2) if drawn.numel() > 1 else drawn
        given.append(drawn.to(layout.dtype))
    flat = {
        name: replace(layout, shape=(_TRIED,), stride=(1,), offset=0)
        if math.prod(layout.shape) > 1
        else layout
        for name, layout in group.layouts.items()
    }
    call = _bound_call(found, replace(group, layouts=flat), _TRIED)
    _draw_single_values(given, call.args[group.count :], generator)
    values = dict(zip(group.inputs, given, strict=True))
    for node in group.nodes:
        (result,) = node.outputs
        operands = [values[name] for name in node.inputs]
        (values[result],) = evaluate(lowered.calls[node.name], operands)
        if lowered.calls[node.name].function is _aten.sqrt.default:
            (operand,) = operands
            with np.errstate(invalid="ignore"):
                rounded = np.sqrt(operand.to(found.dtype).numpy())
            values[result] = torch.from_numpy(rounded).to(operand.dtype)
    for function in filter(None, (call.function, call.into)):
        mine = [tensor.clone() for tensor in given]
        results = evaluate(replace(call, function=function), mine)
        expected = [values[name] for name in group.outputs]
        for one, other in zip(expected, results, strict=True):
            if not ((one == other) | (one.isnan() & other.isnan())).all():
                raise NotCompiledError("a kernel has other bits than its operations")


def _draw_single_values(
    given: list[torch.Tensor], numbers: Sequence[Any], generator: torch.Generator
) -> None:
    """Replace tensors of one element by values for which numbers are real.

    A value may be a count of steps, a decay below 1 that is scheduled, or a learning
    rate: `sqrt(1 - decay**count)` is real for some values only.
    """
    for draw in range(_DRAWS):
        for i, tensor in enumerate(given):
            if tensor.numel() == 1:
                value = torch.rand(tensor.shape, generator=generator)
                above = draw == 0 or torch.rand((), generator=generator) < 0.5
                value = value * 36 + 3 if above else value
                given[i] = value.to(tensor.dtype)
        try:
            found = [evaluated(number, given) for number in numbers]
            if all(not isinstance(n, complex) and math.isfinite(n) for n in found):
                return
        except (ArithmeticError, ValueError):
            continue
    raise NotCompiledError("numbers of an update are not real for any values tried")
