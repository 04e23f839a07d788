"""Dropout with a mask that is a function of seed, step and position.

Philox (Salmon et al., 2011) encrypts a counter: block b of the positions has the key
(seed, step) and counts from b 2^64. Any thread can generate any block, and the gradient
regenerates the mask instead of saving it. Each element takes 16 bits, so the
probability is p to within 2^-17.
"""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.elementwise import apply_mask
from mucudnn.backends.cpu.kernels.tiles import KernelCall, Run

__all__ = ["OPERATIONS"]

_BLOCK = 65536  # positions per Philox key and counter; defines the mask
_WORD = 1 << 64


def dropout(call: KernelCall) -> None:
    """Compute y = x / (1 - p) or, with probability p, 0.

    A row slice of a tensor begins at position `offset` of the tensor. Slices of images
    are runs of `run` elements, whose starts are `apart` positions distant.
    """
    run = max(1, call.attrs.get("run", call.inputs[0].size))
    x, y = (v.reshape(-1, run) for v in (call.inputs[0], call.outputs[0]))
    p = call.attrs["p"]
    key = call.attrs["seed"] % _WORD | int(call.inputs[1]) % _WORD << 64
    if p >= 1:
        y[...] = 0
        return

    offset, apart = call.attrs.get("offset", 0), call.attrs.get("apart", run)
    end = offset + (len(x) - 1) * apart + run if len(x) else offset

    def block(number: int) -> None:
        first, last = number * _BLOCK - offset, (number + 1) * _BLOCK - offset
        rows = range(max(0, first // apart), min(len(x), -(-last // apart)))
        inside = [(r, max(0, first - r * apart), last - r * apart) for r in rows]
        parts = [(r, start, min(run, stop)) for r, start, stop in inside if start < run]
        if not parts:
            return
        mask = _mask(key, number, parts[-1][0] * apart + parts[-1][2] - first, p)
        for row, start, stop in parts:
            here = row * apart - first
            out = y[row, start:stop]
            apply_mask(
                mask[here + start : here + stop], x[row, start:stop], out, call.scratch
            )
            out *= 1 / (1 - p)

    call.share(range(offset // _BLOCK, -(-end // _BLOCK)), block)


def _mask(key: int, block: int, count: int, p: float) -> Any:
    """Return a mask, True for kept elements, of a block's first positions."""
    source = np.random.Generator(np.random.Philox(key=key, counter=block << 64))
    # Unlike `random_raw`, this releases the interpreter lock.
    words = source.integers(0, _WORD - 1, -(-count // 4), np.uint64, endpoint=True)
    halves = words.astype("<u8", copy=False).view("<u2")[:count]
    threshold = min(round(p * 65536), 65535)
    return np.greater_equal(halves, np.uint16(threshold))


OPERATIONS: dict[str, Run] = {"dropout": dropout}
