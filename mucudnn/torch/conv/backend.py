"""The CPU backend with one algorithm more: PyTorch's own kernel, for NumPy arrays.

It joins ours in the tables of measurements, under a fingerprint that names PyTorch and
its threads, so that a plan takes it wherever ours are slower. Its result is an array of
PyTorch's, which is copied to where the caller wants it: the copy is part of its time.
What it uses as workspace it does not tell: it counts as none, whatever the limit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mucudnn.backends.base import Backend, Runner
from mucudnn.backends.cpu.conv import CpuConv
from mucudnn.backends.cpu.device import CpuDevice
from mucudnn.backends.cpu.kernels import bind
from mucudnn.backends.cpu.threads import Workers
from mucudnn.backends.runner import Call, PlanRunner, per_slice
from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction
from mucudnn.ir.numerics import Traits
from mucudnn.ir.tensor import TensorSpec
from mucudnn.torch.conv.dispatch import overrides

__all__ = ["TORCH", "TorchConv", "cpu_backend"]

TORCH = "torch"
"""Name of the algorithm: oneDNN's kernel, or what PyTorch takes where that has none."""

_NOTES = ("workspace_not_counted",)


def cpu_backend(*, native: bool = True) -> Backend:
    """The CPU backend, for tuners that `convolutions` takes and for NumPy's arrays.

    Measurements are for as many threads as PyTorch has now (`torch.set_num_threads`).

    Args:
        native: Whether PyTorch's own kernel is one of the algorithms.
    """
    workers = Workers()
    ours = CpuConv(workers)
    conv = TorchConv(ours) if native else ours
    threads = torch.get_num_threads()
    libraries = (f"torch-{torch.__version__}/{threads}-threads",) if native else ()
    return Backend(
        "torch-cpu",
        CpuDevice(libraries),
        conv,
        binder=lambda plan, replay: conv.bind(plan),
        kernels=bind(workers),
    )


class TorchConv:
    """The CPU's convolution library and PyTorch's kernel; see `ConvLibrary`.

    Args:
        ours: The algorithms beside it.
    """

    def __init__(self, ours: CpuConv) -> None:
        self._ours = ours

    def algorithms(self, problem: ConvProblem) -> Sequence[tuple[str, int]]:
        """Ours and `torch`, where NumPy and PyTorch share the data type."""
        ours = self._ours.algorithms(problem)
        return [(TORCH, 0), *ours] if ours else ours

    def excluded(self, problem: ConvProblem) -> Sequence[tuple[str, str]]:
        """(name, reason) of every algorithm that cannot run `problem`."""
        return self._ours.excluded(problem)

    def traits(self, problem: ConvProblem, algo: str) -> Traits:
        """In the type of the operands, unless PyTorch was told otherwise."""
        if algo == TORCH:
            return Traits(notes=_NOTES)
        return self._ours.traits(problem, algo)

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
        self._kernel(problem, algo)(a, b, out, workspace, accumulate)

    def bind(self, plan: ConvPlan) -> Runner:
        """A plan ready to run on NumPy arrays."""
        if all(step.algo != TORCH for step in plan.steps):
            return self._ours.bind(plan)
        return PlanRunner(plan, per_slice(plan, self._kernel))

    def _kernel(self, problem: ConvProblem, algo: str) -> Call:
        if algo == TORCH:
            return _torch_kernel(problem)
        run = self._ours.run

        def call(a: Any, b: Any, out: Any, workspace: Any, accumulate: bool) -> None:
            run(problem, algo, a, b, out, workspace, accumulate=accumulate)

        return call


def _torch_kernel(problem: ConvProblem) -> Call:
    """PyTorch's kernel on NumPy arrays, below autograd and whatever is in its place."""
    specs, layout = problem.operands(), problem.layout
    compute = _COMPUTE[problem.direction](problem)

    def call(a: Any, b: Any, out: Any, workspace: Any, accumulate: bool) -> None:
        one, two, three = (
            _logical(array, spec, layout)
            for array, spec in zip((a, b, out), specs, strict=True)
        )
        with torch.inference_mode():
            result = compute(one, two, three)
            if accumulate:
                three.add_(result)
            else:
                three.copy_(result)

    return call


def _logical(array: Any, spec: TensorSpec, layout: str) -> Any:
    """A NumPy array as a tensor with axes (first, channels, *spatial)."""
    stored = array.shape == spec.shape and array.flags.c_contiguous
    if layout == "NHWC" and stored:
        array = np.moveaxis(array, -1, 1)
    return torch.from_numpy(array)


_Compute = Callable[[Any, Any, Any], Any]


def _forward(problem: ConvProblem) -> _Compute:
    run, options = overrides("CPU").native_forward, _options(problem)
    return lambda x, w, y: run(x, w, None, *options)


def _backward_data(problem: ConvProblem) -> _Compute:
    run, options = overrides("CPU").native_backward, _options(problem)
    mask = [True, False, False]
    return lambda dy, w, dx: run(dy, dx, w, None, *options, mask)[0]


def _backward_filter(problem: ConvProblem) -> _Compute:
    run, options = overrides("CPU").native_backward, _options(problem)
    mask = [False, True, False]
    return lambda x, dy, dw: run(dy, x, dw, None, *options, mask)[1]


_COMPUTE: dict[Direction, Callable[[ConvProblem], _Compute]] = {
    Direction.FORWARD: _forward,
    Direction.BACKWARD_DATA: _backward_data,
    Direction.BACKWARD_FILTER: _backward_filter,
}


def _options(problem: ConvProblem) -> tuple[Any, ...]:
    """Stride to groups, as the operators' schemas order them."""
    no_output_padding = [0] * len(problem.stride)
    return (
        list(problem.stride),
        list(problem.padding),
        list(problem.dilation),
        False,
        no_output_padding,
        problem.groups,
    )
