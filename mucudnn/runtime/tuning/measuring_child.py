"""A child process that measures kernels: its protocol, start and end.

Both ends exchange lines of JSON; numbers may be `Infinity`, as both are Python. Parent
to child::

    {"open": {"problem": …, "rule": …, "memory_limit": …, "left_s": …}}
    {"run": {"batch": 8, "algo": "GEMM", "nbytes": 0, "best_ms": …, "expected_ms": …}}
    {"release": true}

Child to parent: once `{"ready": true}` or `{"unavailable": "…"}`; then for each `run`
first `{"begins": "GEMM"}` and at the end `{"row": …, "usable": true}`. `usable` says
whether the device still works, which it may not after a kernel that failed.

The child is started with `subprocess` instead of `multiprocessing`, so that a user's
script needs no `__main__` guard, and it gets the `sys.path` of its parent. It moves
stdin and stdout elsewhere at the start: a library that prints or reads gets stderr and
an empty file instead.
"""

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from mucudnn.backends import Backend, get_backend
from mucudnn.codecs.values import perf_to_dict, problem_from_dict
from mucudnn.errors import BackendUnavailableError, MucudnnError
from mucudnn.ir.conv import AlgoPerf
from mucudnn.ir.status import RowStatus
from mucudnn.runtime.interrupts import SIGNALS
from mucudnn.runtime.tuning.kernel_bench import BenchTask, KernelBench, KernelRun
from mucudnn.runtime.tuning.timing import StoppingRule

__all__ = ["HERE_INSTEAD", "Child", "ChildEndedError", "Message", "main"]

logger = logging.getLogger(__name__)

Message = dict[str, Any]

HERE_INSTEAD = "isolate=False measures in this process"
"""Remedy in error messages."""

_END_S = 10.0  # ample for a killed process to end
_TAIL_BYTES = 4096
_TAIL_LINES = 8
_CHUNK = 1 << 16
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mucudnn.runtime.tuning.measuring_child import main; main()"
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
