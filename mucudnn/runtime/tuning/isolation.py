"""Time kernels in a child process: a crash costs one row and not the program.

A kernel that kills its process, hangs, or leaves the device's context unusable is a
failed row; the kernels after it meet a new child. Starting one may take seconds, so one
child serves all layers of a tuner, one kernel at a time.
"""

import dataclasses
import logging
import threading
import weakref

from mucudnn.codecs.values import perf_from_dict, problem_to_dict
from mucudnn.errors import BackendUnavailableError
from mucudnn.forks import Own
from mucudnn.ir.conv import AlgoPerf
from mucudnn.runtime.tuning.kernel_bench import BenchTask, KernelBench, KernelRun
from mucudnn.runtime.tuning.measuring_child import (
    HERE_INSTEAD,
    Child,
    ChildEndedError,
    Message,
)

__all__ = ["ChildTimer", "Isolation", "MeasuringProcess"]

logger = logging.getLogger(__name__)

_START_S = 300.0  # a cold disk and a driver that compiles
_FALSE_STARTS = 3


class Isolation:
    """Where to measure: in this process or in one child a device.

    Args:
        wanted: Whether in children; None means where the backend is fragile.
    """

    def __init__(self, wanted: bool | None = None) -> None:
        self._wanted = wanted
        self._processes: dict[tuple[str, int], MeasuringProcess] = {}

    def bench(self, task: BenchTask) -> KernelBench:
        """A bench for one convolution on one device."""
        backend = task.backend
        if not (backend.fragile if self._wanted is None else self._wanted):
            return KernelBench(task)
        device = backend.name, backend.index
        if device not in self._processes:
            self._processes[device] = MeasuringProcess(*device)
        return KernelBench(task, ChildTimer(task, self._processes[device]))

    def close(self) -> None:
        """End all children; what measures afterwards starts new ones."""
        for process in self._processes.values():
            process.close()


class ChildTimer:
    """Has a child process run kernels.

    Args:
        task: The child loads its backend by name and index.
        process: Where to measure.
        hang_s: Seconds that a kernel may take beyond what the rule lets it take; then
            its process is ended.
    """

    def __init__(
        self, task: BenchTask, process: "MeasuringProcess", *, hang_s: float = 60.0
    ) -> None:
        self._task = task
        self._process = process
        self._hang_s = hang_s

    def time(self, kernel: KernelRun) -> AlgoPerf:
        """The row of one algorithm; the end of the child is a row, too.

        Raises:
            BackendUnavailableError: The child cannot be started.
        """
        ordinary_s = (self._task.rule.budget_ms + 2 * kernel.expected_ms) / 1e3
        outcome = self._process.time_kernel(self, kernel, self._hang_s + ordinary_s)
        if isinstance(outcome, AlgoPerf):
            return outcome
        return self._task.row(kernel, None, outcome)

    def release(self) -> None:
        """Have the child give the buffers back; the next kernel makes them anew."""
        self._process.release(self)

    def settings(self) -> Message:
        """What opens a child for this task; clocks differ, so time is what is left."""
        return {
            "problem": problem_to_dict(self._task.problem),
            "rule": dataclasses.asdict(self._task.rule),
            "memory_limit": self._task.memory_limit,
            "left_s": self._task.deadline - self._task.clock(),
        }


class MeasuringProcess:
    """The child that measures on one device; started when needed, and again.

    A child that ends while it runs a kernel is an outcome; one that ends before it
    began is replaced, twice. Where a failure has left the device's context unusable the
    child is ended, and the next kernel meets a new one. Threads may share
    it: kernels are timed one after another.

    Args:
        name: What `get_backend` loads the backend by.
        index: Which of its devices.
    """

    def __init__(self, name: str, index: int = 0) -> None:
        self._name, self._index = name, index
        self._lock = Own(threading.RLock)
        self._child: list[Child] = []  # none or one, shared with the finalizer
        self._opened: ChildTimer | None = None  # whose settings the child has
        self._false_starts = 0
        weakref.finalize(self, _end, self._child)

    @property
    def pid(self) -> int | None:
        """Of the child, if one runs."""
        return next((child.pid for child in self._child if child.usable), None)

    def time_kernel(
        self, timer: ChildTimer, kernel: KernelRun, seconds: float
    ) -> AlgoPerf | str:
        """Time one kernel.

        `timer` is whose settings the child is to use.

        Returns:
            A row, or what became of the process that ran it.

        Raises:
            BackendUnavailableError: The child cannot be started.
        """
        with self._lock.mine:
            try:
                child = self._begin(timer, kernel)
                answer = child.hear(seconds)
            except ChildEndedError as e:
                said = self._child[0].said
                self.close()
                logger.warning("%s: the process %s: %s", kernel.algo, e, said)
                return f"the measuring process {e} while running it"
            except BaseException:  # Ctrl-C, too: the conversation cannot be resumed
                self.close()
                raise
            if not answer["usable"]:
                self.close()
            return perf_from_dict(answer["row"])

    def release(self, timer: ChildTimer) -> None:
        """Have the child give back the buffers that it holds for `timer`."""
        with self._lock.mine:
            if self._opened is timer and self.pid:
                try:
                    self._child[0].say({"release": True})
                except ChildEndedError:
                    self.close()

    def close(self) -> None:
        """End the child; the next kernel starts another."""
        with self._lock.mine:
            self._opened = None
            _end(self._child)

    def _begin(self, timer: ChildTimer, kernel: KernelRun) -> Child:
        """A child that has begun the kernel, at the third attempt at the latest."""
        while True:
            try:
                child = self._ready()
                if self._opened is not timer:
                    child.say({"open": timer.settings()})
                    self._opened = timer
                child.say({"run": dataclasses.asdict(kernel)})
                child.hear(_START_S)
            except ChildEndedError as e:
                said = self._child[0].said
                self.close()
                self._false_starts += 1
                if self._false_starts >= _FALSE_STARTS:
                    self._false_starts = 0
                    raise BackendUnavailableError(
                        f"backend {self._name!r} cannot measure in a process of its "
                        f"own, which {e} {_FALSE_STARTS} times in a row before it "
                        f"began; it said: {said or 'nothing'}; {HERE_INSTEAD}"
                    ) from e
                logger.warning("the measuring process %s before it began: %s", e, said)
            else:
                self._false_starts = 0
                return child

    def _ready(self) -> Child:
        """The child, with its backend loaded."""
        if self.pid is None:
            self.close()
            self._child.append(Child(self._name, str(self._index)))
            hello = self._child[0].hear(_START_S)
            if (reason := hello.get("unavailable")) is not None:
                raise BackendUnavailableError(
                    f"backend {self._name!r} cannot measure in a process of its own: "
                    f"{reason}; {HERE_INSTEAD}"
                )
        return self._child[0]


def _end(children: list[Child]) -> None:
    while children:
        children.pop().end()
