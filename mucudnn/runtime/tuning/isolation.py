"""Time kernels in a child process: a crash costs one row and not the program.

A kernel that kills its process, hangs, or corrupts the device's context becomes a
failed row, and a new child runs the next kernels. Starting a child may take seconds, so
one child serves all layers of a tuner, one kernel at a time.
"""

import dataclasses
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from mucudnn.backends import Backend, get_backend
from mucudnn.codecs import (
    perf_from_dict,
    perf_to_dict,
    problem_from_dict,
    problem_to_dict,
)
from mucudnn.errors import BackendUnavailableError, MucudnnError
from mucudnn.ir.conv import AlgoPerf
from mucudnn.ir.numerics import RowStatus
from mucudnn.processes import SIGNALS, Own
from mucudnn.runtime.tuning.kernel_timer import BenchTask, KernelBench, KernelRun
from mucudnn.runtime.tuning.timing import StoppingRule

Message = dict[str, Any]


logger = logging.getLogger(__name__)


_START_S = 300.0  # a cold disk and a driver that compiles

_FALSE_STARTS = 3


class Isolation:
    """Chooses between measuring in this process and in one child per device.

    By default, children are used for backends that may crash.
    """

    def __init__(self, wanted: bool | None = None) -> None:
        self._wanted = wanted
        self._processes: dict[tuple[str, int], MeasuringProcess] = {}

    def bench(self, task: BenchTask) -> KernelBench:
        """Return a bench for one convolution on one device."""
        backend = task.backend
        if not (backend.may_crash if self._wanted is None else self._wanted):
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

    def _begin(self, timer: ChildTimer, kernel: KernelRun) -> "Child":
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

    def _started_child(self) -> "Child":
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


def _end(children: "list[Child]") -> None:
    while children:
        children.pop().end()


# A child process that measures kernels: its protocol, start and end.
#
# Both ends exchange lines of JSON; numbers may be `Infinity`, as both are Python.
# Parent to child::
#
#     {"open": {"problem": …, "rule": …, "memory_limit": …, "left_s": …}}     {"run":
# {"batch": 8, "algo": "GEMM", "nbytes": 0, "best_ms": …, "expected_ms": …}}
# {"release": true}
#
# Child to parent: once `{"ready": true}` or `{"unavailable": "…"}`; then for each `run`
# first `{"begins": "GEMM"}` and at the end `{"row": …, "usable": true}`. `usable` says
# whether the device still works, which it may not after a kernel that failed.
#
# The child is started with `subprocess` instead of `multiprocessing`, so that a user's
# script needs no `__main__` guard, and it gets the `sys.path` of its parent. It moves
# stdin and stdout elsewhere at the start: a library that prints or reads gets stderr
# and an empty file instead.


HERE_INSTEAD = "isolate=False measures in this process"
"""Remedy in error messages."""


_END_S = 10.0  # ample for a killed process to end

_TAIL_BYTES = 4096

_TAIL_LINES = 8

_CHUNK = 1 << 16

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mucudnn.runtime.tuning.isolation import main; main()"
)


class ChildEndedError(Exception):
    """The child has ended; the message completes "the process …"."""


class Child:
    """A running child process, started with `arguments`."""

    def __init__(self, *arguments: str) -> None:
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        command = [sys.executable or "", "-P", "-c", _START, path, *arguments]
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe
            )
        except OSError as e:
            raise BackendUnavailableError(
                f"cannot start {sys.executable!r} to measure in: {e}; {HERE_INSTEAD}"
            ) from e
        self._process = process
        self._pipes: tuple[Any, ...] = process.stdin, process.stdout, process.stderr
        self._owner = os.getpid()
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._tail = b""
        self._threads = [
            threading.Thread(target=hear, args=(stream,), daemon=True)
            for hear, stream in (
                (self._listen, process.stdout),
                (self._overhear, process.stderr),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def usable(self) -> bool:
        """Whether the child runs and is ours, not that of a process we forked from."""
        return self._owner == os.getpid() and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def said(self) -> str:
        """The last lines that the child wrote to stderr."""
        lines = self._tail.decode(errors="replace").split("\n")
        return "\n".join([line for line in lines if line.strip()][-_TAIL_LINES:])

    def say(self, message: Message) -> None:
        """Send one message; raise `ChildEndedError` if the child has ended."""
        try:
            self._pipes[0].write(json.dumps(message).encode() + b"\n")
        except OSError:
            raise self._ended() from None

    def hear(self, seconds: float) -> Message:
        """Wait for the next message, for at most `seconds`; then the child is killed.

        A child that takes longer is killed.
        """
        try:
            line = self._answers.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        except queue.Empty:
            self.end()
            raise ChildEndedError(f"was ended after {seconds:.3g} s") from None
        if line is None:
            raise self._ended()
        try:
            message: Message = json.loads(line)
        except ValueError:
            self.end()
            raise ChildEndedError("was ended: it garbled its answer") from None
        return message

    def end(self) -> None:
        """Kill the child if it still runs, and release its pipes and threads.

        A fork of the parent only closes its own pipe ends: the child is not its to
        kill, and it does not have the threads.
        """
        if self._owner == os.getpid():
            self._process.kill()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                logger.warning("process %d cannot be killed", self.pid)
            deadline = time.monotonic() + 1.0
            for thread in self._threads:  # its own children may hold stderr open
                thread.join(max(0.0, deadline - time.monotonic()))
        for pipe in self._pipes:
            pipe.close()

    def _ended(self) -> ChildEndedError:
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return ChildEndedError("was ended: it had closed its end")
        finally:
            self.end()
        return ChildEndedError(f"ended {_how(status)}")

    def _listen(self, stream: BinaryIO) -> None:
        rest = b""
        for chunk in _chunks(stream):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._answers.put(line)
        self._answers.put(None)

    def _overhear(self, stream: BinaryIO) -> None:
        for chunk in _chunks(stream):
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
            text = chunk.decode(errors="replace").rstrip()
            logger.debug("process %d: %s", self.pid, text)


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    """Yield data as it arrives, until either end is closed."""
    try:
        while chunk := stream.read(_CHUNK):
            yield chunk
    except (OSError, ValueError):  # closed at this end
        return


def _how(status: int) -> str:
    if status >= 0:
        return f"with exit status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"


def main() -> None:
    """Run the child: answer requests until the parent closes its end or dies.

    `sys.argv` ends with the backend's name and the device number.
    """
    for number in SIGNALS:  # sent to the whole process group; the parent handles them
        signal.signal(number, signal.SIG_IGN)
    name, index = sys.argv[-2:]
    incoming, outgoing = _take_standard_streams()
    requests: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def listen() -> None:
        for line in incoming:
            requests.put(json.loads(line))
        os._exit(0)  # whatever it is at

    def reply(message: Message) -> None:
        outgoing.write(json.dumps(message).encode() + b"\n")

    threading.Thread(target=listen, daemon=True).start()
    try:
        backend = get_backend(name, int(index))
    except (MucudnnError, ValueError) as e:
        reply({"unavailable": str(e)})
        return
    reply({"ready": True})
    _serve(backend, iter(requests.get, None), reply)


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return private copies of stdin and stdout, which no library inherits."""
    incoming = os.fdopen(os.dup(0), "rb")
    outgoing = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return incoming, outgoing


def _serve(
    backend: Backend, requests: Iterator[Message], reply: Callable[[Message], None]
) -> None:
    task: BenchTask | None = None
    bench: KernelBench | None = None
    for request in requests:
        match request:
            case {"open": opened}:
                bench = None  # its buffers first
                task = BenchTask(
                    backend=backend,
                    problem=problem_from_dict(opened["problem"]),
                    rule=StoppingRule(**opened["rule"]),
                    memory_limit=opened["memory_limit"],
                    deadline=time.monotonic() + opened["left_s"],
                )
                bench = KernelBench(task)
            case {"run": kernel} if bench is not None and task is not None:
                reply({"begins": kernel["algo"]})
                row = _row(task, bench, KernelRun(**kernel))
                usable = row.status is not RowStatus.FAILED or _works(backend)
                reply({"row": perf_to_dict(row), "usable": usable})
            case {"release": _} if bench is not None:
                bench.release()


def _works(backend: Backend) -> bool:
    """Return whether the device still works; some CUDA errors are permanent."""
    device = backend.device
    try:
        device.elapsed_ms(device.begin(), device.record())
        device.allocate(1)
    except Exception:  # whatever a driver's binding calls it
        logger.debug("the device is lost", exc_info=True)
        return False
    return True


def _row(task: BenchTask, bench: KernelBench, kernel: KernelRun) -> AlgoPerf:
    """Return one row; an exception of the bench becomes a failed row."""
    try:
        return bench.time(kernel)
    except Exception as e:
        problem = task.problem.with_batch(kernel.batch)
        logger.warning("%s failed on %s", kernel.algo, problem, exc_info=True)
        return task.row(kernel, None, f"{type(e).__name__}: {e}")
