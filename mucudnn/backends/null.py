"""A backend that computes nothing, with a made-up cost model.

Plans for huge problems run here in milliseconds, as do unit tests of the runtime. It
has several devices, each with a clock of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mucudnn.backends.base import Backend, Kernel
from mucudnn.backends.plan_runner import Call, PlanRunner, per_step
from mucudnn.backends.virtual import (
    VirtualArray as NullArray,
    VirtualDevice as NullDevice,
    run_kernel,
)
from mucudnn.errors import UnsupportedError
from mucudnn.ir.conv import ConvProblem
from mucudnn.ir.numerics import Traits

_DEVICES = 8
_MS_PER_SAMPLE = {"SLOW": 1.0, "FAST": 0.4}
_LAUNCH_MS = 0.1
_FAST_BYTES_PER_SAMPLE = 1024
_BYTES_PER_MS = 1e8


class NullConv:
    """Two made-up algorithms: one small and slow, one large and fast."""

    def __init__(self, device: NullDevice) -> None:
        self._device = device

    def algorithms(self, problem: ConvProblem) -> Sequence[tuple[str, int]]:
        """Return both algorithms; the fast one's workspace grows with the batch."""
        return [("SLOW", 0), ("FAST", _FAST_BYTES_PER_SAMPLE * problem.batch)]

    def excluded(self, problem: ConvProblem) -> Sequence[tuple[str, str]]:
        """Return no exclusions."""
        return ()

    def traits(self, problem: ConvProblem, algo: str) -> Traits:
        """Return the default traits."""
        return Traits()

    run = run_kernel

    def kernel(self, problem: ConvProblem, algo: str) -> Call:
        """Return a prepared kernel."""
        if algo not in _MS_PER_SAMPLE:
            raise UnsupportedError(f"null backend has no algorithm {algo!r}")
        ms = problem.batch * _MS_PER_SAMPLE[algo] + _LAUNCH_MS
        nbytes = _FAST_BYTES_PER_SAMPLE * problem.batch if algo == "FAST" else 0
        return self._device.kernel(problem, algo, nbytes, ms)


_Arrays = Sequence[NullArray]


class NullKernels(Mapping[str, Kernel]):
    """A table with one kernel for every operation, as slow as moving its operands."""

    def __init__(self, device: NullDevice) -> None:
        self._device = device
        self._kernel = Kernel(self._run)

    def __getitem__(self, op: str) -> Kernel:
        return self._kernel

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def _run(
        self, inputs: _Arrays, outputs: _Arrays, attrs: Any, workspace: Any
    ) -> None:
        # Bandwidth-bound, like most kernels of a step.
        nbytes = sum(array.nbytes for array in (*inputs, *outputs))
        self._device.advance(nbytes / _BYTES_PER_MS + _LAUNCH_MS)


def device_count(argument: str) -> int:
    """Return a number of devices that suffices for tests."""
    if argument:
        raise ValueError(f"backend 'null' takes no argument, got {argument!r}")
    return _DEVICES


def load(argument: str, device: int) -> Backend:
    """Return a new null backend with its own clock."""
    null = NullDevice()
    kernels, conv = NullKernels(null), NullConv(null)
    return Backend(
        "null",
        null,
        conv,
        binder=lambda plan, replay: PlanRunner(plan, per_step(plan, conv.kernel)),
        index=device,
        kernels=kernels,
    )
