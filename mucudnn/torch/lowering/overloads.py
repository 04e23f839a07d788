"""Overloads of PyTorch's operators that write their results into given tensors."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.torch.capture.op_overrides import padded_ctc

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


# What normalisations save and read, as PyTorch's kernels really do.
#
# PyTorch's own model of these kernels says another type where a network's parameters
# are narrow. Statistics are in the weight's type, new running ones in that of the old.
# And the gradient of a batch norm names running statistics that it reads only where
# they were what it normalised with: in training they would live on for nothing.


_aten = torch.ops.aten


_NORMS: Mapping[Any, bool] = MappingProxyType(
    {
        _aten._native_batch_norm_legit.default: False,
        _aten._native_batch_norm_legit.no_stats: False,
        _aten._native_batch_norm_legit_functional.default: True,
        _aten.native_batch_norm.default: False,
        _aten.native_group_norm.default: False,
    }
)
"""Operation -> whether new running statistics are results, too."""


def statistics_types(function: Any, args: Sequence[Any]) -> Mapping[int, torch.dtype]:
    """Place of a result -> its type, where PyTorch's model of a kernel may be wrong.

    Args:
        function: What is called.
        args: Its operands, with or without data.
    """
    if function not in _NORMS:
        return {}
    found: dict[int, torch.dtype] = {}
    if isinstance(args[1], torch.Tensor):
        found |= {1: args[1].dtype, 2: args[1].dtype}
    if _NORMS[function]:
        running = ((3, args[3]), (4, args[4]))
        found |= {k: t.dtype for k, t in running if isinstance(t, torch.Tensor)}
    return found


def without_unread(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Operands without running statistics that the function does not look at."""
    if function is not _aten.native_batch_norm_backward.default or not args[7]:
        return args
    return (*args[:3], None, None, *args[5:])


def without_masked(
    function: Any, args: Sequence[Any], results: Sequence[Any]
) -> tuple[Any, ...]:
    """Results without gradients that were not asked for.

    PyTorch's model of a batch norm's gradient has all three; its kernel returns none
    for a mask that is off, as behind a layer that is frozen.
    """
    if function is not _aten.native_batch_norm_backward.default:
        return tuple(results)
    return tuple(
        value if on else None for value, on in zip(results, args[9], strict=True)
    )


def corrected(results: Any, types: Mapping[int, torch.dtype]) -> Any:
    """Results without data, some of other types; the same where nothing is wrong."""
    if not types:
        return results
    return tuple(
        value if types.get(k, value.dtype) == value.dtype else value.to(types[k])
        for k, value in enumerate(results)
    )
