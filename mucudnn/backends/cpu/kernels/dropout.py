"""Dropout with a mask that is a function of seed, step and position.

Philox (Salmon et al., 2011) encrypts a counter: block b of the positions has the key
(seed, step) and counts from b 2^64, so any thread can make any block, and the gradient
makes the same mask again instead of keeping it. Each element takes 16 bits, so that
the probability is p to within 2^-17.
"""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.elementwise import keep
from mucudnn.backends.cpu.kernels.tiles import KernelCall, Run

__all__ = ["OPERATIONS"]

_BLOCK = 65536  # positions; part of the definition of a mask
_WORD = 1 << 64


def dropout(call: KernelCall) -> None:
    """Y = x / (1 - p) or, with probability p, 0.

    Rows of a tensor begin at a position `offset` of it.
    """
    x, y = call.inputs[0].reshape(-1), call.outputs[0].reshape(-1)
    p = call.attrs["p"]
    key = call.attrs["seed"] % _WORD | int(call.inputs[1]) % _WORD << 64
    if p >= 1:
        y[...] = 0
        return

    offset = call.attrs.get("offset", 0)
    end = offset + x.size

    def block(number: int) -> None:
        start = max(offset, number * _BLOCK)
        stop = min(end, (number + 1) * _BLOCK)
        part = slice(start - offset, stop - offset)
        out = y[part]
        inside = start - number * _BLOCK, stop - number * _BLOCK
        keep(_mask(key, number, *inside, p), x[part], out)
        out *= 1 / (1 - p)

    call.share(range(offset // _BLOCK, -(-end // _BLOCK)), block)


def _mask(key: int, block: int, start: int, stop: int, p: float) -> Any:
    """True for what stays of some positions of a block."""
    source = np.random.Generator(np.random.Philox(key=key, counter=block << 64))
    # Unlike `random_raw`, this lets other threads run.
    words = source.integers(0, _WORD - 1, -(-stop // 4), np.uint64, endpoint=True)
    halves = words.astype("<u8", copy=False).view("<u2")[start:stop]
    threshold = min(round(p * 65536), 65535)
    return np.greater_equal(halves, np.uint16(threshold))


OPERATIONS: dict[str, Run] = {"dropout": dropout}
