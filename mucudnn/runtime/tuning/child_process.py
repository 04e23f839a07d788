"""A child Python that answers in JSON lines, and what is known once it has ended.

It is started with `subprocess` and not with `multiprocessing`, so that a user's script
needs no `__main__` guard. It sees the modules that this process sees.
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
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from mucudnn.errors import BackendUnavailableError

__all__ = ["ChildEndedError", "ChildProcess"]

logger = logging.getLogger(__name__)

_TAIL_BYTES = 4096
_TAIL_LINES = 8
_END_S = 10.0  # a process that was killed is gone long before
_CHUNK = 1 << 16
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mucudnn.runtime.tuning.measuring_child import main; main()"
)


class ChildEndedError(Exception):
    """The child is gone; the message says how and completes "the process …"."""


class ChildProcess:
    """One running child.

    Args:
        arguments: Follow `sys.path` in the child's `sys.argv`.

    Raises:
        BackendUnavailableError: No Python can be started here.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        command = [sys.executable or "", "-P", "-c", _START, path, *arguments]
        try:
            process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as e:
            raise BackendUnavailableError(
                f"cannot start {sys.executable!r} to measure in: {e}; "
                "isolate=False measures in this process"
            ) from e
        self._process = process
        self._owner = os.getpid()
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._tail = b""
        self._threads = [
            threading.Thread(target=listen, args=(stream,), daemon=True)
            for listen, stream in (
                (self._listen, process.stdout),
                (self._overhear, process.stderr),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def usable(self) -> bool:
        """Whether it runs and is ours: not that of the process we were forked from."""
        return self._owner == os.getpid() and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def said(self) -> str:
        """The last lines it wrote to stderr, up to its end once it has ended."""
        lines = self._tail.decode(errors="replace").split("\n")
        return "\n".join([line for line in lines if line.strip()][-_TAIL_LINES:])

    def say(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            ChildEndedError: Nobody listens.
        """
        try:
            _pipe(self._process.stdin).write(json.dumps(message).encode() + b"\n")
        except OSError:
            raise self._ended() from None

    def hear(self, seconds: float) -> dict[str, Any]:
        """Wait for the next message.

        Raises:
            ChildEndedError: It ended, or took longer, which has ended it.
        """
        limit = min(seconds, threading.TIMEOUT_MAX)
        try:
            line = self._answers.get(timeout=limit)
        except queue.Empty:
            self.end()
            raise ChildEndedError(f"was ended after {seconds:.3g} s") from None
        if line is None:
            raise self._ended()
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:
            self.end()
            raise ChildEndedError("was ended: it garbled its answer") from None
        return message

    def end(self) -> None:
        """Kill it, if it still runs, and leave nothing of it behind.

        A fork of the process that started it only closes its own ends: the child is not
        its to kill, nor has it the threads that listen.
        """
        process = self._process
        if self._owner != os.getpid():
            self._close_pipes()
            return
        process.kill()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            logger.warning("process %d cannot be killed", process.pid)
        deadline = time.monotonic() + 1.0
        for thread in self._threads:  # one of its own children may hold stderr open
            thread.join(max(0.0, deadline - time.monotonic()))
        self._close_pipes()

    def _close_pipes(self) -> None:
        process = self._process
        for stream in (process.stdin, process.stdout, process.stderr):
            _pipe(stream).close()

    def _ended(self) -> ChildEndedError:
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.end()
            return ChildEndedError("was ended: it had closed its end")
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
            logger.debug("process %d: %s", self._process.pid, text)


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    """What arrives, as it arrives, until the other end is closed."""
    try:
        while chunk := stream.read(_CHUNK):
            yield chunk
    except (OSError, ValueError):  # closed at this end
        return


def _pipe(stream: Any) -> BinaryIO:
    pipe: BinaryIO = stream  # Popen has all three, for it was asked for them
    return pipe


def _how(status: int) -> str:
    if status >= 0:
        return f"with exit status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"
