"""What PyTorch's eager step moves, counted as `bench.traffic` counts ours.

A step of the same network runs over tensors without memory, and every operation that
PyTorch dispatches is noted with the bytes of the tensors it is given and makes; what it
overwrites counts twice. Views move nothing. Batch norm reads its input once more for
the statistics, and its gradient reads both again: no kernel keeps an image. Updates are
those of many parameters at once, as on a GPU. Convolutions count their operands once.

The step runs under the processor's autocast, which narrows what a GPU's does here.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.step_torch import NETWORKS
from bench.traffic_counts import Traffic, rates_of

__all__ = ["NETWORKS", "eager_traffic"]

_aten = torch.ops.aten
_AGAIN: Mapping[Any, tuple[int, ...]] = {
    _aten.native_batch_norm.default: (0,),
    _aten.native_batch_norm_backward.default: (0, 1),
}
"""Operation -> positions of what it reads twice, in two launches."""

_EMPTY = (_aten.empty, _aten.empty_like)


def eager_traffic(
    model: str,
    shape: Sequence[int],
    labels: Sequence[int],
    precision: str | None,
    layout: str,
) -> Traffic:
    """What one step of a network moves.

    Args:
        model: Of `NETWORKS`.
        shape: Of the images.
        labels: The labels' shape.
        precision: What autocast narrows to; None for float32.
        layout: "NCHW" or "NHWC".
    """
    last = torch.channels_last if layout == "NHWC" else torch.contiguous_format
    counting = _Counting(Traffic(rates_of(precision)))
    with FakeTensorMode():
        network = NETWORKS[model]().train()
        for weight in network.parameters():
            if weight.ndim == len(shape):
                weight.data = weight.data.contiguous(memory_format=last)
        optimizer = torch.optim.SGD(
            network.parameters(), lr=1e-3, momentum=0.9, foreach=True
        )
        x = torch.empty(tuple(shape)).contiguous(memory_format=last)
        y = torch.zeros(tuple(labels), dtype=torch.long)
        for counted in (nullcontext(), counting):  # momentum is made in the first
            with counted:
                optimizer.zero_grad()
                with _narrowed(precision):
                    loss = nn.functional.cross_entropy(network(x), y)
                loss.backward()
                optimizer.step()
    return counting.traffic


def _narrowed(precision: str | None) -> Any:
    if precision is None:
        return nullcontext()
    return torch.autocast("cpu", getattr(torch, precision))


class _Counting(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
    """Notes what is launched."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute it, and count it."""
        result = op(*args, **(kwargs or {}))
        if _moves(op):
            for launched in _launches(op, args, result):
                self.traffic.add(*launched)
        return result


def _launches(op: Any, args: Any, result: Any) -> Iterator[tuple[int, int, float]]:
    """Launches, bytes and FLOPs of each kernel behind an operation."""
    if op is _aten.convolution.default:
        x, w, _ = args[:3]
        image = x if args[6] else result  # the side that has one window an element
        yield 1, _nbytes((x, w, result)), _flops(w, image)
        if args[2] is not None:  # added by a kernel of its own
            yield 1, _nbytes((result, result, args[2])), 0.0
    elif op is _aten.convolution_backward.default:
        dy, x, w = args[:3]
        image = x if args[7] else dy
        dx, dw, db = result
        for made, read in ((dx, w), (dw, x)):
            if made is not None:
                yield 1, _nbytes((dy, read, made)), _flops(w, image)
        if db is not None:
            yield 1, _nbytes((dy, db)), 0.0
    elif op in (_aten.mm.default, _aten.addmm.default):
        a, b = args[-2:]
        yield 1, _nbytes((args, result)), 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
    else:
        again = _AGAIN.get(op, ())
        twice = _nbytes([args[i] for i in again])
        yield 1 + bool(again), _nbytes((args, _made(op, args, result))) + twice, 0.0


def _made(op: Any, args: Any, result: Any) -> Any:
    """What an operation writes: of one that returns nothing, its first argument."""
    return args[0] if result is None else result


def _flops(w: Any, image: Any) -> float:
    """Of a convolution whose windows are as many as an image has places."""
    places: int = math.prod(image.shape) // image.shape[1]
    weights: int = math.prod(w.shape)
    return 2.0 * places * weights


def _moves(op: Any) -> bool:
    """Whether an operation launches anything: views and empty memory do not."""
    if op.namespace != "aten" or op.is_view or op.overloadpacket in _EMPTY:
        return False
    returns = op._schema.returns
    shares = [r.alias_info for r in returns if r.alias_info is not None]
    return not shares or any(a.is_write for a in shares)


def _nbytes(values: Any) -> int:
    """Bytes of all tensors within; what is expanded is there once."""
    if isinstance(values, torch.Tensor):
        axes = zip(values.shape, values.stride(), strict=True)
        there: int = math.prod(n for n, step in axes if step)
        return there * int(values.element_size())
    if isinstance(values, (list, tuple)):
        return sum(map(_nbytes, values))
    return 0
