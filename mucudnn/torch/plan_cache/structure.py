"""What makes two lowered graphs the same to whoever measures and plans them.

Names do not: tensors and nodes are their places. Layouts, attributes, traits and the
functions that are called do, and all that may be said of a function is its name. Where
a name does not tell what runs, the graph is remembered by nobody.
"""

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.torch.lowering.lowered import Lowered

__all__ = ["Places", "Unnameable", "described", "digest_of", "structure_of"]

_TORCH = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_NAMESPACES = frozenset({"aten", "mucudnn", "prim", "prims"})
"""Of operations that the versions of PyTorch and of ours tell all about."""


class Unnameable(ValueError):  # noqa: N818  (it is a finding, not a mistake)
    """Something in a graph is not told by its name."""


class Places:
    """Names of a graph as numbers, and back.

    Args:
        lowered: Whose graph.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.tensors = tuple(lowered.graph.tensors)
        self.nodes = tuple(node.name for node in lowered.graph.nodes)
        self._tensor = {name: i for i, name in enumerate(self.tensors)}
        self._node = {name: i for i, name in enumerate(self.nodes)}

    def tensor(self, name: str) -> int | str:
        """The place of a tensor; of a copy, with what is added to it; else the name."""
        return _place(self._tensor, name)

    def node(self, name: str) -> int | str:
        """The same of a node."""
        return _place(self._node, name)


def _place(places: Mapping[str, int], name: str) -> int | str:
    first, mark, rest = name.partition("~")
    place = places.get(first)
    if place is None:
        return name
    return f"{place}~{rest}" if mark else place


def digest_of(value: Any) -> str:
    """A hash of what can be written as JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def structure_of(lowered: Lowered, places: Places) -> str:
    """A hash of everything but names.

    Raises:
        Unnameable: A function or an argument is not told by its name.
    """
    graph = lowered.graph
    tensors = [
        [
            spec.nbytes,
            spec.role.value,
            None if spec.alias is None else places.tensor(spec.alias),
            described(lowered.layouts[name]),
        ]
        for name, spec in graph.tensors.items()
    ]
    nodes = [
        [
            node.op,
            [places.tensor(name) for name in node.inputs],
            [places.tensor(name) for name in node.outputs],
            [places.tensor(name) for name in node.mutates],
            node.phase.value,
            described(node.attrs),
            described(node.traits),
            described(lowered.calls[node.name]),
        ]
        for node in graph.nodes
    ]
    ends = [
        [None if name is None else places.tensor(name) for name in lowered.inputs],
        [places.tensor(r) if isinstance(r, str) else None for r in lowered.results],
        [places.tensor(name) for name in lowered.constants],
        [places.tensor(name) for name in graph.outputs],
    ]
    return digest_of([tensors, nodes, ends])


def described(value: Any) -> Any:
    """A value as one that JSON can write, other for other values.

    Raises:
        Unnameable: A function is not told by its name.
    """
    match value:
        case enum.Enum():
            return [type(value).__name__, value.name]
        case bool() | int() | str() | None:
            return value
        case float() | complex():
            return ["number", repr(value)]
        case list() | tuple():
            return [type(value).__name__, *map(described, value)]
        case dict() | MappingProxyType():
            return {str(key): described(item) for key, item in value.items()}
        case _ if isinstance(value, _TORCH):
            return ["torch", str(value)]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = (getattr(value, f.name) for f in dataclasses.fields(value))
            return [type(value).__name__, *map(described, fields)]
        case _:
            return ["function", _named(value)]


def _named(function: Any) -> str:
    if isinstance(function, torch._ops.OpOverload):
        if function.namespace in _NAMESPACES:
            return str(function)
        raise Unnameable(f"{function} is no operation of PyTorch's own")
    name = getattr(function, "__qualname__", None)
    if not callable(function) or name is None or "<" in name:
        raise Unnameable(f"{function!r} is not told by a name")
    owner = getattr(function, "__module__", None) or type(function).__name__
    return f"{owner}.{name}"
