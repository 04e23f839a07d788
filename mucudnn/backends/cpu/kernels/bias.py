"""One number a channel added, and its gradient: sums over everything but channels."""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.sums import channel_chunks, row_sums
from mucudnn.backends.cpu.kernels.tiles import BLOCK_BYTES, KernelCall, Run, as_ncs

__all__ = ["OPERATIONS"]


def bias(call: KernelCall) -> None:
    """Y = x + b, b of shape (C,) along axis 1."""
    x, y = as_ncs(call.inputs[0]), as_ncs(call.outputs[0])
    b = call.inputs[1][:, None]

    def tile(part: tuple[slice, ...]) -> None:
        np.add(x[part], b[part[1]], out=y[part])

    call.tiles_of(x, tile, 2 * BLOCK_BYTES)


def bias_grad(call: KernelCall) -> None:
    """The sum of dy over samples and pixels."""
    dy, db = as_ncs(call.inputs[0]), call.outputs[0]

    def block(item: tuple[slice, list[tuple[slice, ...]]]) -> None:
        channels, chunks = item
        total: Any = 0.0
        for chunk in chunks:
            total = total + row_sums(dy[chunk])
        db[channels] = total

    call.share(channel_chunks(dy.shape, BLOCK_BYTES // dy.itemsize), block)


OPERATIONS: dict[str, Run] = {"bias": bias, "bias_grad": bias_grad}
