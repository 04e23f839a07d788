"""Convolution algorithms in NumPy, named as cuDNN names them; one file each."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv import (
    fft,
    fft_tiling,
    gemm,
    implicit_gemm,
    implicit_precomp_gemm,
    winograd_nonfused,
)
from mucudnn.backends.cpu.conv.algorithm import Algorithm
from mucudnn.backends.cpu.threads import Workers
from mucudnn.errors import BackendError, UnsupportedError
from mucudnn.ir.conv import ConvProblem
from mucudnn.ir.numerics import Traits
from mucudnn.ir.tensor import TensorSpec

__all__ = ["ALGORITHMS", "CpuConv"]

ALGORITHMS: tuple[Algorithm, ...] = (
    implicit_gemm.ALGORITHM,
    implicit_precomp_gemm.ALGORITHM,
    gemm.ALGORITHM,
    fft.ALGORITHM,
    fft_tiling.ALGORITHM,
    winograd_nonfused.ALGORITHM,
)

_DTYPES = ("float32", "float64")


class CpuConv:
    """The CPU's convolution library.

    Args:
        workers: Threads to share; a crew of its own if not given.
    """

    def __init__(self, workers: Workers | None = None) -> None:
        self._workers = workers or Workers()
        self._by_name = {a.name: a for a in ALGORITHMS}

    def algorithms(self, problem: ConvProblem) -> Sequence[tuple[str, int]]:
        """(name, workspace bytes) of every algorithm that can run `problem`."""
        return [
            (a.name, a.workspace(problem, self._workers.count))
            for a in ALGORITHMS
            if _excluded(a, problem) is None
        ]

    def excluded(self, problem: ConvProblem) -> Sequence[tuple[str, str]]:
        """(name, reason) of every algorithm that cannot run `problem`."""
        reasons = ((a.name, _excluded(a, problem)) for a in ALGORITHMS)
        return [(name, reason) for name, reason in reasons if reason is not None]

    def traits(self, problem: ConvProblem, algo: str) -> Traits:
        """All sum in a fixed order, in the type of the operands."""
        return Traits()

    def run(
        self,
        problem: ConvProblem,
        algo: str,
        a: Any,
        b: Any,
        out: Any,
        workspace: Any,
        *,
        accumulate: bool = False,
    ) -> None:
        """Run one kernel; see `ConvLibrary.run`."""
        try:
            algorithm = self._by_name[algo]
        except KeyError:
            valid = ", ".join(self._by_name)
            raise UnsupportedError(
                f"cpu backend has no algorithm {algo!r}; it has: {valid}"
            ) from None
        if (reason := _excluded(algorithm, problem)) is not None:
            raise UnsupportedError(f"{algo} cannot run {problem}: {reason}")
        a, b, out = (
            _logical(array, spec, problem.layout)
            for array, spec in zip((a, b, out), problem.operands(), strict=True)
        )
        needed = algorithm.workspace(problem, self._workers.count)
        given = 0 if workspace is None else workspace.nbytes
        if given < needed:
            raise BackendError(
                f"{algo} needs {needed} bytes of workspace for {problem}, got {given}"
            )
        scratch = np.empty(0, np.uint8) if workspace is None else workspace[:needed]
        algorithm.run(problem, a, b, out, scratch, self._workers, accumulate)


def _excluded(algorithm: Algorithm, problem: ConvProblem) -> str | None:
    if problem.dtype not in _DTYPES:
        return f"dtype is {problem.dtype}, the CPU has {' and '.join(_DTYPES)}"
    return algorithm.excluded(problem)


def _logical(array: Any, spec: TensorSpec, layout: str) -> Any:
    """A stored array as a view with axes (first, channels, *spatial).

    Channels last, such a view itself is accepted too: (N, C, H, W) with the strides of
    (N, H, W, C), as PyTorch keeps it.
    """
    last = len(spec.shape) - 1
    stored = array
    if layout == "NHWC" and array.shape == (
        spec.shape[0],
        spec.shape[last],
        *spec.shape[1:last],
    ):
        turned = array.transpose(0, *range(2, last + 1), 1)
        stored = turned if turned.flags.c_contiguous else array
    if stored.shape != spec.shape or stored.dtype != spec.dtype:
        raise ValueError(
            f"{spec.name} must be {spec.dtype} {spec.shape} as stored in {layout}, "
            f"got {array.dtype} {array.shape}"
        )
    if not stored.flags.c_contiguous:
        raise ValueError(f"{spec.name} must be densely packed (C-contiguous)")
    if layout == "NHWC":
        return stored.transpose(0, last, *range(1, last))
    return stored
