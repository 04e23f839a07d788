"""Kernels of a training step in NumPy: one idea a file, one function an operation.

Arrays are C-contiguous, channels first, float32 or float64 (labels int64). A kernel
writes into its outputs and allocates a few tiles of memory, whatever the tensors' size;
it divides its work by shapes alone, so that its results are the same bits on any number
of workers. Elementwise kernels and gradients may be given an input's memory as output.
"""

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mucudnn.backends.base import Kernel
from mucudnn.backends.cpu.kernels import (
    average_pooling,
    batch_norm,
    bias,
    dropout,
    elementwise,
    group_norm,
    losses,
    lrn,
    matmul,
    max_pooling,
    shaping,
    updates,
    upsampling,
)
from mucudnn.backends.cpu.kernels.tiles import Run
from mucudnn.backends.cpu.threads import Workers

__all__ = ["KERNELS", "bind"]

KERNELS: Mapping[str, Run] = MappingProxyType(
    {
        **average_pooling.OPERATIONS,
        **batch_norm.OPERATIONS,
        **bias.OPERATIONS,
        **dropout.OPERATIONS,
        **elementwise.OPERATIONS,
        **group_norm.OPERATIONS,
        **losses.OPERATIONS,
        **lrn.OPERATIONS,
        **matmul.OPERATIONS,
        **max_pooling.OPERATIONS,
        **shaping.OPERATIONS,
        **updates.OPERATIONS,
        **upsampling.OPERATIONS,
    }
)
"""Operation -> its kernel, which still has to be given workers."""


def bind(workers: Workers) -> Mapping[str, Kernel]:
    """The kernels, to run on these workers."""
    return {
        name: Kernel(functools.partial(_run, kernel, workers))
        for name, kernel in KERNELS.items()
    }


def _run(
    kernel: Run,
    workers: Workers,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    attrs: Mapping[str, Any],
    workspace: Any,
) -> None:
    kernel(workers, inputs, outputs, attrs)
