"""Kernels on gradients before the update: sums, overflow detection, loss scaling."""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import KernelCall, Run

__all__ = ["OPERATIONS"]


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


OPERATIONS: dict[str, Run] = {
    "accumulate": accumulate,
    "adjust_loss_scale": adjust_loss_scale,
    "find_overflow": find_overflow,
}
