"""Time the algorithms of one convolution at chosen micro-batch sizes on one device.

Buffers are made once, for the largest size, and views of them serve all smaller ones:
nothing is allocated between two measurements unless memory is short.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.base import Backend, Buffer
from mucudnn.backends.recorded import recording_of
from mucudnn.errors import MucudnnError, OutOfMemoryError, UnsupportedError
from mucudnn.ir.conv import AlgoPerf, ConvProblem
from mucudnn.ir.numerics import Traits
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.status import RowStatus
from mucudnn.ir.tensor import TensorSpec
from mucudnn.runtime.tuning.timing import StoppingRule, Timing, measure

__all__ = ["BenchTask", "KernelBench", "failed_perf", "limited", "operands"]

logger = logging.getLogger(__name__)


_LEAST_RUNS = 2
"""A warm-up and a sample; a row of a warm-up alone is not remembered."""


def limited(perf: AlgoPerf) -> bool:
    """Whether a row is missing, or of a cold run only, because of a limit.

    Such a row says nothing about the algorithm and must not be remembered.
    """
    return perf.status is RowStatus.LIMITED


def operands(
    backend: Backend, problem: ConvProblem, workspace: int, memory_limit: float
) -> tuple[Any, Any, Any]:
    """Random inputs and an output buffer of a problem.

    Raises:
        OutOfMemoryError: With `workspace` bytes more they exceed the memory limit.
    """
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
            f"needs {format_bytes(needed)} with its operands, "
            f"the memory limit is {format_bytes(int(memory_limit))}"
        )


_TimeOne = Callable[[ConvProblem, str, int, float, float], AlgoPerf]
"""Times one algorithm: problem, its name, bytes, best rival's and expected ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTask:
    """What a bench times, and within which limits.

    Attributes:
        backend: Whose kernels.
        problem: The convolution at its largest batch size.
        rule: When a kernel has been timed enough.
        memory_limit: Bytes that operands and workspace may take together.
        deadline: `time.monotonic()` after which nothing more is started.
    """

    backend: Backend
    problem: ConvProblem
    rule: StoppingRule
    memory_limit: float = math.inf
    deadline: float = math.inf

    def in_turn(
        self,
        one: _TimeOne,
        batch: int,
        workspaces: Mapping[str, int],
        on_done: Callable[[AlgoPerf], None],
        best_ms: float,
        expected_ms: Mapping[str, float] | None,
    ) -> None:
        """What every bench does at one size: begin what can end before the deadline."""
        problem = self.problem.with_batch(batch)
        for algo, nbytes in workspaces.items():
            expected = (expected_ms or {}).get(algo, 0.0)
            expected *= _LEAST_RUNS
            left_s = self.deadline - time.monotonic()
            if left_s <= expected / 1e3:
                reason = (
                    f"would take about {expected / 1e3:.2g} s, "
                    f"the time limit leaves {left_s:.2g} s"
                    if left_s > 0
                    else "the time limit was reached"
                )
                traits = self.backend.conv.traits(problem, algo)
                error = RowStatus.LIMITED.text(reason)
                on_done(failed_perf(problem, algo, nbytes, error, traits))
                continue
            perf = one(problem, algo, nbytes, best_ms, expected / _LEAST_RUNS)
            if perf.error is None:
                best_ms = min(best_ms, perf.time_ms)
            on_done(perf)


class KernelBench:
    """Operands and workspace for one convolution at up to `problem.batch` samples."""

    def __init__(self, task: BenchTask) -> None:
        self._task = task
        self._operands: tuple[Buffer, ...] = ()
        self._batch = 0
        self._scratch: Buffer = None
        self._scratch_bytes = -1  # none yet; an empty one is a buffer, too

    def run(
        self,
        batch: int,
        workspaces: Mapping[str, int],
        on_done: Callable[[AlgoPerf], None],
        best_ms: float = math.inf,
        expected_ms: Mapping[str, float] | None = None,
    ) -> None:
        """Time algorithms at one micro-batch size; every outcome goes to `on_done`.

        Args:
            batch: Micro-batch size.
            workspaces: Algorithm -> bytes; timed in this order.
            on_done: Receives one row an algorithm, failures included.
            best_ms: Fastest rival known at this size.
            expected_ms: Algorithm -> about how long one run takes, where it is known;
                what would not end before the deadline is not begun.
        """
        self._task.in_turn(self._one, batch, workspaces, on_done, best_ms, expected_ms)

    def release(self) -> None:
        """Give the buffers back; the next run makes them anew."""
        self._operands, self._batch = (), 0
        self._scratch, self._scratch_bytes = None, -1
        self._task.backend.device.trim()

    def _one(
        self,
        problem: ConvProblem,
        algo: str,
        nbytes: int,
        best_ms: float,
        expected_ms: float,
    ) -> AlgoPerf:
        backend = self._task.backend
        traits = backend.conv.traits(problem, algo)

        def failed(error: str) -> AlgoPerf:
            return failed_perf(problem, algo, nbytes, error, traits)

        try:
            arrays = self._buffers(problem, nbytes)
        except OutOfMemoryError as e:
            return failed(RowStatus.LIMITED.text(str(e)))
        if (recording := recording_of(backend)) is not None:
            return recording.row(problem, algo)
        try:
            timing = self._timed(problem, algo, arrays, best_ms)
        except MemoryError as e:
            return failed(RowStatus.LIMITED.text(f"out of memory: {e}"))
        except UnsupportedError as e:
            return failed(RowStatus.UNSUPPORTED.text(str(e)))
        except MucudnnError as e:
            return failed(f"{type(e).__name__}: {e}")
        except Exception as e:
            # One broken algorithm, perhaps a plug-in's, must not cost the others.
            logger.warning("%s failed on %s", algo, problem, exc_info=True)
            return failed(f"{type(e).__name__}: {e}")
        return AlgoPerf(
            algo=algo,
            batch=problem.batch,
            time_ms=timing.time_ms,
            workspace=nbytes,
            noise_ms=timing.noise_ms,
            samples=timing.samples,
            deterministic=traits.deterministic,
            math_mode=traits.math_mode,
            notes=traits.notes,
        )

    def _timed(
        self,
        problem: ConvProblem,
        algo: str,
        arrays: tuple[Any, Any, Any],
        best_ms: float,
    ) -> Timing:
        backend, scratch = self._task.backend, self._scratch

        def run() -> None:
            backend.conv.run(problem, algo, *arrays, scratch)

        if backend.plan_texts is not None:  # the first run builds the plan
            run()
        return measure(
            run,
            backend.device,
            self._task.rule,
            deadline=self._task.deadline,
            best_ms=best_ms,
        )

    def _buffers(self, problem: ConvProblem, nbytes: int) -> tuple[Any, Any, Any]:
        """Operands at this batch size; afterwards `_scratch` holds `nbytes` at least.

        Raises:
            OutOfMemoryError: This kernel alone exceeds the limit, or the device.
        """
        specs = problem.operands()
        check_memory(specs, nbytes, self._task.memory_limit)
        try:
            self._hold(
                max(problem.batch, self._batch), max(nbytes, self._scratch_bytes)
            )
        except OutOfMemoryError:  # what earlier kernels needed is in the way
            self.release()
            self._hold(problem.batch, nbytes)
        device = self._task.backend.device
        a, b, out = (
            device.view(buffer, 0, spec)
            for buffer, spec in zip(self._operands, specs, strict=True)
        )
        return a, b, out

    def _hold(self, batch: int, nbytes: int) -> None:
        """Have buffers for `batch` samples and `nbytes` of workspace, all at once."""
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


def failed_perf(
    problem: ConvProblem, algo: str, nbytes: int, error: str, traits: Traits
) -> AlgoPerf:
    """The row of an algorithm that has no time; `error` says why."""
    return AlgoPerf(
        algo=algo,
        batch=problem.batch,
        time_ms=math.inf,
        workspace=nbytes,
        error=error,
        samples=0,
        deterministic=traits.deterministic,
        math_mode=traits.math_mode,
        notes=traits.notes,
    )
