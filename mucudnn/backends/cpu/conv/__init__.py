"""Convolution algorithms in NumPy, under cuDNN's names."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.conv import fft, gemm, winograd
from mucudnn.backends.cpu.conv.algorithm import Algorithm, Kernel
from mucudnn.backends.cpu.threads import Workers, as_kernels
from mucudnn.backends.plan_runner import Call, PlanRunner, per_slice
from mucudnn.errors import BackendError, UnsupportedError
from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.numerics import Traits
from mucudnn.ir.tensor import TensorSpec

ALGORITHMS: tuple[Algorithm, ...] = (
    gemm.IMPLICIT_GEMM,
    gemm.IMPLICIT_PRECOMP_GEMM,
    gemm.GEMM,
    fft.FFT,
    fft.FFT_TILING,
    winograd.WINOGRAD_NONFUSED,
)

_DTYPES = ("float32", "float64")
_KERNELS = 512  # number of planned kernels in the cache; they hold no arrays
_NOTHING = np.empty(0, np.uint8)


class CpuConv:
    """The convolution library of the CPU; `others` are additional algorithms."""

    def __init__(
        self, workers: Workers | None = None, others: Sequence[Algorithm] = ()
    ) -> None:
        self._workers = workers or Workers()
        self._by_name = {a.name: a for a in (*others, *ALGORITHMS)}
        self._kernel = functools.lru_cache(_KERNELS)(self._planned)
        self._bound = functools.lru_cache(_KERNELS)(
            lambda problem, algo: (_Views(problem), self.kernel(problem, algo))
        )

    def algorithms(self, problem: ConvProblem) -> Sequence[tuple[str, int]]:
        """See `ConvLibrary.algorithms`."""
        return [
            (a.name, self._kernel(a.name, problem).nbytes)
            for a in self._by_name.values()
            if _excluded(a, problem) is None
        ]

    def excluded(self, problem: ConvProblem) -> Sequence[tuple[str, str]]:
        """See `ConvLibrary.excluded`."""
        every = self._by_name.items()
        reasons = ((name, _excluded(a, problem)) for name, a in every)
        return [(name, reason) for name, reason in reasons if reason is not None]

    def traits(self, problem: ConvProblem, algo: str) -> Traits:
        """Return the notes; every algorithm sums in a fixed order and type."""
        return Traits(notes=self._by_name[algo].notes)

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
        views, call = self._bound(problem, algo)
        call(*views(a, b, out), workspace, accumulate)

    def bind(self, plan: ConvPlan) -> PlanRunner:
        """Return a runner with prebuilt kernels, which checks operands once a run."""
        return PlanRunner(plan, per_slice(plan, self.kernel), _Views(plan.problem))

    def kernel(self, problem: ConvProblem, algo: str) -> Call:
        """Return a call of one kernel on views in logical axis order."""
        kernel, workers = self._kernel(algo, problem), self._workers
        run, needed = kernel.run, kernel.nbytes

        def call(a: Any, b: Any, out: Any, workspace: Any, accumulate: bool) -> None:
            scratch = _NOTHING if workspace is None else workspace[:needed]
            if scratch.nbytes < needed:
                raise BackendError(
                    f"{algo} needs {needed} bytes of workspace for {problem}, got "
                    f"{scratch.nbytes}"
                )
            with as_kernels():
                run((a, b, out), scratch, workers, accumulate)

        return call

    def _planned(self, algo: str, problem: ConvProblem) -> Kernel:
        try:
            algorithm = self._by_name[algo]
        except KeyError:
            valid = ", ".join(self._by_name)
            raise UnsupportedError(
                f"cpu backend has no algorithm {algo!r}; it has: {valid}"
            ) from None
        if (reason := _excluded(algorithm, problem)) is not None:
            raise UnsupportedError(f"{algo} cannot run {problem}: {reason}")
        return algorithm.kernel(problem, self._workers.count)


def _excluded(algorithm: Algorithm, problem: ConvProblem) -> str | None:
    if problem.dtype not in _DTYPES:
        return f"dtype is {problem.dtype}, the CPU has {' and '.join(_DTYPES)}"
    return algorithm.excluded(problem)


class _Views:
    """A function from stored arrays to views with axes (first, channels, *spatial).

    With channels last such a view is accepted as input too: (N, C, H, W) with the
    strides of (N, H, W, C), which is how PyTorch stores it.
    """

    def __init__(self, problem: ConvProblem) -> None:
        self._specs = problem.operands()
        self._layout = problem.layout
        shapes = tuple(spec.shape for spec in self._specs)
        self._plain = shapes if problem.layout == "NCHW" else None
        self._dtype = np.dtype(problem.dtype) if problem.dtype in _DTYPES else None

    def __call__(self, a: Any, b: Any, out: Any) -> tuple[Any, Any, Any]:
        dtype = self._dtype
        if (
            (a.shape, b.shape, out.shape) == self._plain
            and a.dtype == b.dtype == out.dtype == dtype
            and a.flags.c_contiguous
            and b.flags.c_contiguous
            and out.flags.c_contiguous
        ):
            return a, b, out
        one, two, three = self._specs
        a, b = _logical(a, one, self._layout), _logical(b, two, self._layout)
        return a, b, _logical(out, three, self._layout)


def _logical(array: Any, spec: TensorSpec, layout: str) -> Any:
    """View a stored array as (first, channels, *spatial); raise ValueError if wrong."""
    last = len(spec.shape) - 1
    stored = array
    first, *spatial, channels = spec.shape
    # Both a logical view and an array with channels last are accepted.
    if layout == "NHWC" and array.shape == (first, channels, *spatial):
        moved = array.transpose(0, *range(2, last + 1), 1)
        stored = moved if moved.flags.c_contiguous else array
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
