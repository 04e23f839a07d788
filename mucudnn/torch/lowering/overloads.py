"""Which of PyTorch's overloads writes a result into a tensor that is there."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["in_place_variant"]


@functools.cache
def in_place_variant(function: Any) -> tuple[Callable[..., Any] | None, bool]:
    """What runs a pointwise operation into a given tensor.

    Returns:
        An overload with `out`, or one that overwrites its first argument, and whether
        it is the latter. Overloads that PyTorch generates allocate and copy: they do
        not count.
    """
    if torch.Tag.pointwise not in getattr(function, "tags", ()):
        return None, False
    mine = _signature(function)
    for overload in _overloads(function.overloadpacket):
        outs = [a.name for a in overload._schema.arguments if a.is_out]
        if outs == ["out"] and _signature(overload) == mine:
            return overload, False
    namespace, name = function._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    for overload in () if packet is None else _overloads(packet):
        if _signature(overload) == mine:
            return overload, True
    return None, False


def _overloads(packet: Any) -> Iterator[Any]:
    found = (getattr(packet, name) for name in packet.overloads())
    return (f for f in found if torch.Tag.generated not in f.tags)


def _signature(function: Any) -> list[tuple[str, str]]:
    arguments = function._schema.arguments
    return [(a.name, str(a.type)) for a in arguments if not a.is_out]
