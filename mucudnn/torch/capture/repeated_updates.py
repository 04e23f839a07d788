"""Record the update of one parameter of each kind, and repeat it for all others.

PyTorch's optimizers update their parameters one by one, each by the same operations.
To trace one operation takes about a millisecond, to copy its node a few hundredths of
that. The update of the first parameter of each kind (equal shapes, strides and types of
parameter, gradient and state) is therefore traced, and its nodes are copied for every
other parameter of the kind. The graph is the same as if all had been traced.

Parameters of several shapes are of one kind if all their tensors are contiguous and
have the parameter's shape, or no axis, and all operations are pointwise.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch._functorch._aot_autograd.functional_utils import from_fun
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
)

from mucudnn.torch.capture.repeated_calls import RepeatedCalls, track
from mucudnn.torch.internals import fresh_fake, replaced
from mucudnn.torch.lowering.lowered import Layout
from mucudnn.torch.source_lines import storage_of

_OPTIMIZERS = ("adadelta", "adagrad", "adam", "adamax", "nadam", "rmsprop", "sgd")
"""Modules of `torch.optim` with a function that takes a list of parameters, lists of
their gradients and state, and settings, and updates each parameter by itself."""


@contextmanager
def updates_repeated(calls: RepeatedCalls) -> Iterator[None]:
    """Trace updates of PyTorch's optimizers once for each kind of parameter."""
    with ExitStack() as stack:
        for optimizer in _OPTIMIZERS:
            module = import_module(f"torch.optim.{optimizer}")
            name = f"_single_tensor_{optimizer}"
            once = partial(_update, calls, vars(module)[name])
            stack.enter_context(replaced(module, **{name: once}))
        yield


def _update(
    calls: RepeatedCalls, loop: Callable[..., None], *given: Any, **settings: Any
) -> None:
    """Update parameters as `loop` does, whose arguments these are."""
    lists = [values for values in given if isinstance(values, list)]
    others = [*settings.values(), *(v for v in given if not isinstance(v, list))]
    count = len(lists[0]) if lists else 0
    mode, shapes = get_proxy_mode(), calls.shapes
    if (
        (mode is None or mode.tracer is not calls.tracer)  # another thread
        or not lists
        # Tensors may be converted once for all parameters.
        or any(isinstance(v, torch.Tensor | list) for v in others)
        or any(len(values) not in (0, count) for values in lists)
    ):
        loop(*given, **settings)
        return
    known: dict[Any, _Update] = {}
    for i in range(count):
        mine = [v[i : i + 1] if isinstance(v, list) else v for v in given]
        tensors = [values[i] for values in lists if values]
        kind, alike = _kinds_of(tensors)
        if update := known.get(kind) or known.get(alike):
            with torch._C.DisableTorchFunction():
                update.repeat(tensors, None if kind in known else tensors[0].shape)
            continue
        before = None if kind is None else _nodes_of(tensors)
        last, decided = next(reversed(mode.tracer.graph.nodes)), len(shapes.known)
        loop(*mine, **settings)
        for whole, part in zip(given, mine, strict=True):
            if isinstance(whole, list):
                whole[i : i + 1] = part  # new state, such as a momentum
        if before is not None and len(shapes.known) == decided:
            constants = frozenset(map(id, (*others, *loop.__code__.co_consts)))
            if update := _Update.since(last, before, tensors, constants):
                known[kind] = update
                if alike is not None and update.is_pointwise:
                    known[alike] = update


def _kinds_of(tensors: Sequence[Any]) -> tuple[Any, Any]:
    """Return a key of a parameter's tensors, and one that it shares with other shapes.

    The first is None if the update cannot be repeated, the second if it cannot for
    other shapes.
    """
    if not all(isinstance(t, FunctionalTensor) for t in tensors):
        return None, None
    fakes = [from_fun(tensor) for tensor in tensors]
    if len(set(map(storage_of, fakes))) < len(fakes):
        return None, None
    with torch._C.DisableTorchFunction():
        kind = tuple((Layout.of(fake), fake.layout) for fake in fakes)
        shape = fakes[0].shape
        if not shape.numel() or not all(_has_shape(fake, shape) for fake in fakes):
            return kind, None
        return kind, tuple((f.dtype, f.device, f.layout, not f.dim()) for f in fakes)


def _has_shape(fake: torch.Tensor, shape: torch.Size) -> bool:
    """Return whether a tensor is contiguous and has a given shape, or has no axis."""
    strides = make_contiguous_strides_for(shape)
    return not fake.dim() or (fake.shape == shape and fake.stride() == strides)


def _nodes_of(tensors: Sequence[torch.Tensor]) -> list[torch.fx.Node]:
    """Return the nodes that compute the present values of tensors."""
    tracer: Any = get_proxy_mode().tracer
    return [get_proxy_slot(from_fun(t), tracer).proxy.node for t in tensors]


@dataclass(frozen=True)
class _Update:
    """The traced update of one parameter.

    Attributes:
        nodes: The nodes of the update.
        before: Nodes of the parameter, its gradient and its state before the update.
        behind: Nodes of the same tensors after the update.
        constants: Identities of numbers that are the same objects in all updates; all
            other numbers are computed for each.
    """

    nodes: Sequence[torch.fx.Node]
    before: Sequence[torch.fx.Node]
    behind: Sequence[torch.fx.Node]
    constants: frozenset[int]

    @property
    def is_pointwise(self) -> bool:
        """True if all operations are pointwise, on the parameter's shape or scalars."""
        shape = self.before[0].meta["val"].shape
        return len(shape) > 0 and all(
            torch.Tag.pointwise in node.target.tags
            and _has_shape(node.meta["val"], shape)
            for node in self.nodes
            if isinstance(node.meta["val"], torch.Tensor)
        )

    @classmethod
    def since(
        cls,
        last: torch.fx.Node,
        before: Sequence[torch.fx.Node],
        tensors: Sequence[Any],
        constants: frozenset[int],
    ) -> "_Update | None":
        """Return the update behind a node; None if it cannot be repeated."""
        nodes = []
        while (last := last.next).op != "root":
            nodes.append(last)
        behind = _nodes_of(tensors)
        storages = {storage_of(node.meta["val"]) for node in before}
        for node in nodes:
            value = node.meta.get("val")
            if node.op != "call_function" or "eager_input_vals" in node.meta:
                return None
            if isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool):
                continue
            if not isinstance(value, torch.Tensor) or storage_of(value) in storages:
                return None  # a view
            storages.add(storage_of(value))
            with torch._C.DisableTorchFunction():
                if Layout.of(fresh_fake(value)) != Layout.of(value):
                    return None
        changed = zip(tensors, before, behind, strict=True)
        if not all(t.is_base_tensor() for t, old, new in changed if old is not new):
            return None
        return cls(nodes, before, behind, constants)

    def repeat(self, tensors: Sequence[Any], shape: torch.Size | None) -> None:
        """Record the same update of another parameter's tensors, of another shape."""
        tracer: Any = get_proxy_mode().tracer
        graph = tracer.graph
        now = _nodes_of(tensors)
        copies: dict[Any, Any] = dict(zip(self.before, now, strict=True))
        numbers: dict[int, float] = {}

        def own(leaf: Any) -> Any:
            if isinstance(leaf, torch.fx.Node):
                return copies.get(leaf, leaf)
            if type(leaf) is float and id(leaf) not in self.constants:
                # Programs name numbers by identity: this is another object.
                return numbers.setdefault(id(leaf), leaf * 1.0)
            return leaf

        for node in self.nodes:
            given = (node.args, dict(node.kwargs))
            args, kwargs = torch.fx.node.map_aggregate(given, own)
            packet = getattr(node.target, "overloadpacket", None)
            name = packet and graph._target_to_str(packet.__name__)
            copied = graph.create_node(node.op, node.target, args, kwargs, name)
            value = node.meta["val"]
            copied.meta = dict(node.meta)
            if isinstance(value, torch.Tensor):
                value = fresh_fake(value, shape if value.dim() else None)
                if shape is not None and value.dim():
                    copied.meta["tensor_meta"] = node.meta["tensor_meta"]._replace(
                        shape=value.shape, stride=value.stride()
                    )
            copied.meta["val"] = value
            copies[node] = copied
        for tensor, old, new in zip(tensors, self.before, self.behind, strict=True):
            if new is not old:
                value = copies[new].meta["val"]
                track(tracer, copies[new], value)
                tensor.replace_(value)
                tensor.commit_update()
                tensor.sync()
