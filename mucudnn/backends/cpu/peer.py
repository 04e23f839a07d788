"""Shared memory owned by another process, which represents a second device on the CPU.

A child process creates a segment of shared memory, reserves all of it, and holds it
until its parent closes the pipe or ends; then it removes the segment. If the owner is
killed, Python's resource tracker removes the segment: nothing is left behind. The data
counts as lost then, as it would be with a device, and the next copy reports it.
"""

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import weakref
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np

from mucudnn.backends.base import Copier, Device
from mucudnn.backends.cpu.copies import CpuCopier, copy_bytes
from mucudnn.errors import BackendError, BackendUnavailableError, OutOfMemoryError
from mucudnn.ir.sizes import format_bytes

__all__ = ["SharedSegment", "own"]

_SEGMENTS = Path("/dev/shm")
_END_S = 10.0
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mucudnn.backends.cpu.peer import own; own(int(sys.argv[2]))"
)


class SharedSegment:
    """Shared memory of another process, as device `index` > 0; see `Device.peer`."""

    def __init__(self, index: int, nbytes: int) -> None:
        if index == 0:
            raise ValueError("peer:0 is the device itself; peer:1 is another one")
        if not _SEGMENTS.is_dir():
            raise BackendUnavailableError(
                f"peer:{index} on the CPU is shared memory in {_SEGMENTS}, which this "
                "system has not"
            )
        self.name = f"peer:{index}"
        self.nbytes = nbytes
        if nbytes > (free := shutil.disk_usage(_SEGMENTS).free):
            raise self._full(f"{format_bytes(free, nbytes)} are free", free)
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        command = [sys.executable, "-P", "-c", _START, path, str(nbytes)]
        pipe = subprocess.PIPE
        self._owner = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe)
        self._end = weakref.finalize(self, _end, self._owner)
        try:
            self._bytes: Any = np.frombuffer(self._mapped(), np.uint8)
        except BaseException:
            self.close()
            raise

    @property
    def owner(self) -> int:
        """Process id of the owner."""
        return self._owner.pid

    def view(self, offset: int, nbytes: int) -> Any:
        """Return a slice of the mapping."""
        return self._bytes[offset : offset + nbytes]

    def copier(self, device: Device) -> Copier:
        """Return two copy threads, which fail once the owner is gone."""
        return CpuCopier(self._copy)

    def close(self) -> None:
        """End the owner, and with it the segment; views stay readable."""
        self._end()
        self._bytes = None

    def _copy(self, source: Any, target: Any) -> None:
        status = self._owner.poll()
        if status is not None:
            raise BackendError(
                f"process {self.owner}, which owned the memory of {self.name}, ended "
                f"with exit status {status}; what was there is lost"
            )
        copy_bytes(source, target)

    def _mapped(self) -> mmap.mmap:
        stream = self._owner.stdout
        answer = json.loads((stream and stream.readline()) or "{}")
        if (reason := answer.get("full")) is not None:
            raise self._full(reason)
        if "segment" not in answer:
            raise BackendUnavailableError(
                f"the process that should own the memory of {self.name} ended with "
                f"exit status {self._owner.wait(_END_S)}"
            )
        self.segment = _SEGMENTS / answer["segment"]
        with self.segment.open("r+b") as file:
            return mmap.mmap(file.fileno(), max(1, self.nbytes))

    def _full(self, reason: str, *free: int) -> OutOfMemoryError:
        needed = format_bytes(self.nbytes, *free)
        return OutOfMemoryError(
            f"no room for {needed} of {self.name} in shared memory: {reason}"
        )


def _end(owner: "subprocess.Popen[bytes]") -> None:
    for stream in (owner.stdin, owner.stdout):
        if stream is not None:
            stream.close()
    try:
        owner.wait(_END_S)
    except subprocess.TimeoutExpired:
        owner.kill()
        owner.wait(_END_S)


def own(nbytes: int) -> None:
    """Own a segment: create it, print its name, and hold it until stdin ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent ends this process
        signal.signal(number, signal.SIG_IGN)
    segment = SharedMemory(create=True, size=max(1, nbytes))
    try:
        with (_SEGMENTS / segment.name).open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, nbytes))
    except OSError as e:
        answer = {"full": e.strerror}
    else:
        answer = {"segment": segment.name}
    try:
        os.write(1, json.dumps(answer).encode() + b"\n")
        while os.read(0, 1):
            pass
    finally:
        segment.close()
        segment.unlink()
