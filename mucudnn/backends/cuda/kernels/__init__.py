"""Kernels of a training step on a GPU: one idea a file, as the CPU's, in CUDA C.

A kernel writes into its outputs; partial sums go to a workspace that it asks for, so
that nothing is allocated. It launches and never waits, adds no numbers atomically
(blocks are counted so), and divides its work by shapes alone: results are the same bits
every time. Those that may run in place read an element before they write it, and no
other.

This package imports neither CuPy nor NumPy; sources are compiled at their first launch.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mucudnn.backends.base import Kernel, KernelArguments
from mucudnn.backends.cuda.kernels import (
    average_pooling,
    batch_norm,
    batch_norm_grad,
    bias,
    dropout,
    elementwise,
    fused_norm,
    gradients,
    group_norm,
    losses,
    lrn,
    matmul,
    max_pooling,
    shaping,
    split_batch_norm,
    split_group_norm,
    turning,
    updates,
    upsampling,
)
from mucudnn.backends.cuda.kernels.program import (
    Call,
    KernelCall,
    Operation,
    Preparer,
    Program,
    Recorder,
)

__all__ = ["KERNELS", "PROGRAMS", "bind"]

_FILES = (
    average_pooling,
    batch_norm,
    batch_norm_grad,
    bias,
    dropout,
    elementwise,
    fused_norm,
    gradients,
    group_norm,
    losses,
    lrn,
    matmul,
    max_pooling,
    shaping,
    split_batch_norm,
    split_group_norm,
    turning,
    updates,
    upsampling,
)

KERNELS: Mapping[str, Operation] = MappingProxyType(
    {name: made for file in _FILES for name, made in file.OPERATIONS.items()}
)
"""Operation -> its kernel, which still has to be given a launcher."""

PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {
        "average_pooling": average_pooling.PROGRAM,
        "batch_norm": batch_norm.PROGRAM,
        "batch_norm_grad": batch_norm_grad.PROGRAM,
        "bias": bias.PROGRAM,
        "dropout": dropout.PROGRAM,
        "elementwise": elementwise.PROGRAM,
        "gradients": gradients.PROGRAM,
        "group_norm": group_norm.PROGRAM,
        "losses": losses.PROGRAM,
        "lrn": lrn.PROGRAM,
        "max_pooling": max_pooling.PROGRAM,
        "split_batch_norm": split_batch_norm.PROGRAM,
        "split_group_norm": split_group_norm.PROGRAM,
        "turning": turning.PROGRAM,
        "updates": updates.PROGRAM,
        "upsampling": upsampling.PROGRAM,
    }
)
"""File -> its CUDA C; matrices and copies are CuPy's."""


def bind(launcher: Preparer) -> Mapping[str, Kernel]:
    """The kernels, to be launched by this launcher."""
    return {name: _bound(launcher, made) for name, made in KERNELS.items()}


def _bound(launcher: Preparer, operation: Operation) -> Kernel:
    def run(*arguments: Any) -> None:
        operation.run(KernelCall(launcher, *arguments))

    def ready(*arguments: Any) -> Call:
        recorder = Recorder(launcher)
        operation.run(KernelCall(recorder, *arguments))
        return recorder.recorded()

    joined = operation.together
    if joined is None:
        return Kernel(run, operation.workspace, ready)

    def together(calls: Sequence[KernelArguments]) -> Call:
        recorder = Recorder(launcher)
        joined([KernelCall(recorder, *arguments) for arguments in calls])
        return recorder.recorded()

    return Kernel(run, operation.workspace, ready, together, operation.flags)
