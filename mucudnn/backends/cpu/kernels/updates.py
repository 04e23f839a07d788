"""Optimizer steps in PyTorch's conventions, and kernels on gradients.

If the loss scale is state, an update's last two inputs are the scale and its counts
(`passes.graph.precision`): gradients are divided by the scale, and after an overflow
nothing changes. Such a step does not count for Adam. Before these two comes the
weight's low-precision copy, if there is one, in the type and layout of the gradient.
Copy and gradient may be `turned`: stored as (K, *taps, C) for a filter (K, C, *taps).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import Attrs, KernelCall, Run


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


def adam(attrs: Attrs, lr: float, w: Any, g: Any, m: Any, v: Any) -> None:
    """Run Adam (Kingma, Ba, 2015); `decoupled`: AdamW (Loshchilov, Hutter, 2019)."""
    # Bias corrections are folded into the rate and into epsilon.
    beta1, beta2, count = attrs["beta1"], attrs["beta2"], attrs["count"]
    root = math.sqrt(1 - beta2**count)
    rate = lr * root / (1 - beta1**count)
    decay = 1 - lr * attrs["weight_decay"] if attrs["decoupled"] else 1.0
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
    g += attrs["eps"] * root
    np.divide(m, g, out=g)
    g *= rate
    w -= g


def _update(formula: Callable[..., None], *, counted: bool = False) -> Run:
    """Make a kernel of a formula (attributes, rate, tiles of w, g, state).

    If `counted`, the step number comes before the state, and the attribute `count` is
    the number of steps that were taken, this one included.
    """

    def run(call: KernelCall) -> None:
        (w, dw, lr, *others), attrs, skipped = call.inputs, call.attrs, 0
        if attrs.get("scaled"):
            *others, scale, counts = others
            overflowed, _, skipped = counts.tolist()
            if overflowed:
                return
            factor = attrs["gradient_scale"] / (float(scale) or 1.0)  # 0 when timed
            attrs = {**attrs, "gradient_scale": factor}
        if counted:
            attrs = {**attrs, "count": int(others.pop(0)) + 1 - skipped}
        kept = len(others) - bool(attrs.get("copied"))
        factor, decay = attrs["gradient_scale"], attrs["weight_decay"]

        def block(w: Any, dw: Any, *others: Any) -> None:
            g = call.scratch.like(w)
            if attrs.get("decoupled") or not decay:
                np.multiply(dw, factor, out=g, dtype=w.dtype)
            else:
                np.multiply(w, decay, out=g)
                as_it_is = factor == 1 and dw.dtype == w.dtype
                g += dw if as_it_is else np.multiply(dw, factor, dtype=w.dtype)
            formula(attrs, float(lr), w, g, *others[:kept])
            for copy in others[kept:]:
                copy[...] = w

        if not attrs.get("turned"):
            call.flat_blocks([w, dw, *others], block)
            return
        # A copy in another layout is written after all blocks.
        call.flat_blocks([w, np.moveaxis(dw, -1, 1), *others[:kept]], block)
        for copy in others[kept:]:
            copy[...] = np.moveaxis(w, 1, -1)

    return run


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
    "adam": _update(adam, counted=True),
    "momentum": _update(momentum),
    "rmsprop": _update(rmsprop),
    "sgd": _update(sgd),
    "accumulate": accumulate,
    "adjust_loss_scale": adjust_loss_scale,
    "find_overflow": find_overflow,
}
