"""Optimizer steps, in PyTorch's conventions; they overwrite weights and state."""

import math
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import (
    Attrs,
    Inputs,
    Outputs,
    Run,
    flat_blocks,
)
from mucudnn.backends.cpu.threads import Workers

__all__ = [
    "OPERATIONS",
    "accumulate",
    "adagrad",
    "adam",
    "momentum",
    "rmsprop",
    "sgd",
]


def sgd(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """W -= lr g."""
    w, dw, lr = inputs
    rate = float(lr)

    def block(w: Any, dw: Any) -> None:
        g = _gradient(w, dw, attrs)
        g *= rate
        w -= g

    flat_blocks(workers, [w, dw], block)


def momentum(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """M = mu m + g; w -= lr m, or with Nesterov's lr (g + mu m)."""
    w, dw, lr, m = inputs
    rate, mu = float(lr), attrs["momentum"]

    def block(w: Any, dw: Any, m: Any) -> None:
        g = _gradient(w, dw, attrs)
        m *= mu
        m += g
        if attrs["nesterov"]:
            g += m * mu
        else:
            g[...] = m
        g *= rate
        w -= g

    flat_blocks(workers, [w, dw, m], block)


def adam(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """Adam (Kingma and Ba, 2015); `decoupled`: AdamW (Loshchilov and Hutter, 2019)."""
    w, dw, lr, step, m, v = inputs
    beta1, beta2 = attrs["beta1"], attrs["beta2"]
    count = int(step) + 1
    root = math.sqrt(1 - beta2**count)
    rate = float(lr) * root / (1 - beta1**count)
    eps = attrs["eps"] * root
    decay = 1 - float(lr) * attrs["weight_decay"] if attrs["decoupled"] else 1.0

    def block(w: Any, dw: Any, m: Any, v: Any) -> None:
        g = _gradient(w, dw, attrs, decay=not attrs["decoupled"])
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

    flat_blocks(workers, [w, dw, m, v], block)


def adagrad(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """S += g²; w -= lr g / (sqrt(s) + eps)  (Duchi et al., 2011)."""
    w, dw, lr, s = inputs
    rate = float(lr)

    def block(w: Any, dw: Any, s: Any) -> None:
        g = _gradient(w, dw, attrs)
        s += np.square(g)
        _scaled_step(w, g, s, rate, attrs["eps"])

    flat_blocks(workers, [w, dw, s], block)


def rmsprop(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """S = alpha s + (1 - alpha) g²; w -= lr g / (sqrt(s) + eps)."""
    w, dw, lr, s = inputs
    rate, alpha = float(lr), attrs["alpha"]

    def block(w: Any, dw: Any, s: Any) -> None:
        g = _gradient(w, dw, attrs)
        square = np.square(g)
        square *= 1 - alpha
        s *= alpha
        s += square
        _scaled_step(w, g, s, rate, attrs["eps"])

    flat_blocks(workers, [w, dw, s], block)


def accumulate(
    workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs
) -> None:
    """Total += factor part."""
    factor = attrs["factor"]

    def block(total: Any, part: Any) -> None:
        total += part if factor == 1 else part * factor

    flat_blocks(workers, inputs, block)


def _gradient(w: Any, dw: Any, attrs: Attrs, decay: bool = True) -> Any:
    """A copy of the gradient, scaled, with the weight decay's if asked for."""
    g = np.multiply(dw, attrs["gradient_scale"])
    if decay and attrs["weight_decay"]:
        g += w * attrs["weight_decay"]
    return g


def _scaled_step(w: Any, g: Any, s: Any, rate: float, eps: float) -> None:
    """W -= rate g / (sqrt(s) + eps); overwrites g."""
    root = np.sqrt(s)
    root += eps
    g /= root
    g *= rate
    w -= g


OPERATIONS: dict[str, Run] = {
    "accumulate": accumulate,
    "adagrad": adagrad,
    "adam": adam,
    "momentum": momentum,
    "rmsprop": rmsprop,
    "sgd": sgd,
}
