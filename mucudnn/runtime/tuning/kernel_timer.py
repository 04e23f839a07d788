"""Time the algorithms of one convolution at given micro-batch sizes on one device.

Buffers are allocated for the largest size, and smaller sizes use views of them. Nothing
is allocated between measurements unless memory is short.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mucudnn.backends import Device
from mucudnn.backends.base import Backend
from mucudnn.backends.device import Buffer
from mucudnn.backends.recorded import recording_of
from mucudnn.errors import MucudnnError, OutOfMemoryError, UnsupportedError
from mucudnn.ir.conv import AlgoPerf, ConvProblem
from mucudnn.ir.numerics import RowStatus
from mucudnn.ir.sizes import exact_bytes, format_bytes
from mucudnn.ir.tensor import TensorSpec
from mucudnn.runtime.tuning.timing import StoppingRule, Timing, measure

logger = logging.getLogger(__name__)

_ORDINARY = 1 << 30
"""Bytes below which free memory is not queried, as the query is slow."""

_LEAST_RUNS = 2
"""A warm-up and a sample; a row of a warm-up alone is not cached."""


def operands(
    backend: Backend, problem: ConvProblem, workspace: int, memory_limit: float
) -> tuple[Any, Any, Any]:
    """Allocate random inputs and an output, if they fit with `workspace` bytes."""
    device, specs = backend.device, problem.operands()
    check_memory(specs, workspace, memory_limit)
    a, b, out = (device.view(device.allocate(s.nbytes), 0, s) for s in specs)
    device.randomize(a)
    device.randomize(b)
    return a, b, out


def check_memory(
    specs: Iterable[TensorSpec], workspace: int, memory_limit: float
) -> None:
    """Raise `OutOfMemoryError` where operands and workspace exceed the limit."""
    needed = sum(spec.nbytes for spec in specs) + workspace
    if needed > memory_limit:
        raise OutOfMemoryError(
            f"needs {format_bytes(needed, int(memory_limit))} with its operands, "
            f"the memory limit is {format_bytes(int(memory_limit), needed)}"
        )


def check_room(device: Device, what: str, specs: Iterable[TensorSpec]) -> None:
    """Raise `OutOfMemoryError` where tensors exceed the free memory.

    Devices that do not report their free memory are not checked.
    """
    needed = sum(spec.nbytes for spec in specs)
    if needed <= _ORDINARY:
        return
    try:
        free = device.available_bytes()
    except UnsupportedError:
        return
    if needed > free:
        raise OutOfMemoryError(
            f"{what} takes {exact_bytes(needed)}, and {exact_bytes(free)} of memory "
            "are free; check padding, stride and shapes, or give fewer samples at once"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRun:
    """An algorithm to time at one micro-batch size.

    Attributes:
        best_ms: Fastest time known at this size.
        expected_ms: Estimated time of one run; 0 if unknown.
    """

    batch: int
    algo: str
    nbytes: int
    best_ms: float = math.inf
    expected_ms: float = 0.0


class KernelTimer(Protocol):
    """Times kernels, in this process or in one that may crash."""

    def time(self, kernel: KernelRun) -> AlgoPerf:
        """Return the row of one algorithm; a failure is a row, too."""

    def release(self) -> None:
        """Free the buffers; the next kernel allocates them anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTask:
    """A convolution to time, and the limits of doing so.

    Attributes:
        problem: Convolution at its largest batch size.
        rule: Decides when a kernel has been timed enough.
        memory_limit: Bytes for operands and workspace together.
        deadline: Time on `clock` (seconds) after which nothing is started.
        clock: Clock in seconds, for the deadline only.
    """

    backend: Backend
    problem: ConvProblem
    rule: StoppingRule
    memory_limit: float = math.inf
    deadline: float = math.inf
    clock: Callable[[], float] = field(default_factory=lambda: time.monotonic)

    def row(
        self, kernel: KernelRun, timing: Timing | None, error: str | None = None
    ) -> AlgoPerf:
        """Return the row of an algorithm: its timing, or the error."""
        timing = timing or Timing(math.inf, 0.0, 0)
        problem, algo = self.problem.with_batch(kernel.batch), kernel.algo
        traits = self.backend.conv.traits(problem, algo)
        return AlgoPerf(
            algo=algo,
            batch=problem.batch,
            time_ms=timing.time_ms,
            workspace=kernel.nbytes,
            error=error,
            noise_ms=timing.noise_ms,
            samples=timing.samples,
            deterministic=traits.deterministic,
            math_mode=traits.math_mode,
            notes=traits.notes,
        )


class KernelBench:
    """Times algorithms one by one, and skips those that would miss the deadline."""

    def __init__(self, task: BenchTask, timer: KernelTimer | None = None) -> None:
        self._task = task
        self.timer = timer or LocalTimer(task)

    def run(
        self,
        batch: int,
        workspaces: Mapping[str, int],
        on_done: Callable[[AlgoPerf], None],
        best_ms: float = math.inf,
        expected_ms: Mapping[str, float] | None = None,
    ) -> None:
        """Time algorithms at one micro-batch size; pass each row to `on_done`.

        `workspaces` maps algorithms to bytes, in the order of timing. `best_ms` is the
        fastest time known at this size. An algorithm that, by `expected_ms`, would not
        end before the deadline is not started.
        """
        expected = expected_ms or {}
        for algo, nbytes in workspaces.items():
            perf = self.time(
                KernelRun(
                    batch=batch,
                    algo=algo,
                    nbytes=nbytes,
                    best_ms=best_ms,
                    expected_ms=expected.get(algo, 0.0),
                )
            )
            if perf.error is None:
                best_ms = min(best_ms, perf.time_ms)
            on_done(perf)

    def time(self, kernel: KernelRun) -> AlgoPerf:
        """Return the row of a kernel; without running it if it would be late."""
        needed_s = _LEAST_RUNS * kernel.expected_ms / 1e3
        left_s = self._task.deadline - self._task.clock()
        if left_s > needed_s:
            return self.timer.time(kernel)
        reason = (
            f"would take about {needed_s:.2g} s, the time limit leaves {left_s:.2g} s"
            if left_s > 0
            else "the time limit was reached"
        )
        return self._task.row(kernel, None, RowStatus.LIMITED.text(reason))

    def release(self) -> None:
        """Free the buffers; the next run allocates them anew."""
        self.timer.release()


class LocalTimer:
    """Times kernels in this process, and holds their operands and workspace."""

    def __init__(self, task: BenchTask) -> None:
        self._task = task
        self._operands: tuple[Buffer, ...] = ()
        self._batch = 0
        self._scratch: Buffer = None
        self._scratch_bytes = -1  # none yet; an empty workspace has 0

    def release(self) -> None:
        """Free the buffers; the next kernel allocates them anew."""
        self._operands, self._batch = (), 0
        self._scratch, self._scratch_bytes = None, -1
        self._task.backend.device.trim()

    def time(self, kernel: KernelRun) -> AlgoPerf:
        """Return the row of one algorithm; a failure is a row, too."""
        task, algo = self._task, kernel.algo
        problem = task.problem.with_batch(kernel.batch)
        try:
            arrays = self._buffers(problem, kernel.nbytes)
        except OutOfMemoryError as e:
            return task.row(kernel, None, RowStatus.LIMITED.text(str(e)))
        if (recording := recording_of(task.backend)) is not None:
            return recording.row(problem, algo)
        try:
            return task.row(kernel, self._timed(problem, kernel, arrays))
        except MemoryError as e:
            error = RowStatus.LIMITED.text(f"out of memory: {e}")
        except UnsupportedError as e:
            error = RowStatus.UNSUPPORTED.text(str(e))
        except Exception as e:
            # A broken algorithm, perhaps of a plug-in, must not stop the others.
            if not isinstance(e, MucudnnError):
                logger.warning("%s failed on %s", algo, problem, exc_info=True)
            error = f"{type(e).__name__}: {e}"
        return task.row(kernel, None, error)

    def _timed(
        self, problem: ConvProblem, kernel: KernelRun, arrays: tuple[Any, Any, Any]
    ) -> Timing:
        backend, scratch = self._task.backend, self._scratch

        def run() -> None:
            backend.conv.run(problem, kernel.algo, *arrays, scratch)

        if backend.plan_serializer is not None:  # the first run builds the plan
            run()
        return measure(
            run,
            backend.device,
            self._task.rule,
            deadline=self._task.deadline,
            best_ms=kernel.best_ms,
            clock=self._task.clock,
        )

    def _buffers(self, problem: ConvProblem, nbytes: int) -> tuple[Any, Any, Any]:
        """Return operands at a batch size, with `nbytes` in `_scratch` at least."""
        specs = problem.operands()
        check_memory(specs, nbytes, self._task.memory_limit)
        try:
            self._grow(
                max(problem.batch, self._batch), max(nbytes, self._scratch_bytes)
            )
        except OutOfMemoryError:  # drop the larger buffers of earlier kernels
            self.release()
            self._grow(problem.batch, nbytes)
        device = self._task.backend.device
        a, b, out = (
            device.view(buffer, 0, spec)
            for buffer, spec in zip(self._operands, specs, strict=True)
        )
        return a, b, out

    def _grow(self, batch: int, nbytes: int) -> None:
        """Grow the buffers to `batch` samples and `nbytes` of workspace."""
        device = self._task.backend.device
        specs = self._task.problem.with_batch(batch).operands()
        check_memory(specs, nbytes, self._task.memory_limit)
        if batch > self._batch:
            self._operands, self._batch = (), 0
            buffers = tuple(device.allocate(spec.nbytes) for spec in specs)
            for buffer, spec in zip(buffers[:2], specs[:2], strict=True):
                device.randomize(device.view(buffer, 0, spec))
            self._operands, self._batch = buffers, batch
        if nbytes > self._scratch_bytes:
            self._scratch, self._scratch_bytes = None, -1
            self._scratch = device.allocate(nbytes)
            self._scratch_bytes = nbytes
