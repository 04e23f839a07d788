"""The parent's side of measuring in a process of its own: one child at a time.

A child that ends while it runs a kernel is an outcome; one that ends before it began is
replaced, twice. After a failure that may have left the device's context unusable the
child is ended, and the next kernel meets a new one.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from mucudnn.codecs.values import perf_from_dict
from mucudnn.errors import BackendUnavailableError
from mucudnn.forks import Own
from mucudnn.ir.conv import AlgoPerf
from mucudnn.ir.status import RowStatus
from mucudnn.runtime.tuning.child_process import ChildEndedError, ChildProcess

__all__ = ["MeasuringProcess"]

logger = logging.getLogger(__name__)

_START_S = 300.0  # a cold disk and a driver that compiles
_FALSE_STARTS = 3


class MeasuringProcess:
    """The child that measures on one device; started when needed, and again.

    Threads may share it: kernels are timed one after another.

    Args:
        name: What `get_backend` loads the backend by.
        index: Which of its devices.
    """

    def __init__(self, name: str, index: int = 0) -> None:
        self._arguments = name, str(index)
        self._lock = Own(threading.RLock)
        self._child: list[ChildProcess] = []  # none or one, shared with the finalizer
        self._opened: object = None  # what the child was last opened for
        self._false_starts = 0
        weakref.finalize(self, _end, self._child)

    @property
    def pid(self) -> int | None:
        """Of the child, if one runs."""
        return next((child.pid for child in self._child if child.usable), None)

    def time_kernel(
        self,
        owner: object,
        settings: Callable[[], Mapping[str, Any]],
        kernel: Mapping[str, Any],
        seconds: float,
    ) -> AlgoPerf | str:
        """Time one kernel.

        Args:
            owner: Whose settings the child is to use.
            settings: Makes the `open` message, where the child has not had it.
            kernel: The `run` message.
            seconds: How long it may take.

        Returns:
            A row, or what became of the process that ran it.

        Raises:
            BackendUnavailableError: The child cannot be started.
        """
        with self._lock.mine:
            try:
                child = self._begin(owner, settings, kernel)
                perf = perf_from_dict(child.hear(seconds)["row"])
            except ChildEndedError as e:
                said = self._child[0].said
                self.close()
                logger.warning("%s: the process %s: %s", kernel["algo"], e, said)
                return f"the measuring process {e} while running it"
            except BaseException:  # Ctrl-C, too: the conversation cannot be resumed
                self.close()
                raise
            if _suspect(perf):
                self.close()
            return perf

    def release(self, owner: object) -> None:
        """Have the child give back the buffers that it holds for `owner`."""
        with self._lock.mine:
            if self._opened is not owner or not self.pid:
                return
            try:
                self._child[0].say({"release": True})
            except ChildEndedError:
                self.close()

    def close(self) -> None:
        """End the child; the next kernel starts another."""
        with self._lock.mine:
            self._opened = None
            _end(self._child)

    def _begin(
        self,
        owner: object,
        settings: Callable[[], Mapping[str, Any]],
        kernel: Mapping[str, Any],
    ) -> ChildProcess:
        """A child that has begun the kernel, at the third attempt at the latest."""
        while True:
            try:
                child = self._ready()
                if self._opened is not owner:
                    child.say({"open": settings()})
                    self._opened = owner
                child.say({"run": kernel})
                child.hear(_START_S)
            except ChildEndedError as e:
                said = self._child[0].said
                self.close()
                self._false_starts += 1
                if self._false_starts >= _FALSE_STARTS:
                    self._false_starts = 0
                    raise BackendUnavailableError(
                        f"backend {self._arguments[0]!r} cannot measure in a process "
                        f"of its own, which {e} {_FALSE_STARTS} times in a row before "
                        f"it began; it said: {said or 'nothing'}; "
                        "isolate=False measures in this process"
                    ) from e
                logger.warning("the measuring process %s before it began: %s", e, said)
            else:
                self._false_starts = 0
                return child

    def _ready(self) -> ChildProcess:
        """The child, with its backend loaded."""
        if self.pid is None:
            self.close()
            self._child.append(ChildProcess(self._arguments))
            hello = self._child[0].hear(_START_S)
            if (reason := hello.get("unavailable")) is not None:
                raise BackendUnavailableError(
                    f"backend {self._arguments[0]!r} cannot measure in a process of "
                    f"its own: {reason}; isolate=False measures in this process"
                )
        return self._child[0]


def _suspect(perf: AlgoPerf) -> bool:
    """Whether a kernel may have left a device context that fails whatever follows."""
    return perf.status is RowStatus.FAILED


def _end(children: list[ChildProcess]) -> None:
    while children:
        children.pop().end()
