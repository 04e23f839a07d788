"""Copies: whole tensors, parts of them, and constants; in tiles, by all threads."""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import BLOCK_BYTES, KernelCall, Run
from mucudnn.backends.shaping import SHAPING, Copies

__all__ = ["OPERATIONS"]


def _operation(copies: Copies) -> Run:
    def run(call: KernelCall) -> None:
        for source, target in copies(call.inputs, call.outputs[0], call.attrs):
            _copy(call, source, target)

    return run


def _copy(call: KernelCall, source: Any, target: Any) -> None:
    if not isinstance(source, np.ndarray):
        source = np.asarray(source, target.dtype)
    if not target.ndim:
        target[...] = source
        return
    source = np.broadcast_to(source, target.shape)

    def tile(part: tuple[slice, ...]) -> None:
        target[part] = source[part]

    call.tiles_of(target, tile, 2 * BLOCK_BYTES)


OPERATIONS: dict[str, Run] = {
    name: _operation(copies) for name, copies in SHAPING.items()
}
