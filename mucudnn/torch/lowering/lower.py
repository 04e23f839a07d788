"""Lower PyTorch's graph of a step to a `Graph`, with a call for each node.

Memory consists of storages, sized in bytes: a tensor that shares the storage of an
earlier one is a view of it. Tuples are flattened: a node has one output for each
tensor. Numbers that are computed on the way are not nodes; the calls that use them
compute them.

The traits of a node tell the planner whether it is a view, expensive, or random, and
which operands it may overwrite.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from mucudnn.errors import UnsupportedError
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.ir.traits import Collective, NodeTraits
from mucudnn.torch.capture.many_tensor_updates import with_fused_stores
from mucudnn.torch.capture.undeclared_writes import SPOILS_AN_OPERAND, writes_of
from mucudnn.torch.distributed.sharding import WAIT, finished, is_collective, started
from mucudnn.torch.lowering.lowered import (
    Call,
    Layout,
    Lowered,
    Named,
    Number,
    Operand,
    bound,
    mapped,
)
from mucudnn.torch.lowering.overloads import (
    as_laid_out,
    in_place_variant,
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
"""Operations without results that raise depending on values; never removed."""

_SAME = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
"""Operations that return their operand."""


def lower(module: torch.fx.GraphModule, phase_of: Callable[[str], Phase]) -> Lowered:
    """Lower a functional graph of PyTorch's; `meta["val"]` has fake results.

    Raises:
        UnsupportedError: A size depends on data, or an operation changes its operands.
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

    def visit(self, node: torch.fx.Node) -> None:
        """Lower one node."""
        match node.op:
            case "placeholder":
                self._placeholder(node)
            case "get_attr":
                value = operator.attrgetter(node.target)(self._module)
                if isinstance(value, torch.Tensor):
                    name = self._declare(node.name, value, Role.STATE, ())
                    self._constants[name] = value
                    self._values[node] = Named(name)
                else:
                    self._values[node] = value
            case "output":
                self._results = tuple(pytree.tree_leaves(self._resolved(node.args[0])))
            case _ if node.target is operator.getitem:
                whole = self._values[node.args[0]]
                self._values[node] = whole[node.args[1]]
            case _ if node.target is WAIT:
                self._wait(node)
            case _ if node.target in _SAME:
                self._values[node] = self._values[node.args[0]]
            case _ if getattr(node.target, "namespace", None) == "profiler":
                pass  # it has no effect on values
            case _:
                self._operation(node)

    def result(self) -> Lowered:
        """Return the lowered graph, without nodes whose results are not used."""
        made = {name for node in self._nodes for name in node.outputs}
        outputs = tuple(
            dict.fromkeys(
                value.name
                for value in self._results
                if isinstance(value, Named) and value.name in made
            )
        )
        # Random nodes stay, for the sequence of draws, and so do checks.
        needed = set(outputs)
        used = []
        for node in reversed(self._nodes):
            call = self._calls[node.name]
            stays = call.random or call.function in CHECKS
            if stays or not needed.isdisjoint(node.outputs):
                used.append(node)
                needed.update(node.inputs)
        used.reverse()
        gone = made.difference(name for node in used for name in node.outputs)
        tensors = {n: spec for n, spec in self._tensors.items() if n not in gone}
        graph = Graph(tensors, tuple(used), outputs)
        return Lowered(
            graph,
            self._calls,
            {name: at for name, at in self._layouts.items() if name not in gone},
            tuple(self._inputs),
            tuple(v.name if isinstance(v, Named) else v for v in self._results),
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
            name = owner  # the same tensor is given twice
        else:
            name = self._declare(node.name, value, Role.STATE, ())
        self._inputs.append(name)
        self._values[node] = Named(name)

    def _operation(self, node: torch.fx.Node) -> None:
        value = node.meta.get("val")
        args, kwargs = self._resolved((node.args, dict(node.kwargs)))
        if node.target in CHECKS:
            self._add(node, args, kwargs, [])
        elif isinstance(value, torch.Tensor):
            self._add(node, args, kwargs, [(None, node.name, value)])
            self._values[node] = Named(node.name)
        elif isinstance(value, tuple | list):
            value = without_masked(node.target, node.args, value)
            found = [
                (k, f"{node.name}.{k}", v)
                for k, v in enumerate(value)
                if isinstance(v, torch.Tensor)
            ]
            if node.target is torch.ops.aten.convolution_backward.default:
                # One node for the input's gradient, one for those of the parameters.
                # The bias's is summed in another order if it is computed alone.
                for group in ((0,), (1, 2)):
                    mine = [row for row in found if row[0] in group]
                    if mine:
                        mask = [on and k in group for k, on in enumerate(args[-1])]
                        self._add(node, (*args[:-1], mask), {}, mine)
            else:
                self._add(node, without_unread(node.target, args), kwargs, found)
            names = {k: Named(name) for k, name, _ in found}
            self._values[node] = [names.get(k, v) for k, v in enumerate(value)]
        else:
            scalar = node.target is torch.ops.aten._local_scalar_dense.default
            self._values[node] = Number(
                torch.Tensor.item if scalar else node.target, args
            )

    def _wait(self, node: torch.fx.Node) -> None:
        """Lower the wait for a collective: it returns its operand.

        Its fake result has a storage of its own. A collective may read its operands
        until the wait, so they are inputs of the wait, too.
        """
        (pending,) = node.args
        value = pending.meta["val"]
        owner = self._owners[storage_of(value)]
        self._owners[storage_of(node.meta["val"])] = owner
        self._add(node, self._resolved(node.args), {}, [(None, node.name, value)])
        self._values[node] = Named(node.name)
        wait = self._nodes[-1]
        made = next((n for n in self._nodes if wait.inputs[0] in n.outputs), wait)
        if made.traits.collective:
            inputs = tuple(dict.fromkeys((*wait.inputs, *made.inputs)))
            self._nodes[-1] = replace(wait, inputs=inputs)

    def _add(
        self,
        node: torch.fx.Node,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: Sequence[tuple[int | None, str, torch.Tensor]],
    ) -> None:
        """Add a node with these outputs: position in the result, name, and value."""
        function = node.target
        refuse(node, outputs)
        positions: dict[str, int] = {}
        args, kwargs = bound((args, dict(kwargs)), positions)
        inputs = tuple(positions)
        # A view of a constant has, as a fake tensor, a storage of its own.
        first = next(iter(self._resolved(node.args[:1])), None)
        if (
            isinstance(first, Named)
            and first.name in self._constants
            and function._schema.arguments[0].alias_info is not None
        ):
            for _, _, value in outputs:
                self._owners.setdefault(storage_of(value), first.name)
        names: tuple[str, ...] = tuple(
            self._declare(name, value, Role.ACTIVATION, inputs)
            for _, name, value in outputs
        )
        tags = getattr(function, "tags", ())
        result = outputs[0][2] if outputs else None
        if result is None:
            called = function
        elif function is WAIT and result.device.type == "cpu":
            called = finished
        elif is_collective(str(function)) and result.device.type == "cpu":
            called = started(function)
        else:
            called = as_laid_out(function, result, _first(node))
        call = Call(
            called,
            args,
            kwargs,
            tuple(path for path, _, _ in outputs),
            random=torch.Tag.nondeterministic_seeded in tags,
        )
        call, overwrites = self._overwriting(with_fused_stores(call), inputs, names)
        view = bool(names) and all(self._tensors[n].alias is not None for n in names)
        packet = getattr(function, "overloadpacket", None)
        traits = NodeTraits(
            view=view,
            overwrites=overwrites,
            expensive=not view and packet in flop_registry,
            random=call.random,
            # A zero tensor of forward-mode derivatives has no memory to copy.
            movable=function is not torch.ops.aten._efficientzerotensor.default,
            collective=_collective(str(function)),
            recomputable=bool(names) and str(function) not in SPOILS_AN_OPERAND,
        )
        name = names[0] if names else node.name
        self._calls[name] = call
        self._nodes.append(
            Node(
                name,
                str(function),
                inputs,
                names,
                phase=self._phase_of(node.name),
                traits=traits,
            )
        )

    def _overwriting(
        self, call: Call, inputs: Sequence[str], names: Sequence[str]
    ) -> tuple[Call, tuple[int, ...]]:
        """Return a call that can overwrite operands, and the operands' positions."""
        into, first = in_place_variant(call.function)
        if into is None or len(names) != 1 or self._tensors[names[0]].alias is not None:
            return call, ()
        result = self._tensors[names[0]]
        if self._layouts[result.name].dtype.is_complex:
            return call, ()  # PyTorch rounds complex products in place otherwise
        candidates = tuple(
            index
            for index, name in enumerate(inputs)
            if self._layouts[name] == self._layouts[result.name]
            and self._tensors[name].nbytes == result.nbytes
            and _count_uses(call, index) == 1
            and (not first or call.args[0] == Operand(index))
        )
        if not candidates:
            return call, ()
        return replace(call, results=(None,), into=into, first=first), candidates

    def _declare(
        self, name: str, value: torch.Tensor, role: Role, among: Sequence[str]
    ) -> str:
        """Declare a tensor that owns its storage, or a view of one of `among`."""
        owner = self._owners.setdefault(storage_of(value), name)
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
        """Return arguments with the lowered values of the graph nodes among them."""
        return torch.fx.node.map_arg(tree, self._values.__getitem__)


def _first(node: torch.fx.Node) -> torch.Tensor | None:
    """Return the first operand of a node, if it is a tensor of the graph."""
    operand = node.args[0] if node.args else None
    value = operand.meta.get("val") if isinstance(operand, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _collective(op: str) -> Collective | None:
    """Return how an operation exchanges data with other ranks; None if it does not.

    Buffers are broadcast before the forward pass, which begins with them.
    """
    if not is_collective(op) or "broadcast" in op:
        return None
    return Collective.GATHER if "all_gather" in op else Collective.REDUCE


def _count_uses(call: Call, index: int) -> int:
    """Return how often a call names an operand."""
    leaves: list[Any] = []
    mapped([call.args, dict(call.kwargs)], leaves.append)
    return leaves.count(Operand(index))


DENSE = (
    "use dense ones (sparse=False, and Adam instead of SparseAdam), or compile only "
    "the layers after the embedding with mt.backend"
)
"""Advice to users of sparse tensors."""


def refuse(
    node: torch.fx.Node, outputs: Sequence[tuple[int | None, str, torch.Tensor]]
) -> None:
    """Refuse nodes that cannot be planned.

    Raises:
        UnsupportedError: The node is no operation of PyTorch, changes its operands, or
            has results that are not dense or whose shapes depend on data.
    """
    function, where = node.target, line_of_stack(node.meta.get("stack_trace"))
    schema = getattr(function, "_schema", None)
    if schema is None:
        raise UnsupportedError(
            f"{node.name} calls {function}{where}, which is not a PyTorch operation; "
            "such calls cannot be planned"
        )
    if schema.is_mutable:
        raise UnsupportedError(
            f"{node.name} calls {function}{where}, which modifies its operands; only "
            "tensors that are not views of the graph's inputs may be modified"
        )
    if writes_of(function, node.args, node.kwargs):
        raise UnsupportedError(
            f"{node.name} calls {function}{where}, which modifies operands that its "
            "schema does not declare as mutated; only train_step plans such "
            "operations"
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
                f"{tuple(value.shape)}; keep the shape fixed, with torch.where or a "
                "mask"
            )
