"""Values of a graph while it is lowered, and where a node's call has them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mucudnn.torch.lowering.lowered import Call, Number, Operand

__all__ = ["Pending", "Value", "bound", "is_leaf", "times"]


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
