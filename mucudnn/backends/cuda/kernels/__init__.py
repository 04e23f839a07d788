"""CUDA kernels of a training step: one file per subject, as on the CPU, in CUDA C.

A kernel writes into its outputs; partial sums go to a workspace of declared size, so
that nothing is allocated. It launches without waiting, adds no numbers atomically
(only blocks are counted so), and divides its work by shapes alone: results are
bit-identical every time. Kernels that may run in place read an element before they
write it, and no other.

This package imports neither CuPy nor NumPy; sources are compiled at their first launch.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from mucudnn.backends.base import Kernel, KernelArguments
from mucudnn.backends.cuda.kernels import (
    batch_norm,
    elementwise,
    group_norm,
    losses,
    pooling,
    reductions,
    split_norm,
    updates,
)
from mucudnn.backends.cuda.kernels.launch import (
    Call,
    CupyLauncher,
    KernelCall,
    Operation,
    Program,
    Recorder,
)

_MODULES = (
    pooling,
    batch_norm,
    reductions,
    elementwise,
    split_norm,
    updates,
    group_norm,
    losses,
)

KERNELS: Mapping[str, Operation] = {
    name: made for module in _MODULES for name, made in module.OPERATIONS.items()
}
"""Operation name to kernel; kernels still need a launcher, see `bind`."""

PROGRAMS: Mapping[str, Program] = {
    file.name.removesuffix(".cu"): Program.load(f"kernels/{file.name}")
    for file in files(__name__).iterdir()
    if file.name.endswith(".cu")
}
"""Name to CUDA C; matrix products and copies are CuPy's."""


def bind(launcher: CupyLauncher) -> Mapping[str, Kernel]:
    """Return the kernels bound to this launcher."""
    return {name: _bound(launcher, made) for name, made in KERNELS.items()}


def _bound(launcher: CupyLauncher, operation: Operation) -> Kernel:
    def prebind(*arguments: Any) -> Call:
        recorder = Recorder(launcher)
        operation.run(KernelCall(recorder, *arguments))
        return recorder.recorded()

    def run(*arguments: Any) -> None:
        call = prebind(*arguments)
        launcher.enter()
        call()

    joined = operation.run_batched
    if joined is None:
        return Kernel(run, operation.workspace, prebind)

    def run_batched(calls: Sequence[KernelArguments]) -> Call:
        recorder = Recorder(launcher)
        joined([KernelCall(recorder, *arguments) for arguments in calls])
        return recorder.recorded()

    return Kernel(run, operation.workspace, prebind, run_batched, operation.flags)
