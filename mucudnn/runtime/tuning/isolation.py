"""Time kernels in a child process: a crash costs one row and not the program.

A kernel that kills its process, hangs, or corrupts the device's context becomes a
failed row, and a new child runs the next kernels. Starting a child may take seconds, so
one child serves all layers of a tuner, one kernel at a time.

Both processes exchange lines of JSON; numbers may be `Infinity`, as both are Python.
Parent to child: `{"measure": …}` with a `SizeRequest` of one algorithm, or
`{"release": true}`. Child to parent: once `{"ready": true}` or `{"unavailable": "…"}`;
then for each request first `{"begins": true}` and at the end `{"row": …, "usable":
true}`. `usable` says whether the device still works, which it may not after a kernel
that failed.

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
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO

from mucudnn.backends import Backend, get_backend
from mucudnn.codecs import decode_perf, perf_to_dict
from mucudnn.errors import BackendUnavailableError, MucudnnError
from mucudnn.ir.conv import AlgoPerf
from mucudnn.ir.numerics import RowStatus
from mucudnn.processes import SIGNALS, PerProcess
from mucudnn.runtime.tuning.kernel_timer import (
    KernelTimer,
    LocalTimer,
    Message,
    SizeRequest,
    measure_size,
    row_of,
)

logger = logging.getLogger(__name__)

_START_S = 300.0  # a cold disk and a driver that compiles
_FALSE_STARTS = 3
_END_S = 10.0  # ample for a killed process to end
_TAIL_BYTES = 4096
_TAIL_LINES = 8
_CHUNK = 1 << 16

_REMEDY = "isolate=False measures in this process"

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mucudnn.runtime.tuning.isolation import main; main()"
)


class Isolation:
    """Chooses between measuring in this process and in one child per device.

    By default, children are used for backends that may crash.
    """

    def __init__(self, wanted: bool | None = None) -> None:
        self._wanted = wanted
        self._children: dict[tuple[str, int], ChildTimer] = {}

    def timer(self, backend: Backend) -> KernelTimer:
        """Return a timer of kernels on one device."""
        if not (backend.may_crash if self._wanted is None else self._wanted):
            return LocalTimer(backend)
        device = backend.name, backend.index
        if device not in self._children:
            self._children[device] = ChildTimer(backend)
        return self._children[device]

    def close(self) -> None:
        """End all children; later measurements start new ones."""
        for child in self._children.values():
            child.close()


class ChildTimer:
    """Times kernels in a child process on one device, restarted when needed.

    A child that ends while it runs a kernel is a result; one that ends before is
    replaced, twice. Where a failure leaves the device's context unusable, the child is
    ended and the next kernel starts a new one. Thread-safe: kernels are timed one after
    another.

    Args:
        backend: Backend that the child loads by name and index.
        hang_s: Seconds beyond the expected time after which a kernel's process is
            killed.
    """

    def __init__(self, backend: Backend, *, hang_s: float = 60.0) -> None:
        self.backend = backend
        self._hang_s = hang_s
        self._lock = PerProcess(threading.RLock)
        self._child: list[Child] = []  # none or one, shared with the finalizer
        weakref.finalize(self, _end, self._child)

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if none runs."""
        return next((child.pid for child in self._child if child.usable), None)

    def time(self, request: SizeRequest, algo: str, best_ms: float) -> AlgoPerf:
        """Return the row of one algorithm; the end of the child is a failed row."""
        nbytes, rule = request.workspaces[algo], request.limits.rule
        single = replace(request, workspaces={algo: nbytes}, best_ms=best_ms)
        ordinary_s = (rule.budget_ms + 2 * request.expected_ms.get(algo, 0.0)) / 1e3
        with self._lock.value:
            try:
                child = self._begin({"measure": single.to_message()})
                answer = child.hear(self._hang_s + ordinary_s)
            except ChildEndedError as e:
                stderr = self._child[0].stderr_tail
                self.close()
                logger.warning("%s: the process %s: %s", algo, e, stderr)
                error = f"the measuring process {e} while running it"
                return row_of(self.backend, request.micro_batch, algo, nbytes, error)
            except BaseException:  # Ctrl-C, too: messages would be out of step
                self.close()
                raise
            if not answer["usable"]:
                self.close()
            return decode_perf("perf", answer["row"])

    def release(self) -> None:
        """Let the child free its buffers; the next kernel allocates them anew."""
        with self._lock.value:
            if self.pid:
                try:
                    self._child[0].say({"release": True})
                except ChildEndedError:
                    self.close()

    def close(self) -> None:
        """End the child; the next kernel starts another one."""
        with self._lock.value:
            _end(self._child)

    def _begin(self, message: Message) -> "Child":
        """Return a child that has begun a request, after at most three attempts."""
        name, attempt = self.backend.name, 0
        while True:
            try:
                # The first kernel starts a child, and the next one after it was lost.
                if self.pid is None:
                    self.close()
                    self._child.append(Child(name, str(self.backend.index)))
                    hello = self._child[0].hear(_START_S)
                    if (reason := hello.get("unavailable")) is not None:
                        raise BackendUnavailableError(
                            f"backend {name!r} cannot measure in a separate process: "
                            f"{reason}; {_REMEDY}"
                        )
                child = self._child[0]
                child.say(message)
                child.hear(_START_S)
            except ChildEndedError as e:
                stderr = self._child[0].stderr_tail
                self.close()
                attempt += 1
                if attempt == _FALSE_STARTS:
                    raise BackendUnavailableError(
                        f"backend {name!r} cannot measure in a separate process, "
                        f"which {e} {attempt} times in a row before it began; its "
                        f"output: {stderr or 'nothing'}; {_REMEDY}"
                    ) from e
                logger.warning(
                    "the measuring process %s before it began: %s", e, stderr
                )
            else:
                return child


def _end(children: "list[Child]") -> None:
    while children:
        children.pop().end()


class ChildEndedError(Exception):
    """The child has ended; the message completes "the process …"."""


class Child:
    """A running child process, started with `arguments`."""

    def __init__(self, *arguments: str) -> None:
        # `-P`: the current folder must not shadow modules that the child imports.
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        command = [sys.executable or "", "-P", "-c", _START, path, *arguments]
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe
            )
        except OSError as e:
            raise BackendUnavailableError(
                f"cannot start {sys.executable!r} to measure in: {e}; {_REMEDY}"
            ) from e
        self._process = process
        self._pipes: tuple[Any, ...] = process.stdin, process.stdout, process.stderr
        self._owner = os.getpid()
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._tail = b""
        # A child whose pipes nobody reads would block as soon as they are full.
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
        """True if the child runs and was started by this process, not before a fork."""
        return self._owner == os.getpid() and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def stderr_tail(self) -> str:
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
        """Wait for the next message; a child that takes longer is killed."""
        try:
            line = self._answers.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        except queue.Empty:
            self.end()
            raise ChildEndedError(f"was terminated after {seconds:.3g} s") from None
        if line is None:
            raise self._ended()
        try:
            message: Message = json.loads(line)
        except ValueError:
            self.end()
            raise ChildEndedError("was terminated: its answer was invalid") from None
        return message

    def end(self) -> None:
        """Kill the child if it still runs, and release its pipes and threads."""
        # A fork of the parent only closes its own ends of the pipes: the child is not
        # its to kill, and it does not have the threads.
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
            return ChildEndedError("was terminated: it had closed its connection")
        finally:
            self.end()
        if status >= 0:
            return ChildEndedError(f"ended with exit status {status}")
        try:
            return ChildEndedError(f"ended by {signal.Signals(-status).name}")
        except ValueError:
            return ChildEndedError(f"ended by signal {-status}")

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


def main() -> None:
    """Run the child: answer requests until the parent closes its end or dies.

    `sys.argv` ends with the backend's name and the device number.
    """
    for number in SIGNALS:  # sent to the whole process group; the parent handles them
        signal.signal(number, signal.SIG_IGN)
    # Take stdin and stdout, so that libraries get an empty file and stderr instead.
    incoming = os.fdopen(os.dup(0), "rb")
    outgoing = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    requests: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def listen() -> None:
        for line in incoming:
            requests.put(json.loads(line))
        os._exit(0)  # the parent has ended, whatever kernel runs

    def reply(message: Message) -> None:
        outgoing.write(json.dumps(message).encode() + b"\n")

    threading.Thread(target=listen, daemon=True).start()
    name, index = sys.argv[-2:]
    try:
        backend = get_backend(name, int(index))
    except (MucudnnError, ValueError) as e:
        reply({"unavailable": str(e)})
        return
    reply({"ready": True})

    def send(row: AlgoPerf) -> None:
        usable = row.status is not RowStatus.FAILED or _works(backend)
        reply({"row": perf_to_dict(row), "usable": usable})

    timer = LocalTimer(backend)
    for message in iter(requests.get, None):
        if "release" in message:
            timer.release()
            continue
        request = SizeRequest.from_message(message["measure"])
        reply({"begins": True})
        try:
            measure_size(timer, request, send)
        except Exception as e:
            problem, ((algo, nbytes),) = request.micro_batch, request.workspaces.items()
            logger.warning("%s failed on %s", algo, problem, exc_info=True)
            send(row_of(backend, problem, algo, nbytes, f"{type(e).__name__}: {e}"))


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
