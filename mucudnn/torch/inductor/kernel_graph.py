"""Kernels of a compiled step as the nodes of a lowered graph.

`lower_passes` compiles the passes of a step. `lower_step` takes those of a captured
training step, whose update stays operation by operation, each behind its gradient.
`capture.joint` takes those of AOTAutograd's joint graph, which has no update.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from torch._inductor import config
from torch.utils import _pytree as pytree

from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.ir.traits import NodeTraits
from mucudnn.torch.capture.joint import tensor_in
from mucudnn.torch.capture.step import CapturedStep
from mucudnn.torch.distributed.sharding import in_use_order
from mucudnn.torch.inductor.compiling import (
    CompiledStep,
    check_compiler,
    compile_joint,
    traced_joint,
)
from mucudnn.torch.inductor.in_place import candidates, keeps_bits
from mucudnn.torch.inductor.sizes import CompiledSizes, Sizes
from mucudnn.torch.inductor.update import compile_updates
from mucudnn.torch.inductor.wrapper_text import (
    KernelLine,
    define,
    read_wrapper,
    returns_view,
)
from mucudnn.torch.internals import float32_precisions
from mucudnn.torch.lowering.lower import lower
from mucudnn.torch.lowering.lowered import (
    Call,
    Layout,
    Lowered,
    NotCompiledError,
    Operand,
    Sample,
)
from mucudnn.torch.source_lines import storage_of

_SAME = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})

_SMALL_INTEGERS = torch.int8, torch.int32  # of places in windows, of pivots

_VIEWS: Mapping[str, Any] = {
    "torch": torch,
    "aten": torch.ops.aten,
    "reinterpret_tensor": torch._C._dynamo.guards._reinterpret_tensor,
}
"""What results that are views are written with."""

_NUMBERS = torch.SymInt, torch.SymFloat, torch.SymBool

_ALIGNED = 16
"""Bytes to a multiple of which kernels for CUDA expect parameters to be aligned."""


@dataclass
class KernelGraph:
    """Nodes of a compiled step.

    Attributes:
        tensors: Tensors by name.
        layouts: Their layouts.
        nodes: Nodes in the order of the wrappers' lines.
        calls: Call of each node.
        tuned: Whether a tuner may plan convolutions, which are calls of PyTorch's then:
            one for the gradient of images, one for those of parameters.
        compiled: Passes that were compiled before.
    """

    tuned: bool = False
    compiled: CompiledSizes = field(default_factory=CompiledSizes)
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)
    _seen: dict[Any, Any] = field(default_factory=dict)
    _steps: int = 0
    _computed: dict[str, Sample] = field(default_factory=dict)

    def add_step(
        self, step: CompiledStep, inputs: Mapping[str, str], sizes: Mapping[str, int]
    ) -> tuple[list[str | None], list[str | None]]:
        """Add the lines of both halves; return the results of each pass.

        Args:
            step: The compiled step.
            inputs: Name of each input of the joint graph -> its tensor here, or a size.
            sizes: Value of each symbol.

        Raises:
            NotCompiledError: A line is not known.
        """
        given = [inputs[name] for name in step.forward.inputs]
        number = str(self._steps or "")
        self._steps += 1
        forward = read_wrapper(step.forward, f"f{number}_", given, sizes)
        values = dict(inputs)
        results = zip(step.forward.outputs, forward.results, strict=True)
        values.update((name, text) for name, text in results if name is not None)
        given = [values[name] for name in step.backward.inputs]
        backward = read_wrapper(step.backward, f"b{number}_", given, sizes)
        changed = {v for w in (forward, backward) for n in w.lines for v in n.changes}
        for line in forward.lines:
            self._add(line, Phase.FORWARD, changed)
        first = [  # views among them belong before the backward half
            self._result(r, Phase.FORWARD) for r in forward.results[: step.results]
        ]
        for line in backward.lines:
            self._add(line, Phase.BACKWARD, changed)
        return first, [self._result(r, Phase.BACKWARD) for r in backward.results]

    def _add(self, line: KernelLine, phase: Phase, changed: set[str]) -> None:
        """Add a line as a node."""
        name = f"{'fb'[phase is Phase.BACKWARD]}{len(self.nodes)}.{line.name}"
        for value in line.operands:
            if value not in self.tensors:  # read before anything is written to it
                raise _unknown_result(value)
        sizes = {v: self.tensors[v].nbytes for v in line.operands}
        if any(self.tensors[v].role is Role.STATE for v in line.changes):
            raise NotCompiledError(f"kernel {line.name} of Inductor writes to an input")
        layouts = {**line.layouts}
        sizes |= {v: at.extent * at.dtype.itemsize for v, at in layouts.items()}
        if len(layouts) < len(line.results):
            for value, (layout, nbytes) in self._seen_results(line).items():
                layouts[value], sizes[value] = layout, nbytes
        overwrites: tuple[int, ...] = ()
        if not changed.intersection((*line.operands, *line.results)):
            line, overwrites = self._overwriting(line, sizes)
        for i, value in enumerate(line.results):
            self.tensors[value] = TensorSpec(
                value, (sizes[value],), "uint8", Role.ACTIVATION
            )
            layout = self.layouts[value] = layouts[value]
            if layout.dtype in _SMALL_INTEGERS and value not in changed:
                given = tuple(map(self._sample, line.operands))
                self._computed[value] = Sample(layout, line.function, given, i)
        traits = NodeTraits(
            overwrites=overwrites,
            expensive=line.heavy,
            random=line.random,
            recomputable=line.pure
            and phase is Phase.FORWARD
            and changed.isdisjoint(line.results),
            # What several kernels write parts of leaves behind its last forward use.
            movable=phase is Phase.FORWARD or changed.isdisjoint(line.results),
        )
        for suffix, call, results in self._calls(line, bool(overwrites)):
            self.calls[name + suffix] = call
            self.nodes.append(
                Node(
                    name + suffix,
                    line.name,
                    tuple(line.operands),
                    tuple(results),
                    phase=phase,
                    mutates=tuple(line.changes),
                    traits=traits,
                )
            )

    def _calls(
        self, line: KernelLine, in_place: bool
    ) -> Iterator[tuple[str, Call, Sequence[str]]]:
        """Yield the calls of a line, each with a suffix of its name and its results."""
        convolution = line.convolution
        if convolution is not None and self.tuned:
            made = dict(zip(convolution.results, line.results, strict=True))
            if None in made:
                yield "", convolution, line.results
            for suffix, group in ((".images", (0,)), (".filters", (1, 2))):
                if mine := tuple(path for path in made if path in group):
                    mask = [i in mine for i in range(3)]
                    args = (*convolution.args[:-1], mask)
                    call = replace(convolution, args=args, results=mine)
                    yield suffix, call, [made[path] for path in mine]
            return
        single = len(line.results) == 1
        call = Call(
            line.function,
            tuple(map(Operand, range(len(line.operands)))),
            {},
            (None,) if single else tuple(range(len(line.results))),
            random=line.random,
            into=line.into if in_place else None,
            samples={
                i: self._computed[value]
                for i, value in enumerate(line.operands)
                # A check of a factorization passes for zeros, not for drawn matrices.
                if value in self._computed and (line.results or line.changes)
            },
        )
        yield "", call, line.results

    def _seen_results(self, line: KernelLine) -> dict[str, tuple[Layout, int]]:
        """Return layouts and bytes of results that a function of PyTorch's allocates.

        Raises:
            NotCompiledError: A result shares memory with an operand or another result,
                or is made in training only, as the workspace of an LSTM.
        """
        key = line.function, *(self.layouts[v] for v in line.operands)
        if key not in self._seen:
            # Weights, rates and deviations to draw by are not negative.
            given = self._samples(line, least=0)
            with torch.no_grad():
                found = line.function(*given)
            found = found if isinstance(found, tuple) else (found,)
            storages = {storage_of(t) for t in given}
            for tensor in found:
                if tensor is None:
                    raise NotCompiledError(
                        f"kernel {line.name} of Inductor returns no tensor"
                    )
                if storage_of(tensor) in storages:
                    raise NotCompiledError(
                        f"kernel {line.name} of Inductor returns a view"
                    )
                storages.add(storage_of(tensor))
            self._seen[key] = [
                (Layout.of(t), t.untyped_storage().nbytes()) for t in found
            ]
        return dict(zip(line.results, self._seen[key], strict=True))

    def _overwriting(
        self, line: KernelLine, sizes: dict[str, int]
    ) -> tuple[KernelLine, tuple[int, ...]]:
        """Return a line whose first result may overwrite operands, and which."""
        for result in sorted(line.layouts, key=lambda v: -sizes[v]):
            found = [
                operand
                for operand in candidates(line, result, self.layouts, sizes)
                if self.tensors[operand].role is not Role.STATE
            ]
            if not found:
                continue
            line = line.with_first(result)
            key = line.into, tuple(self.layouts[v] for v in line.operands)
            if key not in self._seen:
                given = self._samples(line)
                self._seen[key] = {
                    i
                    for i, v in enumerate(line.operands)
                    if v in found and keeps_bits(line, v, given)
                }
            equal: set[int] = self._seen[key]
            places = [i for i, v in enumerate(line.operands) if v in found]
            return line, tuple(i for i in places if i in equal)
        return line, ()

    def _samples(self, line: KernelLine, least: int = -1) -> list[torch.Tensor]:
        """Return tensors like a line's operands."""
        generator = torch.Generator().manual_seed(0)
        return [self._sample(v).tensor(generator, least) for v in line.operands]

    def _sample(self, value: str) -> Sample:
        return self._computed.get(value) or Sample(self.layouts[value])

    def _result(self, expression: str, phase: Phase) -> str | None:
        """Return the tensor of a result; add a view if the result is one."""
        if expression == "None":
            return None
        if expression in self.tensors:
            return expression
        try:
            (of,) = {w for w in re.findall(r"\w+", expression) if w in self.tensors}
            body = re.sub(rf"\b{of}\b", "a0", expression)
            view = define(["a0"], [f"return {body}"], dict(_VIEWS), None)
            base = self.layouts[of]
            flat = torch.empty(base.extent, dtype=base.dtype, device="meta")
            whole = flat.as_strided(base.shape, base.stride, base.offset)
            layout = replace(Layout.of(view(whole)), device=base.device)
        except Exception as e:
            raise _unknown_result(expression) from e
        name = f"{of}_view{len(self.nodes)}"  # a word in other wrappers
        self.tensors[name] = TensorSpec(
            name, self.tensors[of].shape, "uint8", self.tensors[of].role, of
        )
        self.layouts[name] = layout
        self.calls[name] = Call(view, (Operand(0),), {}, (None,))
        self.nodes.append(
            Node(
                name, "view", (of,), (name,), phase=phase, traits=NodeTraits(view=True)
            )
        )
        return name


def _unknown_result(expression: str) -> NotCompiledError:
    return NotCompiledError(
        f"the reader of Inductor's wrapper does not know this result: {expression}"
    )


@dataclass(frozen=True)
class Passes:
    """The operations of a forward and a backward pass.

    Attributes:
        nodes: Operations, in order.
        inputs: Placeholders and constants that they read, other than gradients.
        gradients: Nodes whose values are the gradients that the backward pass begins
            with.
        forward: Results of the forward pass.
        backward: Results of the backward pass.
        visible: Forward results that the user gets, with the strides of eager mode.
        static: Inputs that are parameters or buffers.
    """

    nodes: Sequence[torch.fx.Node]
    inputs: Sequence[torch.fx.Node]
    gradients: Sequence[torch.fx.Node]
    forward: Sequence[torch.fx.Node]
    backward: Sequence[torch.fx.Node]
    visible: frozenset[torch.fx.Node]
    static: frozenset[torch.fx.Node]

    def run(self, given: Sequence[torch.Tensor], numbers: Iterator[Any]) -> list[Any]:
        """Run both passes on tensors in the place of inputs and gradients.

        `numbers` are those that `written` returns of operations, or symbols.
        """
        first = (*self.inputs, *self.gradients)
        values: dict[torch.fx.Node, Any] = dict(zip(first, given, strict=True))
        for node in self.nodes:
            leaves, tree = self._leaves(node)
            for i, leaf in enumerate(leaves):
                if type(leaf) is int:
                    leaves[i] = next(numbers)
                elif isinstance(leaf, torch.fx.Node):
                    leaves[i] = values[leaf]
                    if _is_number(leaf) and not _is_number(node):
                        leaves[i] = values[leaf].to(node.meta["val"].dtype)
            args, kwargs = pytree.tree_unflatten(leaves, tree)
            function = node.target
            if function is torch.ops.aten.view.default:
                # Decompositions may have other strides than kernels of eager mode.
                function = torch.ops.aten.reshape.default
            elif function is torch.ops.aten._local_scalar_dense.default and (
                _is_number(node)
            ):
                function = torch.Tensor.double  # computed with as Python does
            values[node] = function(*args, **kwargs)
        return [values[node] for node in (*self.forward, *self.backward)]

    def written(self, layouts: Sequence[Layout]) -> tuple[Any, list[int], int]:
        """Return what was compiled if it is equal: operations, and their numbers.

        First all but numbers; then numbers, with those of layouts first; and how many
        of the first ones are sizes of inputs.
        """
        nodes = (*self.inputs, *self.gradients, *self.nodes)
        places = {node: f"%{i}" for i, node in enumerate(nodes)}
        numbers = [n for layout in layouts for n in layout.shape]
        axes = len(numbers)
        for layout in layouts:
            numbers += [*layout.stride, layout.offset]
        operations = []
        for node in self.nodes:
            leaves, tree = self._leaves(node)
            numbers += [leaf for leaf in leaves if type(leaf) is int]
            words = [
                places.get(leaf, leaf)
                if isinstance(leaf, torch.fx.Node)
                else int
                if type(leaf) is int
                else leaf
                for leaf in leaves
            ]
            operations.append((node.target, repr(words), repr(tree)))
        form = (
            *(replace(at, shape=(), stride=(), offset=len(at.shape)) for at in layouts),
            tuple(map(places.__getitem__, self.forward)),
            tuple(map(places.__getitem__, self.backward)),
            tuple(places[n] for n in nodes if n in self.visible),
            tuple(places[n] for n in nodes if n in self.static),
            *operations,
            # What kernels are chosen by, beside operations.
            float32_precisions(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
        )
        return form, numbers, axes

    def _leaves(self, node: torch.fx.Node) -> tuple[list[Any], Any]:
        """Return the arguments of a node, with values of nodes that are no operands."""
        leaves, tree = pytree.tree_flatten((node.args, dict(node.kwargs)))
        members = self._members
        return [
            leaf.meta["val"]
            if isinstance(leaf, torch.fx.Node) and leaf not in members
            else leaf
            for leaf in leaves
        ], tree

    @cached_property
    def _members(self) -> frozenset[torch.fx.Node]:
        return frozenset((*self.inputs, *self.gradients, *self.nodes))


def lower_passes(
    passes: Passes, graph: KernelGraph, made: Mapping[torch.fx.Node, str]
) -> dict[torch.fx.Node, str]:
    """Compile two passes and add their kernels; return the tensor of each result.

    `made` has the tensors of results of passes that were added before.

    Raises:
        NotCompiledError: They cannot be compiled; says why.
    """
    first = (*passes.inputs, *passes.gradients)
    layouts = [
        graph.layouts[made[n]] if n in made else Layout.of(tensor_of(n)) for n in first
    ]
    for device in {layout.device for layout in layouts}:
        check_compiler(device)
    for node, layout in zip(first, layouts, strict=True):
        start = layout.offset * layout.dtype.itemsize
        if node in passes.static and layout.device.type == "cuda" and start % _ALIGNED:
            raise NotCompiledError(
                f"a parameter or buffer ({node.name}) begins {start} bytes into its "
                f"storage, which is not a multiple of {_ALIGNED}; clone it"
            )
    form, numbers, axes = passes.written(layouts)

    def compiled(at: Sizes) -> CompiledStep:
        def layouts_at(symbols: Sequence[Any]) -> list[Layout]:
            every = list(at.numbers(symbols))
            shapes, others = iter(every[:axes]), iter(every[axes:])
            return [
                replace(
                    layout,
                    shape=tuple(islice(shapes, len(layout.shape))),
                    stride=tuple(islice(others, len(layout.shape))),
                    offset=next(others),
                )
                for layout in layouts
            ]

        def run(*given: Any) -> list[Any]:
            symbols, tensors = given[: len(at.places)], given[len(at.places) :]
            behind = axes + sum(1 + len(layout.shape) for layout in layouts)
            return passes.run(tensors, islice(at.numbers(symbols), behind, None))

        joint = traced_joint(run, layouts_at, len(passes.gradients), at.example)
        count = len(at.places)
        return compile_joint(
            joint,
            len(passes.forward),
            [i for i, node in enumerate(passes.forward) if node in passes.visible],
            [i + count for i, n in enumerate(passes.inputs) if n in passes.static],
        )

    step, sizes = graph.compiled.find(form, numbers, axes, compiled)
    for node, layout in zip(first, layouts, strict=True):
        if node not in made and node.name not in graph.tensors:
            nbytes = int(tensor_of(node).untyped_storage().nbytes())
            spec = TensorSpec(node.name, (nbytes,), "uint8", Role.STATE)
            graph.tensors[node.name], graph.layouts[node.name] = spec, layout
    tensors = (made.get(node, node.name) for node in first)
    inputs = dict(zip(step.names, (*map(str, sizes), *tensors), strict=True))
    values = dict(zip(map(str, step.symbols), sizes, strict=True))
    count = len(graph.nodes)
    try:
        forward, backward = graph.add_step(step, inputs, values)
    except NotCompiledError as e:
        if not sizes:
            raise
        del graph.nodes[count:]
        graph.compiled.refuse(form, str(e))
        return lower_passes(passes, graph, made)
    results = zip(
        (*passes.forward, *passes.backward), (*forward, *backward), strict=True
    )
    return {node: name for node, name in results if name is not None}


def tensor_of(node: torch.fx.Node) -> torch.Tensor:
    """Return the fake tensor of a node, or a constant.

    Raises:
        NotCompiledError: It is no tensor.
    """
    value = tensor_in(node)
    if not isinstance(value, torch.Tensor):
        raise NotCompiledError(f"an input is not a tensor ({node.name})")
    return value


# A captured step: its passes become kernels, its update stays as it is.


def lower_step(
    captured: CapturedStep, own: int, sizes: CompiledSizes, *, tuned: bool
) -> Lowered:
    """Compile a captured step's passes, and lower it with their kernels as nodes.

    `own` is the number of its first placeholders that are parameters and buffers. A
    `tuned` step may have its convolutions planned by a tuner.

    Raises:
        NotCompiledError: It cannot be compiled; says why.
    """
    kernels, made = KernelGraph(tuned, sizes), dict[torch.fx.Node, str]()
    passes = _passes_of(captured, own)
    # A step of eager mode's operations draws its random numbers, in its order.
    draws = {} if captured.as_compiled else {"fallback_random": True}
    with config.patch(draws):
        for both in passes:
            made.update(lower_passes(both, kernels, made))
            # The gradient of a parameter that is added to the loss, too.
            seeds = (n for n in both.gradients if not n.users.keys() <= {*both.nodes})
            made.update((seed, seed.name) for seed in seeds)
    gathered = list(
        dict.fromkeys(
            node
            for both in passes
            for node in both.inputs
            if node.name in captured.exchanges
        )
    )
    module = _rest(captured, passes, made, kernels, gathered)
    rest = lower(module, partial(_phase_of_rest, captured))
    results, ahead = rest.results[len(gathered) :], rest.results[: len(gathered)]
    count = len(captured.names)
    if captured.sharding is None or captured.sharding.is_even:
        # Uneven parts of a parameter may be compiled on some ranks and not on others.
        rest = compile_updates(
            rest,
            rest.inputs[:count],
            captured.backward | captured.exchanges,
            sizes,
        )
    # One graph of both. Results of the passes are inputs of the rest, and two
    # placeholders may be one tensor.
    names = [node.name for node in captured.module.graph.find_nodes(op="placeholder")]
    equal = [*zip(names, rest.inputs, strict=False)]
    equal += zip(rest.inputs[count:], made.values(), strict=True)
    equal += ((node.name, name) for node, name in zip(gathered, ahead, strict=True))
    renamed = {
        given: name
        for given, name in equal
        if given != name and None not in (given, name)
    }

    def named(name: Any) -> Any:
        return renamed.get(name, name) if isinstance(name, str) else name

    tensors = {
        name: replace(spec, alias=named(spec.alias))
        for name, spec in {**kernels.tensors, **rest.graph.tensors}.items()
        if name not in renamed
    }
    nodes = [
        replace(
            node,
            inputs=tuple(map(named, node.inputs)),
            mutates=tuple(map(named, node.mutates)),
        )
        for node in (*kernels.nodes, *rest.graph.nodes)
    ]
    nodes = _exchanged_in_time(nodes, captured)
    constants = {
        node.name: tensor_of(node)
        for both in passes
        for node in both.inputs
        if node.op == "get_attr"
    }
    for name in (node.name for both in passes for node in both.gradients):
        at = kernels.layouts[name]
        constants[name] = torch.ones(at.shape, dtype=at.dtype, device=at.device)
    return joined(
        tensors,
        nodes,
        Lowered(
            rest.graph,
            {**kernels.calls, **rest.calls},
            {**kernels.layouts, **rest.layouts},
            tuple(rest.inputs[:count]),
            tuple(map(named, results)),
            {**rest.constants, **constants},
        ),
    )


def _phase_of_rest(captured: CapturedStep, node: str) -> Phase:
    """Return the phase of a node outside of the passes."""
    if node not in captured.exchanges:
        return Phase.UPDATE
    return Phase.BACKWARD if node in captured.backward else Phase.FORWARD


def _exchanged_in_time(nodes: Sequence[Node], captured: CapturedStep) -> list[Node]:
    """Move gathers right before the kernels that read them, and sums behind others."""
    made = {name: node.name for node in nodes for name in node.outputs}
    edges = [(made[t], n.name) for n in nodes for t in n.inputs if t in made]
    moving = {n.name for n in nodes} & captured.exchanges
    sums = moving & captured.backward
    return in_use_order(nodes, edges, moving - sums, sums)


def joined(
    tensors: Mapping[str, TensorSpec], nodes: Sequence[Node], lowered: Lowered
) -> Lowered:
    """Return a lowered step with these nodes, and the tensors that they have."""
    inputs = {name for name in lowered.inputs if name is not None}
    produced = {name for node in nodes for name in node.outputs}
    used = produced | inputs | set(lowered.constants)
    outputs = (r for r in lowered.results if isinstance(r, str) and r in produced)
    return replace(
        lowered,
        graph=Graph(
            {n: s for n, s in tensors.items() if n in used},
            tuple(nodes),
            tuple(dict.fromkeys(outputs)),
        ),
        layouts={n: at for n, at in lowered.layouts.items() if n in used},
    )


def _passes_of(captured: CapturedStep, own: int) -> list[Passes]:
    """Find the forward and backward passes of a captured step, in order.

    There are several of each where gradients are accumulated; equal pairs are compiled
    once. Sums of their gradients stay operations, as in a loop over a compiled model:
    compiled, a product and a sum would become one product that rounds otherwise.
    """
    graph = captured.module.graph
    members = {
        node
        for node in graph.nodes
        if node.name in captured.forward or node.name in captured.backward
    }
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not members.isdisjoint(node.users):
            members.add(node)  # before the forward pass
    decided: set[torch.fx.Node] = set()  # numbers that only Python has used
    for node in reversed(graph.nodes):
        if isinstance(node.meta.get("val"), _NUMBERS) and decided.issuperset(
            node.users
        ):
            decided.add(node)
    members = {n for n in members - decided if n.name not in captured.exchanges}
    nodes = [n for n in graph.nodes if n in members and n.op == "call_function"]
    # Views of inputs, and numbers from them, are part of every pair that reads them.
    views: set[torch.fx.Node] = set()
    for node in nodes:
        parts = node.all_input_nodes
        free = all(n.op != "call_function" or n in views for n in parts)
        if free and (returns_view(node.target) or _is_number(node)):
            views.add(node)
        elif isinstance(node.meta.get("val"), _NUMBERS):
            raise NotCompiledError(
                f"the passes read a number that changes from step to step ({node.name})"
            )
    pairs: list[list[torch.fx.Node]] = []
    behind = True
    first: dict[torch.fx.Node, int] = {}
    exchanges = {node for node in graph.nodes if node.name in captured.exchanges}
    sums = {node for node in exchanges if node.name in captured.backward}
    for node in nodes:
        if node in views:
            continue
        was, behind = behind, node.name in captured.backward
        if was and not behind:
            pairs.append([])
        i = len(pairs)
        if not pairs:
            raise NotCompiledError("the backward pass comes first")
        parts = node.all_input_nodes
        if behind and any(n in sums or first.get(n, i) < i for n in parts):
            sums.add(node)
            continue
        pairs[-1].append(node)
        if behind:
            first[node] = i
    output = graph.output_node()
    placeholders = graph.find_nodes(op="placeholder")
    count = len(output.args[0]) - len(placeholders)
    visible = frozenset(pytree.tree_leaves(output.args[0][:count]))
    static = frozenset(placeholders[:own])
    outside = {n for n in graph.nodes if n not in members or n in sums}
    found: list[Passes] = []
    known = exchanges - sums  # gathered ahead of all passes
    for i, pair in enumerate(pairs):
        seed = next((n for n in pair if n.name in captured.backward), None)
        if seed is None or seed.target is not torch.ops.aten.ones_like.default:
            raise NotCompiledError("the backward pass does not begin at the loss")
        mine = set(pair)
        for node in reversed(nodes):
            needed = not mine.isdisjoint(node.users)
            if node in views and (needed or (not i and outside & node.users.keys())):
                mine.add(node)
        both = [node for node in nodes if node in mine and node is not seed]
        read = [
            node
            for node in both
            if isinstance(node.meta.get("val"), torch.Tensor)
            and any(
                user in outside or (user not in mine and node not in views)
                for user in node.users
            )
            and not (i and node in views)
        ]
        # A detached loss is recorded behind the backward pass, but is known before.
        before = {node for node in both if node.name not in captured.backward}
        for node in both:
            if node.target in _SAME and node.args[0] in before:
                before.add(node)
        users = mine - {seed}
        inputs = [
            node
            for node in graph.nodes
            if node not in mine and not users.isdisjoint(node.users)
        ]
        if any(n.op == "call_function" and n not in known for n in inputs):
            raise NotCompiledError("a pass reads a sum of gradients")
        known.update(read)
        found.append(
            Passes(
                both,
                inputs,
                [seed],
                [node for node in read if node in before],
                [node for node in read if node not in before],
                visible,
                static,
            )
        )
    return found


def _is_number(node: torch.fx.Node) -> bool:
    """Return whether a node is a number that kernels can read from a tensor.

    It has 64 bits, and kernels for the CPU that compute in fewer than 32 round it late.
    """
    if not isinstance(node.meta.get("val"), torch.SymFloat):
        return False
    results = [user.meta.get("val", node) for user in node.users]
    return all(
        v.dtype in (torch.float32, torch.float64) and v.device.type == "cpu"
        if isinstance(v, torch.Tensor)
        else isinstance(v, _NUMBERS)
        for v in results
    )


def _can_view(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Return whether a tensor has another shape without a copy."""
    try:
        tensor.view(shape)
    except (RuntimeError, ValueError):
        return False
    return True


def _rest(
    captured: CapturedStep,
    passes: Sequence[Passes],
    made: Mapping[torch.fx.Node, str],
    kernels: KernelGraph,
    gathered: Sequence[torch.fx.Node],
) -> torch.fx.GraphModule:
    """Return the step without its passes, whose results are its last inputs.

    Its first results are those that the passes need of it. Values are computed again:
    gradients have the strides that Inductor chose.
    """
    nodes = captured.module.graph.nodes
    placeholders = captured.module.graph.find_nodes(op="placeholder")
    fakes = (node.meta.get("val") for node in placeholders)
    mode = next(value.fake_mode for value in fakes if isinstance(value, torch.Tensor))
    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    values: dict[torch.fx.Node, Any] = {}
    every = (n for both in passes for n in (*both.nodes, *both.gradients))
    skipped = {node for node in every if not _is_number(node)}
    for node in reversed(nodes):
        unread = node not in gathered and skipped.issuperset(node.users)
        if unread and (returns_view(node.target) or _is_number(node)):
            skipped.add(node)  # nothing else reads it
    for node in (*placeholders, *made):
        value = node.meta.get("val")
        if node in made:
            layout, spec = kernels.layouts[made[node]], kernels.tensors[made[node]]
            with mode:
                whole = torch.empty(
                    spec.nbytes, dtype=torch.uint8, device=layout.device
                )
                flat = whole.view(layout.dtype)
                value = flat.as_strided(layout.shape, layout.stride, layout.offset)
        copied[node] = graph.placeholder(node.name)
        copied[node].meta["val"] = values[node] = value
    for node in nodes:
        if node in copied or node in skipped:
            continue
        if node.op == "output":
            results = torch.fx.map_arg(node.args[0], copied.__getitem__)
            graph.output([*map(copied.__getitem__, gathered), *results])
            continue
        copied[node] = graph.node_copy(node, copied.__getitem__)
        value = node.meta.get("val")
        leaves = pytree.tree_leaves(value)
        if node.op == "call_function" and any(
            isinstance(leaf, torch.Tensor) for leaf in leaves
        ):
            args, kwargs = torch.fx.map_arg(
                (node.args, dict(node.kwargs)), values.__getitem__
            )
            function = node.target
            if function is torch.ops.aten.view.default and not _can_view(*args):
                function = copied[node].target = torch.ops.aten._reshape_copy.default
            with mode, torch.no_grad():
                value = function(*args, **kwargs)
        elif node.op == "get_attr":
            value = tensor_of(node)
        copied[node].meta = {**node.meta, "val": value}
        values[node] = value
    return torch.fx.GraphModule(captured.module, graph)
