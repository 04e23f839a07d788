"""Updates of many tensors by one call, as `foreach` and `fused` optimizers run them.

An optimizer is captured tensor by tensor (`optimizers.py`), so that a gradient can be
freed as soon as its parameter is updated. On CUDA every operation of every parameter
would then be a launch of its own. `merged` joins operations that do not depend on each
other into calls of `torch._foreach_*`, and fused updates into calls of
`torch._fused_*`. How many parameters are updated together is the planner's choice:
their gradients are in memory at the same time.

A group of one tensor calls the same kernels as a group of a hundred, so that the choice
never changes numbers.
"""

import functools
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._functorch._aot_autograd.functional_utils import from_fun

from mucudnn.ir.graph import Node
from mucudnn.ir.tensor import TensorSpec
from mucudnn.torch.capture.undeclared_writes import LIBRARY
from mucudnn.torch.lowering.lowered import Call, Layout, Named, Number, bound, named

_aten = torch.ops.aten

FUSED: Mapping[Any, Any] = {
    torch._fused_sgd_: _aten._fused_sgd_,
    torch._fused_adam_: _aten._fused_adam_,
    torch._fused_adamw_: _aten._fused_adamw_,
    torch._fused_adagrad_: _aten._fused_adagrad_,
}
"""Functions that fused optimizers call -> operators."""


def updates_many(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether eager mode updates many tensors of an optimizer by one call.

    PyTorch's optimizers do so on CUDA devices unless `foreach` is off.
    """
    return all(
        group.get("fused") or group.get("foreach", False) is not False
        for group in optimizer.param_groups
    )


# Capture of fused updates: one call for each parameter, without writes in place.


def record_fused(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Record a call of `torch._fused_*` for lists of tensors, tensor by tensor."""
    packet = FUSED[function]
    tensor_lr = isinstance(kwargs["lr"], torch.Tensor)
    operator = packet.tensor_lr if tensor_lr else packet.default
    written = _written_lists(operator)
    pure = functional_fused(operator)
    for i in range(len(args[0])):
        mine = [values[i : i + 1] for values in args]
        targets = [t for place in written for t in mine[place]]
        for target, value in zip(targets, pure(*mine, **kwargs), strict=True):
            # A `copy_` would be an operation of the graph.
            target.replace_(from_fun(value))
            target.commit_update()
            target.sync()


def _written_lists(operator: Any) -> list[int]:
    """Return the positions of the lists that a fused operator updates.

    Gradients are declared as written for the sake of a scale, which is never given.
    """
    return [
        place
        for place, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and argument.name != "grads"
    ]


@functools.cache
def functional_fused(operator: Any) -> Any:
    """Define the form of a fused operator that returns new tensors.

    Its results are the updated tensors of the first list, then of the next.
    """
    schema = operator._schema
    given = str(schema).partition("(")[2].rpartition(") -> ")[0]
    given = re.sub(r"\(\w!\)", "", given)
    # A scalar may be computed from a tensor of the graph; a float may not.
    given = given.replace("float lr", "Scalar lr")
    name = f"functional{schema.name.partition('::')[2]}{schema.overload_name}"
    LIBRARY.define(f"{name}({given}) -> Tensor[]")
    written = _written_lists(operator)

    def computed(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        given = list(args)
        for place in written:
            given[place] = [tensor.clone() for tensor in given[place]]
        operator(*given, **kwargs)
        return [tensor for place in written for tensor in given[place]]

    def described(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return [torch.empty_like(t) for place in written for t in args[place]]

    LIBRARY.impl(name, computed, "CompositeExplicitAutograd")
    LIBRARY.impl(name, described, "Meta")
    found = getattr(torch.ops.mucudnn, name).default
    _OPERATORS[found] = operator
    return found


_OPERATORS: dict[Any, Any] = {}
"""Functional form -> the fused operator."""


def with_fused_stores(call: Call) -> Call:
    """Return a fused update with what writes its operands; any other call as it is."""
    operator = _OPERATORS.get(call.function)
    if operator is None:
        return call
    lists = (call.args[place] for place in _written_lists(operator))
    stores = tuple(operand.index for written in lists for operand in written)
    return replace(call, into=_fused(operator), stores=stores)


@functools.cache
def _fused(operator: Any) -> Callable[..., Any]:
    """Return a function that runs a fused operator, and returns what it has written."""
    written = _written_lists(operator)

    def fused(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        operator(*args, **kwargs)
        return [tensor for place in written for tensor in args[place]]

    fused.__qualname__ = f"fused({operator})"  # plans are stored by name
    _IN_PLACE.add(fused)
    return fused


_IN_PLACE: set[Callable[..., Any]] = set()
"""Functions that `_fused` has made."""


# Merging of operations on single tensors.


_UNARY = {
    _aten.sqrt.default: "sqrt",
    _aten.neg.default: "neg",
    _aten.abs.default: "abs",
    _aten.sign.default: "sign",
    _aten.reciprocal.default: "reciprocal",
}
_BINARY = {
    _aten.add.Tensor: "add",
    _aten.sub.Tensor: "sub",
    _aten.mul.Tensor: "mul",
    _aten.div.Tensor: "div",
    _aten.maximum.default: "maximum",
}
_LERP = {_aten.lerp.Scalar: "lerp"}
_PRODUCTS = {_aten.addcmul.default: "addcmul", _aten.addcdiv.default: "addcdiv"}
_COPY = {_aten.copy_.default: "copy"}
_NAMES: Mapping[Any, str] = {**_UNARY, **_BINARY, **_LERP, **_PRODUCTS, **_COPY}
"""Operator -> its name among `torch._foreach_*`."""


@dataclass(frozen=True, slots=True)
class _Member:
    """An operation that may be one of many in a call.

    Attributes:
        node: The node.
        args: Its arguments, with tensors by name.
        kwargs: Its keyword arguments.
        in_place: Whether it writes its first operand.
    """

    node: Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    in_place: bool


@dataclass(frozen=True)
class Merger:
    """Merges updates that are ready at the same time.

    Attributes:
        calls: Call of each node; those of merged nodes are added.
        tensors: Every tensor; results that overwrite an operand become aliases.
        layouts: Layout of each tensor.
        readers: Number of nodes that read a tensor.
        results: Tensors that the step returns or stores.
    """

    calls: dict[str, Call]
    tensors: dict[str, TensorSpec]
    layouts: Mapping[str, Layout]
    readers: Mapping[str, int]
    results: frozenset[str]

    def merged(
        self, nodes: Sequence[Node], before: Mapping[str, Sequence[Node]]
    ) -> list[Node]:
        """Return the nodes of some updates, merged where they are alike.

        The nodes are in a valid order; `before` has those that each one depends on.
        """
        # Nodes on one level of the longest paths never depend on each other.
        level: dict[str, int] = {}
        alone: dict[int, list[Node]] = {}
        groups: dict[int, dict[Hashable, list[_Member]]] = {}
        made: set[str] = set()
        for node in nodes:
            waits = (level.get(n.name, -1) for n in before[node.name])
            at = level[node.name] = 1 + max(waits, default=-1)
            call = self.calls[node.name]
            args, kwargs = named((call.args, dict(call.kwargs)), node.inputs)
            member = _Member(node, args, kwargs, in_place=bool(node.mutates))
            key = self._key(member)
            if key is None:
                alone.setdefault(at, []).append(node)
            else:
                member = self._overwriting(member, made)
                mine = groups.setdefault(at, {})
                mine.setdefault((key, member.in_place), []).append(member)
            made.update(node.outputs)
        found: list[Node] = []
        for at in range(1 + max(level.values(), default=-1)):
            found += alone.get(at, ())
            found += map(self._joined, groups.get(at, {}).values())
        return found

    def _overwriting(self, member: _Member, made: set[str]) -> _Member:
        """Have a result overwrite an operand of updates that nothing else reads."""
        first = member.args[0]
        if member.in_place or not isinstance(first, Named):
            return member
        (result,) = member.node.outputs
        if (
            first.name not in made
            or self.tensors[first.name].alias is not None
            or self.readers.get(first.name, 0) != 1
            or first.name in self.results
            or self.layouts[first.name] != self.layouts[result]
        ):
            return member
        self.tensors[result] = replace(self.tensors[result], alias=first.name)
        node = replace(member.node, mutates=(first.name,))
        return replace(member, node=node, in_place=True)

    def _owner(self, name: str) -> str:
        while (alias := self.tensors[name].alias) is not None:
            name = alias
        return name

    def _key(self, member: _Member) -> Hashable:
        """Return what members of one call have in common; None if it stays alone."""
        node, call = member.node, self.calls[member.node.name]
        if call.function in _IN_PLACE:
            kinds = tuple(
                tuple(self._kind(t.name) for t in values) for values in member.args
            )
            return call.function, kinds, tuple(sorted(member.kwargs.items(), key=str))
        name = _NAMES.get(call.function)
        if name is None or not isinstance(member.args[0], Named):
            return None
        if len(node.outputs) > 1 or any(
            self.tensors[n].alias is not None and not node.mutates for n in node.outputs
        ):
            return None
        # What is written has to be the first operand, as `torch._foreach_*_` writes it.
        first = self._owner(member.args[0].name)
        written = (*node.mutates, *node.outputs) if node.mutates else ()
        if any(self._owner(name) != first for name in written):
            return None
        tensors = [a for a in member.args if isinstance(a, Named)]
        shapes = {self.layouts[t.name].shape for t in tensors}
        rest = tuple(
            self._kind(a.name) if isinstance(a, Named) else "number"
            for a in member.args
        )
        options = {k: v for k, v in member.kwargs.items() if k != "value"}
        if name in ("add", "sub") and rest[1:] == ("number",) and options:
            return None
        if len(shapes) > 1:
            # One factor of all tensors, such as a clipped norm's.
            if name not in ("mul", "div") or self.layouts[tensors[1].name].shape:
                return None
            rest += (tensors[1].name,)
        return name, rest, tuple(sorted(options.items(), key=str))

    def _kind(self, name: str) -> Hashable:
        layout = self.layouts[name]
        return layout.dtype, layout.device

    def _joined(self, members: Sequence[_Member]) -> Node:
        """Return one node for several members; add its call."""
        nodes = [member.node for member in members]
        first, call = nodes[0], self.calls[nodes[0].name]
        read = dict.fromkeys(name for node in nodes for name in node.inputs)
        inputs = {name: i for i, name in enumerate(read)}
        mutates = tuple(dict.fromkeys(n for node in nodes for n in node.mutates))
        join = _joined_fused if call.function in _IN_PLACE else self._joined_foreach
        self.calls[first.name] = new = join(members, call, inputs)
        op = "store" if mutates else str(new.function.__qualname__)
        outputs = tuple(name for node in nodes for name in node.outputs)
        ends = tuple(inputs), outputs
        return Node(first.name, op, *ends, phase=first.phase, mutates=mutates)

    def _joined_foreach(
        self, members: Sequence[_Member], call: Call, inputs: dict[str, int]
    ) -> Call:
        name = _NAMES[call.function]
        columns = list(zip(*(member.args for member in members), strict=True))
        tensors = [c for c in columns if isinstance(c[0], Named)]
        args: list[Any] = [[bound(t, inputs) for t in column] for column in tensors]
        kwargs = {
            k: bound(v, inputs) for k, v in members[0].kwargs.items() if k != "value"
        }
        numbers = next((c for c in columns if not isinstance(c[0], Named)), None)
        kind = "default" if call.function in _UNARY or name == "copy" else "List"
        if call.function in _PRODUCTS:
            numbers = tuple(member.kwargs.get("value", 1) for member in members)
        if numbers is not None and name != "copy":
            # CUDA multiplies by the reciprocal of one number, and divides by a list's.
            # Eager mode has lists of whatever depends on a step's count.
            same = not isinstance(numbers[0], Number) and len({*numbers}) == 1
            kind = "Scalar" if same else "ScalarList"
            scalars = [bound(number, inputs) for number in numbers]
            args.append(scalars[0] if same else scalars)
        elif len(tensors) == 2:
            # The second operands may be one number in a tensor.
            shapes = {self.layouts[column[0].name].shape for column in tensors}
            if len(shapes) > 1:
                kind, args[1] = "Tensor", args[1][0]
        in_place = members[0].in_place
        packet = getattr(_aten, f"_foreach_{name}{'_' if in_place else ''}")
        function = getattr(packet, kind)
        run = _foreach(function) if in_place else function
        outputs = sum(len(member.node.outputs) for member in members)
        return Call(run, tuple(args), kwargs, tuple(range(outputs)))


def _joined_fused(
    members: Sequence[_Member], call: Call, inputs: dict[str, int]
) -> Call:
    lists = zip(*(member.args for member in members), strict=True)
    args = tuple([bound(t, inputs) for values in of for t in values] for of in lists)
    kwargs = {k: bound(v, inputs) for k, v in members[0].kwargs.items()}
    # Results are those of the first list, then of the next.
    count, each = len(members), len(members[0].node.outputs)
    places = tuple(j * count + i for i in range(count) for j in range(each))
    return Call(call.function, args, kwargs, places)


@functools.cache
def _foreach(function: Any) -> Callable[..., Any]:
    """Return a function that writes a list of tensors, and returns the list."""

    def foreach(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        function(tensors, *args, **kwargs)
        return tensors

    foreach.__qualname__ = f"foreach({function})"  # plans are stored by name
    return foreach
