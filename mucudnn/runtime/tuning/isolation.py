"""Time kernels in a child process: a crash costs one row and not the program.

A kernel that kills its process, hangs, or leaves the device's context unusable is a
failed row; the kernels after it meet a new child. Starting one may take seconds, so one
child serves all layers of a tuner, one kernel at a time.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from mucudnn.backends.base import Backend
from mucudnn.codecs.values import problem_to_dict
from mucudnn.ir.conv import AlgoPerf, ConvProblem
from mucudnn.runtime.tuning.kernel_bench import BenchTask, KernelBench, failed_perf
from mucudnn.runtime.tuning.measuring_process import MeasuringProcess
from mucudnn.runtime.tuning.timing import StoppingRule

__all__ = ["IsolatedBench", "Isolation"]


class IsolatedBench:
    """A `KernelBench` whose kernels run in a child process.

    Args:
        task: The child loads its backend by name and index.
        process: Where to measure.
        hang_s: Seconds that a kernel may take beyond what the rule lets it take; then
            its process is ended.
    """

    def __init__(
        self, task: BenchTask, process: MeasuringProcess, *, hang_s: float = 60.0
    ) -> None:
        self._task = task
        self._process = process
        self._hang_s = hang_s

    def run(
        self,
        batch: int,
        workspaces: Mapping[str, int],
        on_done: Callable[[AlgoPerf], None],
        best_ms: float = math.inf,
        expected_ms: Mapping[str, float] | None = None,
    ) -> None:
        """Time algorithms at one micro-batch size, as `KernelBench.run` does.

        Raises:
            BackendUnavailableError: The child cannot be started.
        """
        self._task.in_turn(self._one, batch, workspaces, on_done, best_ms, expected_ms)

    def release(self) -> None:
        """Have the child give the buffers back; the next run makes them anew."""
        self._process.release(self)

    def _one(
        self,
        problem: ConvProblem,
        algo: str,
        nbytes: int,
        best_ms: float,
        expected_ms: float,
    ) -> AlgoPerf:
        kernel = {
            "batch": problem.batch,
            "algo": algo,
            "nbytes": nbytes,
            "best_ms": best_ms,
            "expected_ms": expected_ms,
        }
        ordinary_s = (self._task.rule.budget_ms + 2 * expected_ms) / 1e3
        outcome = self._process.time_kernel(
            self, self._settings, kernel, self._hang_s + ordinary_s
        )
        if isinstance(outcome, AlgoPerf):
            return outcome
        traits = self._task.backend.conv.traits(problem, algo)
        return failed_perf(problem, algo, nbytes, outcome, traits)

    def _settings(self) -> Mapping[str, Any]:
        """What opens a child for this bench; clocks differ, so time is what is left."""
        return {
            "problem": problem_to_dict(self._task.problem),
            "rule": dataclasses.asdict(self._task.rule),
            "memory_limit": self._task.memory_limit,
            "left_s": self._task.deadline - time.monotonic(),
        }


class Isolation:
    """Where to measure: in this process or in one child a device.

    Args:
        wanted: Whether in children; None means where the backend is fragile.
    """

    def __init__(self, wanted: bool | None = None) -> None:
        self._wanted = wanted
        self._processes: dict[tuple[str, int], MeasuringProcess] = {}

    def bench(
        self,
        backend: Backend,
        problem: ConvProblem,
        rule: StoppingRule,
        *,
        memory_limit: float,
        deadline: float,
    ) -> KernelBench | IsolatedBench:
        """A bench for one convolution on one device."""
        wanted = backend.fragile if self._wanted is None else self._wanted
        task = BenchTask(
            backend=backend,
            problem=problem,
            rule=rule,
            memory_limit=memory_limit,
            deadline=deadline,
        )
        if not wanted:
            return KernelBench(task)
        device = backend.name, backend.index
        if device not in self._processes:
            self._processes[device] = MeasuringProcess(*device)
        return IsolatedBench(task, self._processes[device])

    def close(self) -> None:
        """End all children; what measures afterwards starts new ones."""
        for process in self._processes.values():
            process.close()
