"""Losses with their gradients, and accuracy.

Each tile leaves its part of the sum in a list. The parts are added in order, in double
precision, so that the loss does not depend on the scheduling of workers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.reductions import total_dot
from mucudnn.backends.cpu.kernels.tiles import (
    BLOCK_BYTES,
    KernelCall,
    Part,
    Run,
    as_ncs,
    tiles,
)

_PIECES = 8  # least tiles: even a small batch of logits is worth two workers


def softmax_cross_entropy(call: KernelCall) -> None:
    """Compute (mean of -log p[label], log p).

    If the rows are a slice, the mean is over `count` labels, those of the whole batch.

    Raises:
        ValueError: A label is not a class.
    """
    x, logs = as_ncs(call.inputs[0]), as_ncs(call.outputs[1])
    labels = call.inputs[1].reshape(x.shape[0], x.shape[2])

    def tile(part: tuple[slice, slice]) -> float:
        n, s = part
        out = logs[n, :, s]
        chosen = _checked(labels[n, s], x.shape[1])
        highest = np.maximum.reduce(x[n, :, s], axis=1, keepdims=True)
        np.subtract(x[n, :, s], highest, out=out, dtype=out.dtype)
        picked = np.take_along_axis(out, chosen[:, None], axis=1)
        total = np.log(np.add.reduce(np.exp(out), axis=1, keepdims=True))
        out -= total
        return float(np.sum(total - picked, dtype=np.float64))

    total = _ordered_sum(call, _pixel_tiles(x), tile)
    call.outputs[0][...] = total / call.attrs.get("count", labels.size)


def softmax_cross_entropy_grad(call: KernelCall) -> None:
    """Compute (p - [1 at the label]) dloss / number of labels, from log p."""
    logs, dx = as_ncs(call.inputs[0]), as_ncs(call.outputs[0])
    labels = call.inputs[1].reshape(logs.shape[0], logs.shape[2])
    factor = float(call.inputs[2]) / call.attrs.get("count", labels.size)

    def tile(part: tuple[slice, slice]) -> None:
        n, s = part
        alike = dx.dtype == logs.dtype
        out = dx[n, :, s] if alike else np.empty_like(logs[n, :, s])
        chosen = _checked(labels[n, s], logs.shape[1])[:, None]
        right = np.expm1(np.take_along_axis(logs[n, :, s], chosen, axis=1)) * factor
        np.exp(logs[n, :, s], out=out)
        out *= factor
        np.put_along_axis(out, chosen, right, axis=1)
        if not alike:
            dx[n, :, s] = out

    call.share(_pixel_tiles(logs), tile)


def mean_squared_error(call: KernelCall) -> None:
    """Compute the mean of (prediction - target)²."""
    a, b = (v.reshape(-1) for v in call.inputs)

    def tile(part: tuple[slice]) -> float:
        difference = a[part] - b[part]
        return total_dot(difference, difference)

    total = _ordered_sum(call, tiles(a.shape, BLOCK_BYTES // a.itemsize), tile)
    call.outputs[0][...] = total / call.attrs.get("count", a.size)


def mean_squared_error_grad(call: KernelCall) -> None:
    """Compute 2 (prediction - target) dloss / number of elements."""
    a, b = (v.reshape(-1) for v in call.inputs[:2])
    out = call.outputs[0].reshape(-1)
    factor = 2 * float(call.inputs[2]) / call.attrs.get("count", a.size)

    def tile(part: Part) -> None:
        np.subtract(a[part], b[part], out=out[part])
        out[part] *= factor

    call.tiles_of(a, tile)


def accuracy(call: KernelCall) -> None:
    """Count the labels that have fewer than k logits above their own.

    A third input is a previous count, whose memory the result shares.
    """
    x = as_ncs(call.inputs[0])
    labels = call.inputs[1].reshape(x.shape[0], x.shape[2])
    before = call.inputs[2] if len(call.inputs) > 2 else 0

    def tile(part: tuple[slice, slice]) -> float:
        n, s = part
        logits = x[n, :, s]
        chosen = _checked(labels[n, s], x.shape[1])
        own = np.take_along_axis(logits, chosen[:, None], axis=1)
        above = np.count_nonzero(np.greater(logits, own), axis=1)
        # No logit exceeds a NaN, but a NaN is not a correct answer.
        hit = np.logical_and(above < call.attrs["k"], own[:, 0] == own[:, 0])
        return float(np.count_nonzero(hit))

    right = _ordered_sum(call, _pixel_tiles(x), tile)
    call.outputs[0][...] = before + int(right)


def _pixel_tiles(x: Any) -> list[Any]:
    N, C, S = x.shape
    piece = min(BLOCK_BYTES // x.itemsize, -(-x.size // _PIECES))
    return tiles((N, S), max(1, piece // C))


def _checked(labels: Any, classes: int) -> Any:
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= classes:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"label {wrong} is not a class: logits of {classes} classes take labels "
            f"from 0 to {classes - 1}"
        )
    return labels


def _ordered_sum(
    call: KernelCall, items: Sequence[Any], fn: Callable[[Any], float]
) -> float:
    parts = [0.0] * len(items)

    def one(number: int) -> None:
        parts[number] = fn(items[number])

    call.share(range(len(items)), one)
    return sum(parts)


OPERATIONS: dict[str, Run] = {
    "accuracy": accuracy,
    "mean_squared_error": mean_squared_error,
    "mean_squared_error_grad": mean_squared_error_grad,
    "softmax_cross_entropy": softmax_cross_entropy,
    "softmax_cross_entropy_grad": softmax_cross_entropy_grad,
}
