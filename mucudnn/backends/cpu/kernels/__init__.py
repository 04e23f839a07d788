"""NumPy kernels of a training step: one function per operation.

Arrays are C-contiguous, channels first, float32 or float64 (labels int64); see
`ir.channels_last` for the view of images with channels last. A kernel writes into its
outputs and allocates a few tiles of memory, whatever the tensors' size. It divides its
work by shapes alone, so results are bit-identical on any number of workers. Elementwise
kernels and gradients may be given an input's memory as output.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from mucudnn.backends.base import Kernel
from mucudnn.backends.cpu.kernels import (
    batch_norm,
    elementwise,
    group_norm,
    losses,
    pooling,
    reductions,
    updates,
    upsampling,
)
from mucudnn.backends.cpu.kernels.tiles import KernelCall, Run
from mucudnn.backends.cpu.threads import Workers

_MODULES = (
    pooling,
    batch_norm,
    reductions,
    elementwise,
    updates,
    group_norm,
    losses,
    upsampling,
)

KERNELS: Mapping[str, Run] = {
    name: run for module in _MODULES for name, run in module.OPERATIONS.items()
}
"""Operation name to kernel; kernels still need workers, see `bind`."""


def bind(workers: Workers) -> Mapping[str, Kernel]:
    """Return the kernels bound to these workers."""

    def call(run: Run, inputs: Any, outputs: Any, attrs: Any, _: Any) -> None:
        with np.errstate(all="ignore"):  # infinities show in the results
            run(KernelCall(workers, inputs, outputs, attrs))

    return {name: Kernel(partial(call, run)) for name, run in KERNELS.items()}
