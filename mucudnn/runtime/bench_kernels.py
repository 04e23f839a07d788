"""Time the algorithms of one convolution at chosen micro-batch sizes on one device.

Buffers are made once, for the largest size, and views of them serve all smaller ones:
nothing is allocated between two measurements unless memory is short.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mucudnn.backends.base import Backend, Buffer
from mucudnn.errors import MucudnnError, OutOfMemoryError
from mucudnn.ir.conv import AlgoPerf, ConvProblem
from mucudnn.ir.numerics import Traits
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tensor import TensorSpec
from mucudnn.runtime.timing import StoppingRule, measure

__all__ = ["KernelBench", "failed_perf", "limited", "operands", "time_in_turn"]

logger = logging.getLogger(__name__)

_LIMITED = "not measured: "


def limited(perf: AlgoPerf) -> bool:
    """Whether a row is missing, or of a cold run only, because of a limit.

    Such a row says nothing about the algorithm and must not be remembered.
    """
    if perf.error is None:
        return perf.samples == 0
    return perf.error.startswith(_LIMITED)


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


class KernelBench:
    """Operands and workspace for one convolution at up to `problem.batch` samples.

    Args:
        backend: Runs the kernels.
        problem: The convolution at its largest batch size.
        rule: When a kernel has been timed enough.
        memory_limit: Bytes that operands and workspace may take together.
        deadline: `time.monotonic()` after which nothing more is started.
    """

    def __init__(
        self,
        backend: Backend,
        problem: ConvProblem,
        rule: StoppingRule,
        *,
        memory_limit: float = math.inf,
        deadline: float = math.inf,
    ) -> None:
        self._backend = backend
        self._problem = problem
        self._rule = rule
        self._memory_limit = memory_limit
        self._deadline = deadline
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
        time_in_turn(
            self._one,
            self._backend,
            self._problem.with_batch(batch),
            workspaces,
            on_done,
            deadline=self._deadline,
            best_ms=best_ms,
            expected_ms=expected_ms or {},
        )

    def release(self) -> None:
        """Give the buffers back; the next run makes them anew."""
        self._operands, self._batch = (), 0
        self._scratch, self._scratch_bytes = None, -1
        self._backend.device.trim()

    def _one(
        self,
        problem: ConvProblem,
        algo: str,
        nbytes: int,
        best_ms: float,
        expected_ms: float,
    ) -> AlgoPerf:
        traits = self._backend.conv.traits(problem, algo)

        def failed(error: str) -> AlgoPerf:
            return failed_perf(problem, algo, nbytes, error, traits)

        try:
            a, b, out = self._buffers(problem, nbytes)
        except OutOfMemoryError as e:
            return failed(f"{_LIMITED}{e}")
        conv, scratch = self._backend.conv, self._scratch
        try:
            if self._backend.compile is not None:  # the first run builds the plan
                conv.run(problem, algo, a, b, out, scratch)
            timing = measure(
                lambda: conv.run(problem, algo, a, b, out, scratch),
                self._backend.device,
                self._rule,
                deadline=self._deadline,
                best_ms=best_ms,
            )
        except MemoryError as e:
            return failed(f"{_LIMITED}out of memory: {e}")
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

    def _buffers(self, problem: ConvProblem, nbytes: int) -> tuple[Any, Any, Any]:
        """Operands at this batch size; afterwards `_scratch` holds `nbytes` at least.

        Raises:
            OutOfMemoryError: This kernel alone exceeds the limit, or the device.
        """
        specs = problem.operands()
        check_memory(specs, nbytes, self._memory_limit)
        try:
            self._hold(
                max(problem.batch, self._batch), max(nbytes, self._scratch_bytes)
            )
        except OutOfMemoryError:  # what earlier kernels needed is in the way
            self.release()
            self._hold(problem.batch, nbytes)
        device = self._backend.device
        a, b, out = (
            device.view(buffer, 0, spec)
            for buffer, spec in zip(self._operands, specs, strict=True)
        )
        return a, b, out

    def _hold(self, batch: int, nbytes: int) -> None:
        """Have buffers for `batch` samples and `nbytes` of workspace, all at once."""
        device = self._backend.device
        specs = self._problem.with_batch(batch).operands()
        check_memory(specs, nbytes, self._memory_limit)
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


def time_in_turn(
    one: Callable[[ConvProblem, str, int, float, float], AlgoPerf],
    backend: Backend,
    problem: ConvProblem,
    workspaces: Mapping[str, int],
    on_done: Callable[[AlgoPerf], None],
    *,
    deadline: float,
    best_ms: float,
    expected_ms: Mapping[str, float],
) -> None:
    """What every bench does at one size: begin what can end before the deadline.

    Args:
        one: Times one algorithm: problem, algorithm, bytes, best rival and expected ms.
        backend: Says how an algorithm that is not begun computes.
        problem: At the micro-batch size.
        workspaces: Algorithm -> bytes; timed in this order.
        on_done: Receives one row an algorithm.
        deadline: `time.monotonic()` after which nothing more is started.
        best_ms: Fastest rival known at this size.
        expected_ms: Algorithm -> about how long one run takes, where it is known.
    """
    for algo, nbytes in workspaces.items():
        expected = expected_ms.get(algo, 0.0)
        left_s = deadline - time.monotonic()
        if left_s <= expected / 1e3:
            reason = (
                f"would take about {expected / 1e3:.2g} s, "
                f"the time limit leaves {left_s:.2g} s"
                if left_s > 0
                else "the time limit was reached"
            )
            traits = backend.conv.traits(problem, algo)
            on_done(failed_perf(problem, algo, nbytes, f"{_LIMITED}{reason}", traits))
            continue
        perf = one(problem, algo, nbytes, best_ms, expected)
        if perf.error is None:
            best_ms = min(best_ms, perf.time_ms)
        on_done(perf)


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
