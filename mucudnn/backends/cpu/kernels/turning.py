"""Layout conversions between channels first and last: one transposition per sample."""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.shaping import copy_in_tiles
from mucudnn.backends.cpu.kernels.tiles import KernelCall, Run, as_ncs

__all__ = ["OPERATIONS"]


def to_channels_last(call: KernelCall) -> None:
    """Copy (N, C, *spatial) to (N, *spatial, C)."""
    copy_in_tiles(call, as_ncs(call.inputs[0]), _as_ncs_from_last(call.outputs[0]))


def to_channels_first(call: KernelCall) -> None:
    """Copy (N, *spatial, C) to (N, C, *spatial)."""
    copy_in_tiles(call, _as_ncs_from_last(call.inputs[0]), as_ncs(call.outputs[0]))


def _as_ncs_from_last(array: Any) -> Any:
    """View (N, *spatial, C) as (N, C, S)."""
    return np.swapaxes(array.reshape(len(array), -1, array.shape[-1]), 1, 2)


OPERATIONS: dict[str, Run] = {
    "to_channels_first": to_channels_first,
    "to_channels_last": to_channels_last,
}
