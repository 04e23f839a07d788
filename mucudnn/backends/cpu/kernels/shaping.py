"""Copies of whole tensors and of parts, and constants; in tiles, on all threads."""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import BLOCK_BYTES, KernelCall, Run
from mucudnn.backends.shaping import SHAPING, Copies

__all__ = ["OPERATIONS", "copy_in_tiles"]


def _operation(copies: Copies) -> Run:
    def run(call: KernelCall) -> None:
        for source, target in copies(call.inputs, call.outputs[0], call.attrs):
            copy_in_tiles(call, source, target)

    return run


def copy_in_tiles(call: KernelCall, source: Any, target: Any) -> None:
    """Write an array or a number into an array; either may have gaps."""
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
