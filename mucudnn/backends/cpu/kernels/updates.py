"""Optimizer steps in PyTorch's conventions, and kernels on gradients.

If the loss scale is state, an update's last two inputs are the scale and its counts
(`passes.graph.precision`): gradients are divided by the scale, and after an overflow
nothing changes. Such a step does not count for Adam. Before these two comes the
weight's low-precision copy, if there is one, in the type and layout of the gradient.
Copy and gradient may be `turned`: stored as (K, *taps, C) for a filter (K, C, *taps).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import Attrs, KernelCall, Run
from mucudnn.backends.cpu.threads import Scratch


def sgd(attrs: Attrs, rate: float, w: Any, g: Any) -> None:
    """Compute w -= lr g."""
    g *= rate
    w -= g


def momentum(attrs: Attrs, rate: float, w: Any, g: Any, m: Any) -> None:
    """Compute m = mu m + g; w -= lr m, or with Nesterov's lr (g + mu m)."""
    m *= attrs["momentum"]
    m += g
    if attrs["nesterov"]:
        g += m * attrs["momentum"]
        g *= rate
    else:
        np.multiply(m, rate, out=g)
    w -= g


def adagrad(attrs: Attrs, rate: float, w: Any, g: Any, s: Any) -> None:
    """Compute s += g²; w -= lr g / (sqrt(s) + eps)  (Duchi et al., 2011)."""
    s += np.square(g)
    _scaled_step(w, g, s, rate, attrs["eps"])


def rmsprop(attrs: Attrs, rate: float, w: Any, g: Any, s: Any) -> None:
    """Compute s = alpha s + (1 - alpha) g²; w -= lr g / (sqrt(s) + eps)."""
    square = np.square(g)
    square *= 1 - attrs["alpha"]
    s *= attrs["alpha"]
    s += square
    _scaled_step(w, g, s, rate, attrs["eps"])


def adam(call: KernelCall) -> None:
    """Run Adam (Kingma, Ba, 2015); `decoupled`: AdamW (Loshchilov, Hutter, 2019)."""
    (w, dw, lr, step, m, v, *copies), attrs, skipped = _unscaled(call)
    if attrs is None:
        return
    # Bias corrections are folded into the rate and into epsilon.
    beta1, beta2 = attrs["beta1"], attrs["beta2"]
    count = int(step) + 1 - skipped
    root = math.sqrt(1 - beta2**count)
    rate = float(lr) * root / (1 - beta1**count)
    eps = attrs["eps"] * root
    decay = 1 - float(lr) * attrs["weight_decay"] if attrs["decoupled"] else 1.0

    def block(w: Any, dw: Any, m: Any, v: Any, *copies: Any) -> None:
        g = _gradient(w, dw, attrs, call.scratch, decay=not attrs["decoupled"])
        if decay != 1:
            w *= decay
        change = g * (1 - beta1)
        m *= beta1
        m += change
        np.square(g, out=g)
        g *= 1 - beta2
        v *= beta2
        v += g
        np.sqrt(v, out=g)
        g += eps
        np.divide(m, g, out=g)
        g *= rate
        w -= g
        for copy in copies:
            copy[...] = w

    _in_blocks(call, (w, dw, m, v), copies, block)


def _unscaled(call: KernelCall) -> tuple[Sequence[Any], Attrs | None, int]:
    """Return operands, unscaling attributes (None: skip), and skipped steps."""
    if not call.attrs.get("scaled"):
        return call.inputs, call.attrs, 0
    *operands, scale, counts = call.inputs
    overflowed, _, skipped = counts.tolist()
    factor = call.attrs["gradient_scale"] / (float(scale) or 1.0)  # 0 when timed
    attrs = None if overflowed else {**call.attrs, "gradient_scale": factor}
    return operands, attrs, skipped


def _update(formula: Callable[..., None]) -> Run:
    """Make a kernel of a formula (attributes, rate, tiles of w, g, state)."""

    def run(call: KernelCall) -> None:
        (w, dw, lr, *others), attrs, _ = _unscaled(call)
        if attrs is None:
            return
        kept = len(others) - bool(attrs.get("copied"))
        state, copies = others[:kept], others[kept:]

        def block(w: Any, dw: Any, *others: Any) -> None:
            g = _gradient(w, dw, attrs, call.scratch)
            formula(attrs, float(lr), w, g, *others[:kept])
            for copy in others[kept:]:
                copy[...] = w

        _in_blocks(call, (w, dw, *state), copies, block)

    return run


def _in_blocks(
    call: KernelCall,
    arrays: Sequence[Any],
    copies: Sequence[Any],
    block: Callable[..., None],
) -> None:
    """Update (w, dw, *state) block by block; copies likewise or, if turned, after."""
    if not call.attrs.get("turned"):
        call.flat_blocks([*arrays, *copies], block)
        return
    w, dw, *state = arrays
    call.flat_blocks([w, np.moveaxis(dw, -1, 1), *state], block)
    for copy in copies:
        copy[...] = np.moveaxis(w, 1, -1)


def _gradient(
    w: Any, dw: Any, attrs: Attrs, scratch: Scratch, decay: bool = True
) -> Any:
    g, factor = scratch.like(w), attrs["gradient_scale"]
    if not decay or not attrs["weight_decay"]:
        return np.multiply(dw, factor, out=g, dtype=w.dtype)
    np.multiply(w, attrs["weight_decay"], out=g)
    as_it_is = factor == 1 and dw.dtype == w.dtype
    g += dw if as_it_is else np.multiply(dw, factor, dtype=w.dtype)
    return g


def accumulate(call: KernelCall) -> None:
    """Compute total += factor part."""
    factor = call.attrs["factor"]

    def block(total: Any, part: Any) -> None:
        total += part if factor == 1 else part * factor

    call.flat_blocks(call.inputs, block)


def find_overflow(call: KernelCall) -> None:
    """Set counts[0] = 1 if a gradient is infinite or NaN."""
    gradient, counts = call.inputs

    def block(part: Any) -> None:
        if not np.isfinite(part).all():
            counts[0] = 1

    call.flat_blocks([gradient], block)


def adjust_loss_scale(call: KernelCall) -> None:
    """Update the loss scale for the next step, within its limits, and the counts."""
    (scale, counts), attrs = call.inputs, call.attrs
    overflowed, good, skipped = counts.tolist()
    if overflowed:
        good, skipped = 0, skipped + 1
        scale[...] = max(float(scale) * attrs["backoff"], attrs["least"])
    elif (good := good + 1) >= attrs["interval"]:
        good = 0
        scale[...] = min(float(scale) * attrs["growth"], attrs["most"])
    counts[:] = 0, good, skipped


def _scaled_step(w: Any, g: Any, s: Any, rate: float, eps: float) -> None:
    """Compute w -= rate g / (sqrt(s) + eps); overwrite g."""
    root = np.sqrt(s)
    root += eps
    g /= root
    g *= rate
    w -= g


OPERATIONS: dict[str, Run] = {
    "adagrad": _update(adagrad),
    "adam": adam,
    "momentum": _update(momentum),
    "rmsprop": _update(rmsprop),
    "sgd": _update(sgd),
    "accumulate": accumulate,
    "adjust_loss_scale": adjust_loss_scale,
    "find_overflow": find_overflow,
}
