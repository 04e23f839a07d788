"""Lower PyTorch's graph of a step to a `Graph`, with a call for each node.

Memory is made of storages, counted in bytes: a tensor that shares one is a view of
another tensor. Tuples are taken apart: a node has as many outputs as tensors. Numbers
that are computed on the way are no nodes; whatever uses them computes them.

Every node says by its traits what the planner has to know of it: whether it is a view,
a product, random, or may overwrite operands.
"""

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from mucudnn.errors import UnsupportedError
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.ir.traits import NodeTraits
from mucudnn.torch.lowering.lowered import Call, Layout, Lowered, Number, Operand
from mucudnn.torch.lowering.overloads import (
    as_laid_out,
    corrected,
    in_place_variant,
    statistics_types,
    without_masked,
    without_unread,
)
from mucudnn.torch.source_lines import line_of_stack, storage_of

CHECKS = frozenset(
    {
        torch.ops.aten._assert_async.default,
        torch.ops.aten._assert_async.msg,
        torch.ops.aten._linalg_check_errors.default,
    }
)
"""Operations without results that raise by values: they stay where they are."""


_SAME = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
"""Operations whose result is their operand."""


_IGNORED = frozenset({"profiler"})
"""Namespaces of operations that compute nothing."""


_SCALARS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {torch.ops.aten._local_scalar_dense.default: torch.Tensor.item}
)
"""Operations whose results are numbers, as functions of tensors."""


def lower(module: torch.fx.GraphModule, phase_of: Callable[[str], Phase]) -> Lowered:
    """Lower a functional graph of PyTorch's operations.

    Args:
        module: Its nodes have their results' metadata as `val`.
        phase_of: Node -> the part of the step it belongs to.

    Raises:
        UnsupportedError: It has sizes that depend on data, or an operation that changes
            its operands.
    """
    lowering = _Lowering(module, phase_of)
    for node in module.graph.nodes:
        lowering.visit(node)
    return lowering.result()


class _Lowering:
    def __init__(
        self, module: torch.fx.GraphModule, phase_of: Callable[[str], Phase]
    ) -> None:
        self._module = module
        self._phase_of = phase_of
        self._tensors: dict[str, TensorSpec] = {}
        self._nodes: list[Node] = []
        self._calls: dict[str, Call] = {}
        self._layouts: dict[str, Layout] = {}
        self._owners: dict[int, str] = {}
        self._values: dict[torch.fx.Node, Any] = {}
        self._inputs: list[str | None] = []
        self._constants: dict[str, torch.Tensor] = {}
        self._results: tuple[Any, ...] = ()
        self._held: list[Any] = []

    def visit(self, node: torch.fx.Node) -> None:
        """Lower one node."""
        match node.op:
            case "placeholder":
                self._placeholder(node)
            case "get_attr":
                self._constant(node)
            case "output":
                flat = node.args[0]
                self._results = tuple(pytree.tree_leaves(self._resolved(flat)))
            case _ if node.target is operator.getitem:
                whole = self._values[node.args[0]]
                self._values[node] = whole[node.args[1]]
            case _ if node.target in _SAME:
                self._values[node] = self._values[node.args[0]]
            case _ if getattr(node.target, "namespace", None) in _IGNORED:
                pass
            case _:
                self._operation(node)

    def result(self) -> Lowered:
        """What has been lowered, without what nobody reads."""
        made = {name for node in self._nodes for name in node.outputs}
        asked = tuple(
            dict.fromkeys(
                value.name
                for value in self._results
                if isinstance(value, Value) and value.name in made
            )
        )
        kept = _needed(self._nodes, asked, self._calls)
        gone = made.difference(name for node in kept for name in node.outputs)
        tensors = {n: spec for n, spec in self._tensors.items() if n not in gone}
        graph = Graph(MappingProxyType(tensors), kept, asked)
        return Lowered(
            graph,
            self._calls,
            {name: at for name, at in self._layouts.items() if name not in gone},
            tuple(self._inputs),
            tuple(v.name if isinstance(v, Value) else v for v in self._results),
            self._constants,
        )

    def _placeholder(self, node: torch.fx.Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            self._inputs.append(None)
            self._values[node] = value
            return
        owner = self._owners.get(storage_of(value))
        if owner is not None and self._layouts[owner] == Layout.of(value):
            name = owner  # one tensor under two names
        else:
            name = self._declare(node.name, value, Role.STATE, ())
        self._inputs.append(name)
        self._values[node] = Value(name)

    def _constant(self, node: torch.fx.Node) -> None:
        value = operator.attrgetter(node.target)(self._module)
        if isinstance(value, torch.Tensor):
            name = self._declare(node.name, value, Role.STATE, ())
            self._constants[name] = value
            self._values[node] = Value(name)
        else:
            self._values[node] = value

    def _operation(self, node: torch.fx.Node) -> None:
        value = node.meta.get("val")
        args, kwargs = self._resolved((node.args, dict(node.kwargs)))
        if node.target in CHECKS:
            self._add(node, args, kwargs, [])
        elif isinstance(value, torch.Tensor):
            self._add(node, args, kwargs, [(None, node.name, value)])
            self._values[node] = Value(node.name)
        elif isinstance(value, tuple | list):
            given = torch.fx.node.map_arg(node.args, lambda n: n.meta.get("val"))
            value = corrected(value, statistics_types(node.target, given))
            value = without_masked(node.target, node.args, value)
            self._held.append(value)  # a storage is told by where it is
            found = [
                (k, f"{node.name}.{k}", v)
                for k, v in enumerate(value)
                if isinstance(v, torch.Tensor)
            ]
            if node.target is torch.ops.aten.convolution_backward.default:
                self._split_convolution(node, args, found)
            else:
                read = without_unread(node.target, args)
                self._add(node, read, kwargs, found)
            names = {k: Value(name) for k, name, _ in found}
            self._values[node] = [names.get(k, v) for k, v in enumerate(value)]
        else:
            function = _SCALARS.get(node.target, node.target)
            self._values[node] = Pending(function, args)

    def _split_convolution(
        self,
        node: torch.fx.Node,
        args: tuple[Any, ...],
        found: Sequence[tuple[int, str, torch.Tensor]],
    ) -> None:
        """The gradient of a convolution's input, and those of its parameters, apart.

        A bias's comes with the filters': alone it would be summed in another order.
        """
        asked = args[-1]
        for group in ((0,), (1, 2)):
            mine = [row for row in found if row[0] in group]
            if mine:
                mask = [on and k in group for k, on in enumerate(asked)]
                self._add(node, (*args[:-1], mask), {}, mine)

    def _add(
        self,
        node: torch.fx.Node,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: Sequence[tuple[int | None, str, torch.Tensor]],
    ) -> None:
        function = node.target
        refuse(node, function, outputs)
        inputs: list[str] = []
        args, kwargs = pytree.tree_map(
            functools.partial(bound, inputs), (args, dict(kwargs)), is_leaf=is_leaf
        )
        if (constant := self._viewed(node)) is not None:
            for _, _, value in outputs:
                self._owners.setdefault(storage_of(value), constant)
        names: tuple[str, ...] = tuple(
            self._declare(name, value, Role.ACTIVATION, inputs)
            for _, name, value in outputs
        )
        tags = getattr(function, "tags", ())
        result = outputs[0][2] if outputs else None
        call = Call(
            function if result is None else as_laid_out(function, result, _first(node)),
            args,
            kwargs,
            tuple(path for path, _, _ in outputs),
            random=torch.Tag.nondeterministic_seeded in tags,
        )
        call, overwrites = self._overwriting(call, inputs, names)
        view = bool(names) and all(self._tensors[n].alias is not None for n in names)
        packet = getattr(function, "overloadpacket", None)
        traits = NodeTraits(
            view=view,
            overwrites=overwrites,
            expensive=not view and packet in flop_registry,
            random=call.random,
            recomputable=bool(names),
        )
        name = names[0] if names else node.name
        self._calls[name] = call
        self._nodes.append(
            Node(
                name,
                str(function),
                tuple(inputs),
                names,
                phase=self._phase_of(node.name),
                traits=traits,
            )
        )

    def _viewed(self, node: torch.fx.Node) -> str | None:
        """The constant that a node's result is a view of, if it is of one.

        Without data it has bytes of its own, which no other tensor of the graph has.
        """
        first, arguments = node.args[:1], node.target._schema.arguments
        found = self._resolved(first)
        if not found or not isinstance(found[0], Value):
            return None
        viewing = arguments[0].alias_info is not None
        return found[0].name if viewing and found[0].name in self._constants else None

    def _overwriting(
        self, call: Call, inputs: Sequence[str], names: Sequence[str]
    ) -> tuple[Call, tuple[int, ...]]:
        """How a pointwise result may take the place of operands, and of which."""
        into, first = in_place_variant(call.function)
        if into is None or len(names) != 1 or self._tensors[names[0]].alias is not None:
            return call, ()
        result = self._tensors[names[0]]
        candidates = tuple(
            index
            for index, name in enumerate(inputs)
            if self._layouts[name] == self._layouts[result.name]
            and self._tensors[name].nbytes == result.nbytes
            and times(call, index) == 1
            and (not first or call.args[0] == Operand(index))
        )
        if not candidates:
            return call, ()
        found = Call(
            call.function, call.args, call.kwargs, (None,), call.random, into, first
        )
        return found, candidates

    def _declare(
        self, name: str, value: torch.Tensor, role: Role, among: Sequence[str]
    ) -> str:
        """A tensor with bytes of its own, or a view of one among those given."""
        storage = storage_of(value)
        owner = self._owners.setdefault(storage, name)
        alias = None
        if owner != name:
            alias = next((t for t in among if self._owner(t) == owner), owner)
        nbytes = int(value.untyped_storage().nbytes())
        self._tensors[name] = TensorSpec(name, (nbytes,), "uint8", role, alias)
        self._layouts[name] = Layout.of(value)
        return name

    def _owner(self, name: str) -> str:
        while (alias := self._tensors[name].alias) is not None:
            name = alias
        return name

    def _resolved(self, tree: Any) -> Any:
        """Arguments with what stands for the nodes among them."""
        return torch.fx.node.map_arg(tree, self._values.__getitem__)


def _first(node: torch.fx.Node) -> torch.Tensor | None:
    """The first operand of a node, if it is a tensor of the graph."""
    operand = node.args[0] if node.args else None
    value = operand.meta.get("val") if isinstance(operand, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _needed(
    nodes: Sequence[Node], asked: Collection[str], calls: Mapping[str, Call]
) -> tuple[Node, ...]:
    """Without nodes whose results nobody reads; random ones and checks stay."""
    needed = set(asked)
    kept = []
    for node in reversed(nodes):
        call = calls[node.name]
        stays = call.random or call.function in CHECKS
        if stays or not needed.isdisjoint(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    return tuple(reversed(kept))


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph, as a value."""

    name: str


@dataclass(frozen=True, slots=True)
class Pending:
    """A number that is computed where it is used, from tensors and numbers."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


def is_leaf(value: Any) -> bool:
    """Whether a value is one of the two, which trees are not looked into."""
    return isinstance(value, Value | Pending)


def bound(inputs: list[str], value: Any) -> Any:
    """An argument with tensors by their place among the inputs."""
    match value:
        case Value(name):
            if name not in inputs:
                inputs.append(name)
            return Operand(inputs.index(name))
        case Pending(function, args):
            return Number(function, tuple(bound(inputs, a) for a in args))
        case _:
            return value


def times(call: Call, index: int) -> int:
    """How often a call names an operand."""
    found = 0
    pending: list[Any] = [call.args, dict(call.kwargs)]
    while pending:
        match pending.pop():
            case Operand(i):
                found += i == index
            case Number(_, args):
                pending.append(args)
            case dict() as mapping:
                pending += mapping.values()
            case list() | tuple() as values:
                pending += values
    return found


DENSE = (
    "use dense ones (sparse=False, and Adam in place of SparseAdam), or let mt.backend "
    "compile what is behind an embedding and leave the embedding as it is"
)
"""What works in place of sparse tensors."""


def refuse(
    node: torch.fx.Node,
    function: Any,
    outputs: Sequence[tuple[int | None, str, torch.Tensor]],
) -> None:
    """Look at a node and its results.

    Raises:
        UnsupportedError: It is no operation of PyTorch's, changes its operands, or has
            results that are not dense or whose shapes depend on data.
    """
    where = line_of_stack(node.meta.get("stack_trace"))
    schema = getattr(function, "_schema", None)
    if schema is None:
        raise UnsupportedError(
            f"{node.name} calls {function}{where}, which is no operation of PyTorch's; "
            "such calls cannot be planned"
        )
    if schema.is_mutable:
        raise UnsupportedError(
            f"{node.name} calls {function}{where}, which changes its operands; only "
            "what is no view of something outside of the graph may be changed"
        )
    for _, name, value in outputs:
        if value.layout is not torch.strided:
            raise UnsupportedError(
                f"{name} of {function}{where} is {value.layout}; only dense tensors "
                f"are planned: {DENSE}"
            )
        if any(not isinstance(size, int) for size in value.shape):
            raise UnsupportedError(
                f"the shape of {name} of {function}{where} depends on data: "
                f"{tuple(value.shape)}; keep shapes, with torch.where or a mask"
            )
