"""Cut AOTAutograd's joint graph into halves; compile graphs of symbolic sizes.

Each half is a graph of one node, which runs its part of the planned program.
"""

import operator
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from mucudnn.errors import UnsupportedError
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.tensor import TensorSpec
from mucudnn.ir.traits import NodeTraits
from mucudnn.torch.execution.bound_step import Count, Half, Halves
from mucudnn.torch.execution.devices import DEVICES
from mucudnn.torch.internals import mutated_inputs, written_back
from mucudnn.torch.lowering.lower import lower
from mucudnn.torch.lowering.lowered import NOTHING, Call, Layout, Lowered, Operand
from mucudnn.torch.plan_store import graph_key
from mucudnn.torch.source_lines import storage_of

COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
"""Namespaces of operations that wait for other ranks."""

_CHANGED = "changed"
"""Name of the node from which on inputs have other values than in the forward pass."""


@dataclass(frozen=True)
class Joint:
    """AOTAutograd's joint graph."""

    module: torch.fx.GraphModule
    primals: Sequence[torch.fx.Node]
    tangents: Sequence[torch.fx.Node]
    output: torch.fx.Node
    count: Count

    @classmethod
    def of(cls, module: torch.fx.GraphModule, results: int) -> "Joint":
        """Return a joint graph, given the number of results of its forward pass."""
        given = [node for node in module.graph.nodes if node.op == "placeholder"]
        primals = [node for node in given if "tangents" not in node.name]
        tangents = [node for node in given if "tangents" in node.name]
        output = next(node for node in module.graph.nodes if node.op == "output")
        values = [node.meta.get("val") for node in primals]
        tensors = sum(isinstance(value, torch.Tensor) for value in values)
        return cls(module, primals, tangents, output, Count(tensors, results))

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        """Inputs that are not tensors: their values are in the graph."""
        values = [node.meta.get("val") for node in self.primals]
        return tuple(i for i, v in enumerate(values) if not isinstance(v, torch.Tensor))

    def check(self) -> None:
        """Refuse inputs that cannot be planned.

        Raises:
            UnsupportedError: An input is on another device, or has a symbolic size.
        """
        for node in self.module.graph.nodes:
            if getattr(node.target, "namespace", "") in COLLECTIVES:
                # Measuring would run it on this rank alone, and ranks may repeat it
                # in different numbers: they would wait for one another forever.
                raise UnsupportedError(
                    f"{node.name} is a collective of torch.distributed "
                    f"({node.target}), which cannot be measured on one rank; compile "
                    "the module inside the distributed wrapper, or use mt.distribute"
                )
        for node in self.primals:
            value = node.meta.get("val")
            tensor = isinstance(value, torch.Tensor)
            if tensor and value.device.type not in DEVICES:
                raise UnsupportedError(
                    f"{node.name} is on {value.device}; budgets are kept on the CPU "
                    "and on CUDA devices"
                )
            if has_symbols([value]):
                raise UnsupportedError(
                    f"{node.name} has a size that depends on data, {value}; such a "
                    "step cannot be planned"
                )

    def lowered(self, own: Sequence[int]) -> Lowered:
        """Lower the graph; nodes that depend on a tangent are the backward pass.

        `own` are its inputs that are parameters or buffers.
        """
        following = set(self.tangents)
        begun = False
        backward = set()
        for node in self.module.graph.nodes:
            if any(operand in following for operand in node.all_input_nodes):
                following.add(node)
                begun = True
            if begun:
                backward.add(node.name)

        def phase_of(node: str) -> Phase:
            return Phase.BACKWARD if node in backward else Phase.FORWARD

        return self._marked(lower(self.module, phase_of), own)

    def compiled(self, own: Sequence[int], sizes: Any, *, tuned: bool) -> Lowered:
        """Compile the graph by Inductor, and lower it with the kernels as nodes.

        `own` are its inputs that are parameters or buffers.

        Raises:
            NotCompiledError: It cannot be compiled; says why.
        """
        # Inductor is imported where it is used: that takes seconds.
        from mucudnn.torch.inductor.kernel_graph import (
            KernelGraph,
            Passes,
            joined,
            lower_passes,
        )

        results = self.output.args[0]
        nodes = [r for r in results if isinstance(r, torch.fx.Node)]
        made = dict.fromkeys(node for node in nodes if node.op == "call_function")
        before = set(results[: self.count.results])
        graph = self.module.graph
        inputs = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
        tensors = [n for n in inputs if isinstance(tensor_in(n), torch.Tensor)]
        kernels = KernelGraph(tuned, sizes)
        names = lower_passes(
            Passes(
                [n for n in graph.nodes if n.op == "call_function"],
                [n for n in tensors if n not in self.tangents],
                self.tangents,
                [node for node in made if node in before],
                [node for node in made if node not in before],
                frozenset(before).difference(
                    results[i] for i in written_back(self.output)
                ),
                frozenset(self.primals[i] for i in own),
            ),
            kernels,
            {},
        )
        given = [
            node.name if node in tensors else None
            for node in inputs
            if node.op == "placeholder"
        ]
        found = Lowered(
            Graph({}, (), ()),
            kernels.calls,
            kernels.layouts,
            tuple(given),
            tuple(
                names.get(r, r.name) if isinstance(r, torch.fx.Node) else r
                for r in results
            ),
            {n.name: tensor_in(n) for n in tensors if n.op == "get_attr"},
        )
        return self._marked(joined(kernels.tensors, kernels.nodes, found), own)

    def _marked(self, lowered: Lowered, own: Sequence[int]) -> Lowered:
        """Mark mutated inputs and results of the forward pass; copy some gradients."""
        mutated = mutated_inputs(self.output, self.primals)
        values = written_back(self.output)
        found = _remembering(lowered, mutated, values)
        return _staying(found, self.count.results, own)

    def key(self, lowered: Lowered, own: Sequence[int]) -> Hashable:
        """Return what is equal for graphs that can share a program.

        The graph is given lowered. Numbers among its inputs are part of its calls.
        """
        numbers = {self.count.results + i for i in self._numbers}
        results = (r for i, r in enumerate(lowered.results) if i not in numbers)
        inputs = [name for name in lowered.inputs if name is not None]
        plain = replace(lowered, inputs=tuple(inputs), results=tuple(results))
        mine = [name for i in own if (name := lowered.inputs[i]) is not None]
        return self.count, graph_key(plain), tuple(map(inputs.index, mine))

    def split(
        self, halves: Halves
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Return the forward and backward graphs for AOTAutograd.

        Saved values have no metadata among the results of the forward half: AOTAutograd
        would take them for buffers that the backward half may overwrite, and refuse to
        run it twice.
        """
        values = [node.meta.get("val") for node in self.primals]
        mode = next(v.fake_mode for v in values if isinstance(v, torch.Tensor))
        with mode:
            kept = [keeps.like(halves.layouts) for keeps in halves.kept]
        forward = Half(halves.forward, without=self._numbers)
        backward = Half(halves.backward, own=halves.own, filled=self._numbers)
        return self._forward(forward, len(kept)), self._backward(backward, kept)

    def refused(
        self, refuse: Callable[..., Any]
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Return two halves that only raise an error."""
        return self._forward(refuse, 0), self._backward(refuse, [])

    def _forward(self, function: Callable[..., Any], kept: int) -> torch.fx.GraphModule:
        given = [(node.name, dict(node.meta)) for node in self.primals]
        results = [_value(r) for r in self.output.args[0][: self.count.results]]
        return _one_call(self.module, given, [*results, *[_UNSAID] * kept], function)

    def _backward(
        self, function: Callable[..., Any], kept: Sequence[torch.Tensor]
    ) -> torch.fx.GraphModule:
        saved = [(f"kept_{i}", {"val": value}) for i, value in enumerate(kept)]
        tangents = [(node.name, dict(node.meta)) for node in self.tangents]
        results = [_value(r) for r in self.output.args[0][self.count.results :]]
        return _one_call(self.module, [*saved, *tangents], results, function)


_UNSAID = object()
"""Marks a result without metadata."""


def tensor_in(node: torch.fx.Node) -> Any:
    """Return the value of an input: a fake tensor, a constant, or a number."""
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(node.graph.owning_module)
    return node.meta.get("val")


def _value(result: Any) -> Any:
    return result.meta.get("val") if isinstance(result, torch.fx.Node) else result


def _one_call(
    module: torch.fx.GraphModule,
    inputs: Sequence[tuple[str, dict[str, Any]]],
    results: Sequence[Any],
    function: Callable[..., Any],
) -> torch.fx.GraphModule:
    """Return a graph that calls one function with all its inputs."""
    graph = torch.fx.Graph()
    given = []
    for name, meta in inputs:
        node = graph.placeholder(name)
        node.meta = meta
        given.append(node)
    whole = graph.call_function(function, tuple(given))
    outputs: list[Any] = []
    for i, value in enumerate(results):
        if value is None:
            outputs.append(None)
            continue
        node = graph.call_function(operator.getitem, (whole, i))
        if value is not _UNSAID:
            node.meta["val"] = value
        outputs.append(node)
    output = graph.output(tuple(outputs))
    output.meta["desc"] = [None] * len(outputs)
    return torch.fx.GraphModule(module, graph)


def _laid_out(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def _copy_of(
    tensor: str, name: str, layout: Layout, phase: Phase
) -> tuple[Node, TensorSpec, Layout, Call]:
    """Return a node that copies a tensor to strides, its result, and its call."""
    layout = replace(layout, offset=0)
    args = Operand(0), layout.stride
    call = Call(_laid_out, args, MappingProxyType({}), (None,))
    spec = TensorSpec(name, (layout.extent * layout.dtype.itemsize,), "uint8")
    return Node(name, "copy", (tensor,), (name,), phase=phase), spec, layout, call


def _staying(lowered: Lowered, count: int, own: Sequence[int]) -> Lowered:
    """Mark the results of the forward pass; copy gradients that autograd would copy.

    The results belong to the caller: the backward half can neither offload nor
    recompute them, so they count until the end. The mark is on a view of each result,
    not on its node, whose other results are not concerned: a batch norm returns running
    statistics, but its activation may be offloaded.

    Autograd stores the gradient of a parameter as it is, if it has the strides of the
    parameter and is nobody else's. It would copy others behind the backward half.
    """
    graph, results = lowered.graph, list(lowered.results)
    returned = {graph.storages[r] for r in results[:count] if isinstance(r, str)}
    later = (node for node in graph.nodes if node.phase is not Phase.FORWARD)
    again = {graph.storages[t] for node in later for t in node.inputs} & returned
    gradients: dict[Any, list[int]] = {}
    for i in own:
        gradients.setdefault(results[count + i], []).append(i)
    tensors, layouts = dict(graph.tensors), dict(lowered.layouts)
    calls, nodes, outputs = dict(lowered.calls), list[Node](), list(graph.outputs)

    for node in graph.nodes:
        mine = {graph.storages[name] for name in node.outputs}
        fixed = mine <= returned or not mine.isdisjoint(again)
        traits = replace(node.traits, recomputable=node.recomputable and not fixed)
        nodes.append(replace(node, traits=traits))
        for root in (name for name in node.outputs if name in returned):
            name = f"returned.{root}"
            view = NodeTraits(view=True, movable=False, recomputable=False)
            seen = Node(name, "view", (root,), (name,), phase=node.phase, traits=view)
            tensors[name] = replace(tensors[root], name=name, alias=root)
            layouts[name], calls[name] = layouts[root], NOTHING
            nodes.append(seen)
        for gradient in node.outputs:
            for i in gradients.get(gradient, ()):
                at, wanted = layouts[gradient], layouts[str(lowered.inputs[i])]
                strides = zip(at.shape, at.stride, wanted.stride, strict=True)
                laid_out = all(one == other for n, one, other in strides if n != 1)
                if laid_out and results.count(gradient) == 1:
                    continue
                name = results[count + i] = f"{gradient}.of.{lowered.inputs[i]}"
                copied, tensors[name], layouts[name], calls[name] = _copy_of(
                    gradient, name, wanted, node.phase
                )
                nodes.append(copied)
                outputs.append(name)
    outputs = [name for name in outputs if name in results]
    return replace(
        lowered,
        graph=Graph(tensors, tuple(nodes), tuple(outputs)),
        calls=MappingProxyType(calls),
        layouts=MappingProxyType(layouts),
        results=tuple(results),
    )


def _remembering(
    lowered: Lowered, mutated: Sequence[int], values: Sequence[int]
) -> Lowered:
    """Add a node behind the forward pass that writes the mutated inputs.

    Nodes that read these inputs can therefore not be recomputed in the backward pass.
    The node belongs to the forward pass: otherwise the new values could be recomputed
    in the backward pass, too late to be returned. The new values are results, are
    copied to the inputs between the halves, and are freed then unless the model returns
    them as well. The forward half copies the inputs that the backward half reads:
    Inductor recomputes from inputs what the model computed before it changed them.

    `values` are the results that are new values of the `mutated` inputs.
    """
    changed = tuple(
        dict.fromkeys(t for i in mutated if (t := lowered.inputs[i]) is not None)
    )
    if not changed:
        return lowered
    graph = lowered.graph
    results = [(i, r) for i, r in enumerate(lowered.results) if isinstance(r, str)]
    others = {graph.storages[r] for i, r in results if i not in values}
    asked = dict.fromkeys(r for i, r in results if i in values)
    gone = [r for r in asked if r in graph.outputs and graph.storages[r] not in others]
    node = Node(
        _CHANGED, "store", (*changed, *gone), (), phase=Phase.FORWARD, mutates=changed
    )
    forward = [n for n in graph.nodes if n.phase is Phase.FORWARD]
    backward = [n for n in graph.nodes if n.phase is not Phase.FORWARD]
    tensors, layouts = dict(graph.tensors), dict(lowered.layouts)
    calls = {**lowered.calls, _CHANGED: NOTHING}
    before = {}
    read = {t for n in backward for t in n.inputs}
    for t in filter(read.__contains__, changed):
        name = before[t] = f"{t}.before"
        copied, tensors[name], layouts[name], calls[name] = _copy_of(
            t, name, layouts[t], Phase.FORWARD
        )
        forward.append(copied)
    backward = [
        replace(n, inputs=tuple(before.get(t, t) for t in n.inputs)) for n in backward
    ]
    outputs = tuple(name for name in graph.outputs if name not in gone)
    found = Graph(tensors, (*forward, node, *backward), outputs)
    return replace(lowered, graph=found, calls=calls, layouts=layouts)


# Graphs of symbolic sizes: compiled once for every combination of sizes.
#
# `torch.compile` replaces a size by a symbol when a second value occurs, so that it
# need not trace the model again. A plan is for concrete sizes. The traced graph is
# therefore kept, and planned anew for the sizes of each call.


_MOST = 64
"""Most plans of one graph: with more, an input is probably a number that counts up."""


def has_symbols(inputs: Sequence[Any]) -> bool:
    """Return whether a size, or a number, among a graph's inputs is a symbol."""
    return any(_is_symbolic(value) for value in inputs)


class BySize:
    """A graph that is compiled for each combination of sizes at its first call.

    Some operations need Python numbers that Dynamo made symbolic, as rates of dropout.
    If one is found, the graph is compiled for each value of its numbers, too.

    Args:
        module: The graph.
        inputs: Examples, with symbolic sizes.
        compile_for: Compiles the graph for concrete inputs, given a text of the sizes.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        compile_for: Callable[[Sequence[Any], str], Callable[..., Any]],
    ) -> None:
        self._module = module
        self._places = [i for i, value in enumerate(inputs) if _is_symbolic(value)]
        self._numbers: dict[int, torch.fx.Node] = {}
        self._compile_for = compile_for
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, *given: Any) -> Any:
        """Run the graph.

        Raises:
            UnsupportedError: There are too many combinations of sizes.
        """
        run = self._compiled.get(self._key(given))
        if run is None:
            with self._lock:
                run = self._compiled.get(self._key(given)) or self._new(given)
        return run(*given)

    def _key(self, given: Sequence[Any]) -> Any:
        numbers = tuple([given[i].item() for i in self._numbers])
        return _layouts([given[i] for i in self._places]), numbers

    def _new(self, given: Sequence[Any]) -> Callable[..., Any]:
        numbers = {i: given[i].item() for i in self._numbers}
        said = _said([*map(given.__getitem__, self._places), *numbers.values()])
        if len(self._compiled) >= _MOST:
            raise UnsupportedError(
                f"this graph was planned for {_MOST} input signatures, and now there "
                f"are {said}; pad batches to a few sizes, and pass numbers that change "
                "between calls as tensors"
            )
        for i, value in numbers.items():  # in place of `item()` of the input
            node = self._numbers[i]
            node.op, node.target, node.args = "call_function", type(value), (value,)
        try:
            run = self._compile_for(given, said)
        except GuardOnDataDependentSymNode:
            if numbers or not (found := _numbers_read(self._module)):
                raise
            self._numbers = found
            return self._new(given)
        self._compiled[self._key(given)] = run
        return run


def _numbers_read(module: torch.fx.GraphModule) -> dict[int, torch.fx.Node]:
    """Return the inputs that are only read as Python numbers, and where they are."""
    users = [list(n.users) for n in module.graph.find_nodes(op="placeholder")]
    return {
        i: user
        for i, [user] in (
            (i, found) for i, found in enumerate(users) if len(found) == 1
        )
        if (user.op, user.target) == ("call_method", "item")
    }


def _said(values: Sequence[Any]) -> str:
    """Return the distinct sizes and numbers as text."""
    texts: Mapping[str, None] = dict.fromkeys(
        "x".join(map(str, v.shape)) if isinstance(v, torch.Tensor) else str(v)
        for v in values
    )
    return ", ".join(texts)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        numbers = (*value.shape, *value.stride())
        return any(isinstance(number, torch.SymInt) for number in numbers)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _layouts(values: Sequence[Any]) -> Any:
    """Return a key of the inputs' shapes, strides and shared storages."""
    first: dict[int, int] = {}
    return tuple(
        [
            (
                value.shape,
                value.stride(),
                first.setdefault(storage_of(value), i),
            )
            if isinstance(value, torch.Tensor)
            else value
            for i, value in enumerate(values)
        ]
    )
