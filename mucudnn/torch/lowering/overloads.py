"""Functions that run PyTorch's operators as a lowered graph needs them.

Overloads that write into given tensors, results in the layout of the graph, and
corrections of PyTorch's models of its own kernels.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mucudnn.torch.capture.op_overrides import padded_ctc
from mucudnn.torch.capture.undeclared_writes import direct_kernel

_REDUCED = frozenset(
    {
        torch.ops.aten.binary_cross_entropy.default,
        torch.ops.aten.mse_loss.default,
        torch.ops.aten.smooth_l1_loss.default,
        torch.ops.aten.soft_margin_loss.default,
    }
)
"""Losses whose mean or sum is a view of the storage of the unreduced loss."""


def as_laid_out(
    function: Any, result: torch.Tensor, first: torch.Tensor | None
) -> Callable[..., Any]:
    """Return a function that has a result of the captured layout, with the same values.

    `bernoulli_` draws in the memory order of its tensor. A graph has it as an operation
    that draws for a contiguous tensor, in another order. Dropout behind attention, for
    example, is applied to tensors that are not contiguous. `first` is the first
    operand.
    """
    if (direct := direct_kernel(function)) is not None:
        return direct
    if function is torch.ops.aten.bernoulli.p:
        if not result.is_contiguous():
            return _bernoulli_like
        if first is not None and not first.is_contiguous():
            return _contiguous_bernoulli_like
    if function is torch.ops.aten._ctc_loss.Tensor:
        return padded_ctc
    if (
        function in _VIEWS_CHANGED
        and first is not None  # which may be a part of a larger storage
        and first.untyped_storage().nbytes() > result.untyped_storage().nbytes()
    ):
        return _of_part(function)
    if function in _REDUCED and result.numel() == 1:
        return _compact(function)
    if function is torch.ops.aten.mkldnn_rnn_layer.default:
        return lstm_layer
    return function  # type: ignore[no-any-return]


@functools.cache
def _compact(function: Any) -> Callable[..., Any]:
    """Return a reduced loss that does not keep the storage of the unreduced loss."""

    def compact(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = function(*args, **kwargs)
        return loss.clone()

    compact.__qualname__ = f"_compact({function})"  # by which plans are remembered
    return compact


_VIEWS_CHANGED = {
    torch.ops.aten.slice_scatter.default: torch.ops.aten.slice.Tensor,
    torch.ops.aten.select_scatter.default: torch.ops.aten.select.int,
    torch.ops.aten.diagonal_scatter.default: torch.ops.aten.diagonal.default,
    torch.ops.aten.copy.default: None,  # all of it
}
"""Operation that returns a copy with a changed view -> the view. PyTorch's kernels copy
the whole storage of their first operand, of which it may be a small part."""


@functools.cache
def _of_part(function: Any) -> Callable[..., Any]:
    """Return a function like an operation of `_VIEWS_CHANGED` that copies less.

    It copies the first operand instead of the whole storage of the first operand.
    """
    view = _VIEWS_CHANGED[function]

    def of_part(
        part: torch.Tensor, source: torch.Tensor, *where: Any, **named: Any
    ) -> torch.Tensor:
        own = torch.empty_strided(
            part.shape, part.stride(), dtype=part.dtype, device=part.device
        )
        if view is None:
            return own.copy_(source)  # `where` says whether it may wait
        view(own.copy_(part), *where, **named).copy_(source)
        return own

    of_part.__qualname__ = f"_of_part({function})"  # by which plans are remembered
    return of_part


def lstm_layer(*args: Any) -> Any:
    """Run a layer of an LSTM with the workspace that its gradients need.

    The kernel fills it only while gradients are enabled.
    """
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


def _bernoulli_like(like: torch.Tensor, p: float) -> torch.Tensor:
    """Draw zeros and ones in the memory order of a tensor."""
    return torch.empty_like(like).bernoulli_(p)


def _contiguous_bernoulli_like(like: torch.Tensor, p: float) -> torch.Tensor:
    """Draw zeros and ones in the memory order of a tensor, and make them contiguous."""
    return _bernoulli_like(like, p).contiguous()


@functools.cache
def in_place_variant(function: Any) -> tuple[Callable[..., Any] | None, bool]:
    """Return an overload that runs a pointwise operation into a given tensor.

    Returns:
        An overload with `out` and False, or one that overwrites its first argument and
        True. Overloads that PyTorch generates allocate and copy: they do not count.
    """
    if torch.Tag.pointwise not in getattr(function, "tags", ()):
        return None, False
    if function is torch.ops.aten.mul.Scalar:
        return None, False  # in place, PyTorch rounds the number to low precision first
    mine = _signature(function)
    # An overload with `out` comes first: it leaves the operands intact.
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
    return [(a.name, str(a.type)) for a in function._schema.arguments if not a.is_out]


# Corrections of PyTorch's models (meta functions) of normalization kernels.
#
# The models have wrong types where parameters are of low precision: the kernels save
# statistics in the weight's type, on CUDA those of a batch norm in float32, and new
# running statistics in the type of the old ones.
# The gradient of a batch norm takes running statistics, but reads them only if they
# were used to normalize: in training they would be kept in memory for nothing.


_aten = torch.ops.aten

_WITH_RUNNING = _aten._native_batch_norm_legit_functional.default
"""The norm that has new running statistics among its results."""

_NORMS = frozenset(
    {
        _WITH_RUNNING,
        _aten._native_batch_norm_legit.default,
        _aten._native_batch_norm_legit.no_stats,
        _aten.native_batch_norm.default,
        _aten.native_group_norm.default,
    }
)


def corrected(function: Any, args: Sequence[Any], results: Any) -> Any:
    """Return fake results of a norm in the types of its kernel; others unchanged."""
    if function not in _NORMS:
        return results
    types: dict[int, torch.dtype] = {}
    if isinstance(args[1], torch.Tensor):
        saved = args[1].dtype
        if args[0].is_cuda and function is not _aten.native_group_norm.default:
            saved = torch.promote_types(saved, torch.float32)
        types |= {1: saved, 2: saved}
    if function is _WITH_RUNNING:
        running = ((3, args[3]), (4, args[4]))
        types |= {k: t.dtype for k, t in running if isinstance(t, torch.Tensor)}
    return tuple(
        value if types.get(k, value.dtype) == value.dtype else value.to(types[k])
        for k, value in enumerate(results)
    )


def without_unread(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return operands without the running statistics that a function does not read."""
    unread = function is _aten.cudnn_batch_norm_backward.default  # always in training
    if function is _aten.native_batch_norm_backward.default:
        unread = args[7]
    return (*args[:3], None, None, *args[5:]) if unread else args


def without_masked(
    function: Any, args: Sequence[Any], results: Sequence[Any]
) -> tuple[Any, ...]:
    """Return results without the gradients that the mask excludes.

    PyTorch's model of a batch norm's gradient has all three; its kernel returns None
    where the mask is off, as behind a frozen layer.
    """
    if function is not _aten.native_batch_norm_backward.default:
        return tuple(results)
    return tuple(
        value if on else None for value, on in zip(results, args[9], strict=True)
    )
