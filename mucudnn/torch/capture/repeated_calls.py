"""Record calls that are like an earlier call without PyTorch's tracer.

PyTorch's tracer takes most of a millisecond for an operation: it asks for
decompositions, infers the result by a model of the kernel, and notes its metadata. A
call of the same operation, with equal arguments beside tensors of equal layouts, leads
to the same node with results of the same layouts. Layers repeat, and most calls of a
step are such calls.
"""

import functools
import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch._aot_autograd.functional_utils import from_fun
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import (
    fetch_sym_proxy,
    set_proxy_slot,
    track_tensor_tree,
)

from mucudnn.torch.capture.known_values import KnownShapes
from mucudnn.torch.internals import fresh_fake, view_of_fake
from mucudnn.torch.source_lines import storage_of

_TRACED = proxy_tensor.proxy_call

_PLAIN = (
    bool, int, float, complex, str, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types of arguments that are equal if their values are."""

_OTHERS = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
    }
)
"""Tags of operations that are always traced by PyTorch."""


class _UnknownError(Exception):
    """An argument has no key."""


@dataclass(frozen=True, slots=True, eq=False)
class _Result:
    """A tensor like a result: the tensor itself, and the operand that it is a view of.

    Attributes:
        like: A result of the first call.
        meta: Metadata of its node.
        operand: Place among the tensors of the call; None for a storage of its own.
    """

    like: FakeTensor
    meta: dict[str, Any]
    operand: int | None

    def made(self, operands: Sequence[Any]) -> FakeTensor:
        """Return the result of another call."""
        if self.operand is None:
            return fresh_fake(self.like)
        return view_of_fake(operands[self.operand], self.like)


_Results = _Result | Sequence[_Result | None]


@dataclass
class RepeatedCalls:
    """Recorder of a capture's calls, in place of `proxy_call` of PyTorch's tracer.

    Attributes:
        shapes: Notes decisions on values, which each call has to make.
        tracer: The tracer of the capture; others are left alone.
        known: Results of calls by their keys; None if such calls have to be traced.
        plain: Keys of calls that functionalization only passes on.
        count: Number of calls so far.
        last: Key and results of the last call.
    """

    shapes: KnownShapes
    tracer: Any = None
    known: dict[Any, _Results | None] = field(default_factory=dict)
    plain: set[Any] = field(default_factory=set)
    count: int = 0
    last: tuple[Any, Any] = None, None

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation on tensors of functionalization, and return its results."""
        if not _is_pure(func):
            return func(*args, **kwargs)
        operands: list[FakeTensor] = []
        with torch._C.DisableTorchFunction():
            try:
                key, (given, named) = self._keyed(func, args, kwargs, operands)
            except _UnknownError:
                return func(*args, **kwargs)
            if (found := self.known.get(key)) is not None and key in self.plain:
                made = self._repeat(func, given, named, found, operands)
                single = isinstance(found, _Result)
                return _outer(made) if single else tuple(map(_outer, made))
        before = self.count
        results = func(*args, **kwargs)
        called, made = self.last
        if self.count == before + 1 and called == key and self.known[key] is not None:
            pairs = zip(_each(results), _each(made), strict=True)
            if all(from_fun(result) is tensor for result, tensor in pairs):
                self.plain.add(key)
        return results

    def __call__(
        self, mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any
    ) -> Any:
        """Record a call in a graph, and return fake results."""
        operands: list[FakeTensor] = []
        key = None
        if mode.tracer is self.tracer and _is_repeatable(func):
            with torch._C.DisableTorchFunction(), suppress(_UnknownError):
                key, (given, named) = self._keyed(func, args, kwargs, operands)
                if (found := self.known.get(key)) is not None:
                    results = self._repeat(func, given, named, found, operands)
                    self.count, self.last = self.count + 1, (key, results)
                    return results
        last, decided = next(reversed(mode.tracer.graph.nodes)), len(self.shapes.known)
        results = _TRACED(mode, func, pre_dispatch, args, kwargs)
        self.count, self.last = self.count + 1, (key, results)
        if key is not None and key not in self.known:
            undecided = len(self.shapes.known) == decided
            noted = self._noted(func, last.next, results, operands)
            self.known[key] = noted if undecided else None
        return results

    def _keyed(
        self, func: Any, args: Any, kwargs: Any, operands: list[FakeTensor]
    ) -> tuple[Any, Any]:
        """Return a key of a call, and its arguments with nodes for tensors.

        `operands` gets the tensors. The types of some results follow from the default.
        """
        key, given = self._argument((args, kwargs), operands)
        if not operands:
            raise _UnknownError  # what makes tensors reads other defaults, too
        return (func, key, torch.get_default_dtype()), given

    def _argument(self, value: Any, operands: list[FakeTensor]) -> tuple[Any, Any]:
        """Return a key of an argument, and the argument with nodes for tensors."""
        if isinstance(value, FunctionalTensor):
            value = from_fun(value)
        if isinstance(value, FakeTensor):
            slot = self.tracer.tensor_tracker.get(value)
            if slot is None or slot.constant is not None:
                raise _UnknownError
            operands.append(value)
            return _layout_of(value), slot.proxy.node
        kind = type(value)
        if kind in _PLAIN:
            return (kind, value), value
        if kind is torch.SymFloat:
            number = fetch_sym_proxy(self.tracer)(value)
            if isinstance(number, float):  # such as lr * 0.0
                return (float, number), number
            return kind, number.node
        if kind in (tuple, list):
            pairs = [self._argument(v, operands) for v in value]
            return (kind, *(k for k, _ in pairs)), kind([n for _, n in pairs])
        if kind is dict:
            key, nodes = self._argument(tuple(value.values()), operands)
            return (tuple(value), key), dict(zip(value, nodes, strict=True))
        raise _UnknownError

    def _noted(
        self, func: Any, node: Any, found: Any, operands: Sequence[FakeTensor]
    ) -> _Results | None:
        """Return what the results of a traced call are; None if that is not known.

        Args:
            func: The operation.
            node: The first node that was traced.
            found: The results.
            operands: Its tensors.
        """
        own = node.op == "call_function" and node.target is func
        if not own or "eager_input_vals" in node.meta:
            return None
        behind = node
        while (behind := behind.next).op != "root":
            if behind.target is not operator.getitem or behind.args[0] is not node:
                return None
        places = {storage_of(tensor): i for i, tensor in enumerate(operands)}

        def noted(tensor: Any) -> _Result | None:
            slot = self.tracer.tensor_tracker.get(tensor)
            if slot is None or slot.constant is not None:
                return None
            place = places.get(storage_of(tensor))
            if place is not None and len(places) < len(operands):
                return None  # it is not known of which operand this is a view
            result = _Result(tensor, dict(node.meta), place)
            same = _layout_of(result.made(operands)) == _layout_of(tensor)
            return result if same else None

        tensors = [t for t in _each(found) if t is not None]
        given = set(map(id, operands))
        if not tensors or not all(
            isinstance(t, FakeTensor) and id(t) not in given for t in tensors
        ):
            return None
        new = [place for t in tensors if (place := storage_of(t)) not in places]
        if len(set(new)) < len(new):
            return None  # results that are views of each other
        if isinstance(found, FakeTensor):
            return noted(found)
        results = [None if t is None else noted(t) for t in found]
        known = [result for result in results if result is not None]
        return results if len(known) == len(tensors) else None

    def _repeat(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        found: _Results,
        operands: Sequence[FakeTensor],
    ) -> Any:
        """Record a call like an earlier one."""
        graph = self.tracer.graph
        name = graph._target_to_str(func.overloadpacket.__name__)
        node = graph.create_node("call_function", func, args, kwargs, name)
        if isinstance(found, _Result):
            result = found.made(operands)
            track(self.tracer, node, result)
            node.meta = {**found.meta, "val": result}
            return result
        results = tuple([r and r.made(operands) for r in found])
        proxy = torch.fx.Proxy(node, self.tracer)
        return track_tensor_tree(results, proxy, constant=None, tracer=self.tracer)


def track(tracer: Any, node: torch.fx.Node, result: FakeTensor) -> None:
    """Note the node that computes a tensor."""
    slot = proxy_tensor._ProxyTensor(torch.fx.Proxy(node, tracer), None)
    set_proxy_slot(result, tracer, slot)


@functools.cache
def _is_repeatable(func: Any) -> bool:
    """Return whether an operation's results follow from layouts of its operands."""
    return (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace == "aten"
        and _OTHERS.isdisjoint(func.tags)
    )


@functools.cache
def _is_pure(func: Any) -> bool:
    """Return whether functionalization passes an operation on."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    schema = func._schema
    return (
        _is_repeatable(func)
        and not any(a.alias_info for a in (*schema.arguments, *schema.returns))
        and all(str(result.type) == "Tensor" for result in schema.returns)
        and not func.has_kernel_for_dispatch_key(key)
    )


def _each(results: Any) -> Sequence[Any]:
    """Return the results of a call, which may be a single one."""
    return results if isinstance(results, tuple | list) else (results,)


def _outer(value: FakeTensor | None) -> FunctionalTensor | None:
    """Return a tensor of functionalization with a new fake one."""
    if value is None:
        return None
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    return FunctionalTensor(torch._to_functional_tensor(value), mode)


def _layout_of(tensor: FakeTensor) -> Any:
    """Return a key of all that PyTorch's models of kernels read of a tensor."""
    return (
        *(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype),
        *(tensor.device, tensor.layout, tensor.is_conj(), tensor.is_neg()),
        *(tensor.requires_grad, tensor.untyped_storage().nbytes()),
    )
