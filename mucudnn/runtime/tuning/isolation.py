"""Time kernels in a child process, where a crash costs one row, not the program.

A kernel that kills its process, hangs, or corrupts the device's context becomes a
failed row, and a new child runs the next kernels. Starting a child may take seconds, so
one child serves all layers of a tuner, one kernel at a time.
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
    """Chooses between measuring in this process and in one child per device.

    By default, children are used for fragile backends.
    """

    def __init__(self, wanted: bool | None = None) -> None:
        self._wanted = wanted
        self._processes: dict[tuple[str, int], MeasuringProcess] = {}

    def bench(self, task: BenchTask) -> KernelBench:
        """Return a bench for one convolution on one device."""
        backend = task.backend
        if not (backend.fragile if self._wanted is None else self._wanted):
            return KernelBench(task)
        device = backend.name, backend.index
        if device not in self._processes:
            self._processes[device] = MeasuringProcess(*device)
        return KernelBench(task, ChildTimer(task, self._processes[device]))

    def close(self) -> None:
        """End all children; later measurements start new ones."""
        for process in self._processes.values():
            process.close()


class ChildTimer:
    """Times kernels in a child process.

    Args:
        task: What to measure; the child loads its backend by name and index.
        hang_s: Seconds beyond the expected time after which a kernel's process is
            killed.
    """

    def __init__(
        self, task: BenchTask, process: "MeasuringProcess", *, hang_s: float = 60.0
    ) -> None:
        self._task = task
        self._process = process
        self._hang_s = hang_s

    def time(self, kernel: KernelRun) -> AlgoPerf:
        """Return the row of one algorithm; the end of the child is a failed row."""
        ordinary_s = (self._task.rule.budget_ms + 2 * kernel.expected_ms) / 1e3
        outcome = self._process.time_kernel(self, kernel, self._hang_s + ordinary_s)
        if isinstance(outcome, AlgoPerf):
            return outcome
        return self._task.row(kernel, None, outcome)

    def release(self) -> None:
        """Let the child free its buffers; the next kernel allocates them anew."""
        self._process.release(self)

    def settings(self) -> Message:
        """Return the settings of a child; clocks differ, so it gets time left."""
        return {
            "problem": problem_to_dict(self._task.problem),
            "rule": dataclasses.asdict(self._task.rule),
            "memory_limit": self._task.memory_limit,
            "left_s": self._task.deadline - self._task.clock(),
        }


class MeasuringProcess:
    """The child process that measures on one device, restarted when needed.

    A child that ends while it runs a kernel is a result; one that ends before is
    replaced, twice. Where a failure leaves the device's context unusable, the child is
    ended and the next kernel starts a new one. Thread-safe: kernels are timed one after
    another.
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
        """Process id of the child; None if none runs."""
        return next((child.pid for child in self._child if child.usable), None)

    def time_kernel(
        self, timer: ChildTimer, kernel: KernelRun, seconds: float
    ) -> AlgoPerf | str:
        """Time one kernel with the settings of `timer`.

        Returns:
            A row, or a text that says how the child ended.
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
            except BaseException:  # Ctrl-C, too: messages would be out of step
                self.close()
                raise
            if not answer["usable"]:
                self.close()
            return perf_from_dict(answer["row"])

    def release(self, timer: ChildTimer) -> None:
        """Let the child free the buffers that it holds for `timer`."""
        with self._lock.mine:
            if self._opened is timer and self.pid:
                try:
                    self._child[0].say({"release": True})
                except ChildEndedError:
                    self.close()

    def close(self) -> None:
        """End the child; the next kernel starts another one."""
        with self._lock.mine:
            self._opened = None
            _end(self._child)

    def _begin(self, timer: ChildTimer, kernel: KernelRun) -> Child:
        """Return a child that has begun the kernel, after at most three attempts."""
        while True:
            try:
                child = self._started_child()
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

    def _started_child(self) -> Child:
        """Return the child with its backend loaded."""
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
