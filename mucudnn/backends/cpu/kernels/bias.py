"""One number a channel added, and its gradient: sums over everything but channels."""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.sums import channel_chunks, row_sums
from mucudnn.backends.cpu.kernels.tiles import (
    BLOCK_BYTES,
    Attrs,
    Inputs,
    Outputs,
    Run,
    as_ncs,
    share,
    tiles,
)
from mucudnn.backends.cpu.threads import Workers

__all__ = ["OPERATIONS", "bias", "bias_grad"]


def bias(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """Y = x + b, b of shape (C,) along axis 1."""
    x, y = as_ncs(inputs[0]), as_ncs(outputs[0])
    b = inputs[1][:, None]

    def tile(part: tuple[slice, ...]) -> None:
        np.add(x[part], b[part[1]], out=y[part])

    share(workers, tiles(x.shape, 2 * BLOCK_BYTES // x.itemsize), tile)


def bias_grad(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """The sum of dy over samples and pixels."""
    dy, db = as_ncs(inputs[0]), outputs[0]

    def block(item: tuple[slice, list[tuple[slice, ...]]]) -> None:
        channels, chunks = item
        total: Any = 0.0
        for chunk in chunks:
            total = total + row_sums(dy[chunk])
        db[channels] = total

    share(workers, channel_chunks(dy.shape, BLOCK_BYTES // dy.itemsize), block)


OPERATIONS: dict[str, Run] = {"bias": bias, "bias_grad": bias_grad}
