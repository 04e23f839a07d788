"""Time the algorithms of one convolution at chosen micro-batch sizes on one device.

Buffers are made once, for the largest size, and views of them serve all smaller ones:
nothing is allocated between two measurements.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mucudnn.backends.base import Backend, Buffer
from mucudnn.errors import MucudnnError, OutOfMemoryError
from mucudnn.ir.conv import AlgoPerf, ConvProblem
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tensor import TensorSpec
from mucudnn.runtime.timing import StoppingRule, measure

__all__ = ["KernelBench", "limited", "operands"]

_LIMITED = "not measured: "


def limited(perf: AlgoPerf) -> bool:
    """Whether a row is missing because of a limit, not because of the algorithm.

    Such a row says nothing about the algorithm and must not be remembered.
    """
    return perf.error is not None and perf.error.startswith(_LIMITED)


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
        self._operands: list[Buffer] | None = None
        self._batch = 0
        self._scratch: Buffer = None
        self._scratch_bytes = -1

    def run(
        self,
        batch: int,
        workspaces: Mapping[str, int],
        on_done: Callable[[AlgoPerf], None],
        best_ms: float = math.inf,
    ) -> None:
        """Time algorithms at one micro-batch size; every outcome goes to `on_done`.

        Args:
            batch: Micro-batch size.
            workspaces: Algorithm -> bytes; timed in this order.
            on_done: Receives one row an algorithm, failures included.
            best_ms: Fastest rival known at this size.
        """
        problem = self._problem.with_batch(batch)
        for algo, nbytes in workspaces.items():
            perf = self._one(problem, algo, nbytes, best_ms)
            if perf.error is None:
                best_ms = min(best_ms, perf.time_ms)
            on_done(perf)

    def _one(
        self, problem: ConvProblem, algo: str, nbytes: int, best_ms: float
    ) -> AlgoPerf:
        def failed(error: str) -> AlgoPerf:
            return AlgoPerf(
                algo=algo,
                batch=problem.batch,
                time_ms=math.inf,
                workspace=nbytes,
                error=error,
                samples=0,
            )

        if time.monotonic() >= self._deadline:
            return failed(f"{_LIMITED}the time limit was reached")
        try:
            a, b, out = self._views(problem, nbytes)
            scratch = self._workspace(problem, nbytes)
        except OutOfMemoryError as e:
            return failed(f"{_LIMITED}{e}")
        conv = self._backend.conv
        try:
            timing = measure(
                lambda: conv.run(problem, algo, a, b, out, scratch),
                self._backend.device,
                self._rule,
                deadline=self._deadline,
                best_ms=best_ms,
            )
        except (MucudnnError, MemoryError) as e:
            return failed(f"{type(e).__name__}: {e}")
        return AlgoPerf(
            algo=algo,
            batch=problem.batch,
            time_ms=timing.time_ms,
            workspace=nbytes,
            noise_ms=timing.noise_ms,
            samples=timing.samples,
        )

    def _views(self, problem: ConvProblem, workspace: int) -> tuple[Any, Any, Any]:
        """Operands at this batch size, over buffers made at the first that fits."""
        device = self._backend.device
        specs = problem.operands()
        if self._operands is None or problem.batch > self._batch:
            self._operands = None
            check_memory(specs, 0, self._memory_limit)
            self._operands = [device.allocate(spec.nbytes) for spec in specs]
            self._batch = problem.batch
            for buffer, spec in zip(self._operands[:2], specs[:2], strict=True):
                device.randomize(device.view(buffer, 0, spec))
        a, b, out = (
            device.view(buffer, 0, spec)
            for buffer, spec in zip(self._operands, specs, strict=True)
        )
        return a, b, out

    def _workspace(self, problem: ConvProblem, nbytes: int) -> Buffer:
        if nbytes > self._scratch_bytes:
            largest = self._problem.with_batch(self._batch)
            check_memory(largest.operands(), nbytes, self._memory_limit)
            self._scratch, self._scratch_bytes = None, -1
            self._scratch = self._backend.device.allocate(nbytes)
            self._scratch_bytes = nbytes
        return self._scratch
