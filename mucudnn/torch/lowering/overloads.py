"""Which of PyTorch's overloads writes a result into a tensor that is there."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mucudnn.torch.capture.ctc import padded_ctc

__all__ = ["as_laid_out", "in_place_variant"]


_REDUCED = frozenset(
    {
        torch.ops.aten.binary_cross_entropy.default,
        torch.ops.aten.mse_loss.default,
        torch.ops.aten.smooth_l1_loss.default,
        torch.ops.aten.soft_margin_loss.default,
    }
)
"""Losses whose mean, or sum, lies in the storage of all that it is of."""


def as_laid_out(
    function: Any, result: torch.Tensor, first: torch.Tensor | None
) -> Callable[..., Any]:
    """What makes a result that lies as it is said to, by the same numbers.

    A graph has `bernoulli_`, which draws into a tensor as that lies, as an operation
    that draws for a contiguous one: another order of the same draws. Dropout behind
    attention, for one, is of tensors that are not contiguous.

    Args:
        function: What the graph calls.
        result: As it is said to be.
        first: The first operand.
    """
    if function is torch.ops.aten.bernoulli.p:
        if not result.is_contiguous():
            return _drawn_into
        if first is not None and not first.is_contiguous():
            return _drawn_densely
    if function is torch.ops.aten._ctc_loss.Tensor:
        return padded_ctc
    if function in _REDUCED and result.numel() == 1:
        return _compact(function)
    if function is torch.ops.aten.mkldnn_rnn_layer.default:
        return _recurrent
    return function  # type: ignore[no-any-return]


@functools.cache
def _compact(function: Any) -> Callable[..., Any]:
    """A reduced loss without the storage of the whole one, which its kernel keeps."""

    def compact(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = function(*args, **kwargs)
        return loss.clone()

    compact.__qualname__ = f"_compact({function})"  # by which plans are remembered
    return compact


def _recurrent(*args: Any) -> Any:
    """A layer of an LSTM, and what its gradients need, which it keeps for autograd."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


def _drawn_into(like: torch.Tensor, p: float) -> torch.Tensor:
    """Zeros and ones, drawn in the order in which a tensor's elements lie."""
    return torch.empty_like(like).bernoulli_(p)


def _drawn_densely(like: torch.Tensor, p: float) -> torch.Tensor:
    """The same numbers, contiguous."""
    return _drawn_into(like, p).contiguous()


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
