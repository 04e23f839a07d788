"""Memory and time on the CPU, memory-mapped files, and shared memory as a peer."""

import errno
import math
import mmap
import os
import platform
import queue
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from mucudnn.backends.cpu.threads import numpy_blas
from mucudnn.backends.device import Slab, Start, Way
from mucudnn.errors import (
    BackendError,
    BackendUnavailableError,
    MucudnnError,
    OutOfMemoryError,
)
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tensor import TensorSpec
from mucudnn.plugins import installed_version
from mucudnn.processes import PerProcess

# Asynchronous copies: one thread per direction, overlapped with kernels.
#
# `np.copyto` of large byte views releases the interpreter lock. Kernels have finished
# when they return, so a requested copy may start at once.


CHUNK = 4 << 20
"""Bytes copied between two checks whether to stop."""

Copy = Callable[[Any, Any], None]


class CpuTicket:
    """A copy: done, failed or dropped once the lock `over` is free."""

    __slots__ = ("failed", "over", "process")

    def __init__(self) -> None:
        self.process = os.getpid()
        self.over = threading.Lock()  # takes a third of an event's time
        self.over.acquire()
        self.failed = False

    def wait(self) -> None:
        """Wait until the copy is over; raise BackendError if a fork left it pending."""
        if self.process != os.getpid() and self.over.locked():
            raise BackendError(
                "a copy was running when this process was forked, and is not "
                "completed here; finish all copies before forking, or start them "
                "afterwards"
            )
        with self.over:
            pass


class _SharedState:
    """State shared by both queues: the request to stop, and the first failure."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.error: BackendError | None = None
        self.queues: list[queue.SimpleQueue[Any]] = []
        self._lock = PerProcess(threading.Lock)

    def fail(self, error: Exception, what: str) -> None:
        with self._lock.value:
            if self.error is None:
                text = error if isinstance(error, MucudnnError) else repr(error)
                self.error = BackendError(f"a copy {what} failed: {text}")
                self.error.__cause__ = error

    def stop(self) -> None:
        self.stopped.set()
        for jobs in self.queues:
            jobs.put(None)


class CpuCopier:
    """Two copy threads, started by the first copy, ended by `close` or collection."""

    def __init__(self, copy: Copy | None = None) -> None:
        self._copy = copy or copy_bytes
        self._state = _SharedState()
        self._threads = PerProcess(
            dict[str, tuple[threading.Thread, queue.SimpleQueue[Any]]]
        )
        self._last: dict[str, CpuTicket] = {}
        weakref.finalize(self, self._state.stop)

    def prebind(self, way: Way, source: Any, target: Any) -> Start:
        """Return a function that starts this copy; nothing is prepared."""
        what = "to the host" if way == "out" else "from the host"
        return partial(self._start, what, source, target)

    def wait(self, ticket: CpuTicket) -> None:
        """Wait for a copy: on the CPU the host is the compute queue."""
        ticket.wait()
        self._check()
        if ticket.failed:
            raise BackendError("a copy was dropped: its copier was closed")

    def finish(self) -> None:
        """Wait for the last copy of each queue."""
        for ticket in self._last.values():
            ticket.wait()
        self._check()

    def close(self) -> None:
        """Stop after the chunks in progress, and join the threads."""
        self._state.stop()
        for thread, _ in self._threads.value.values():
            if thread.is_alive():  # Ctrl-C may have come before it began
                thread.join()
        self._threads.value.clear()

    def _start(
        self, what: str, source: Any, target: Any, after: Sequence[CpuTicket] = ()
    ) -> CpuTicket:
        self._check()
        if self._state.stopped.is_set():
            raise BackendError(f"a copy {what} was requested from a closed copier")
        source, target = _bytes(source), _bytes(target)
        if source.size != target.size:
            raise BackendError(
                f"a copy {what} of {source.size} bytes was given {target.size}"
            )
        ticket = CpuTicket()
        threads = self._threads.value
        # Each direction has a thread of its own, from its first copy on.
        if what not in threads:
            jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_serve,
                args=(jobs, self._state, self._copy, what),
                name=f"mucudnn copies {what}",
                daemon=True,
            )
            self._state.queues.append(jobs)
            threads[what] = (thread, jobs)
            thread.start()
        threads[what][1].put((source, target, tuple(after), ticket))
        self._last[what] = ticket
        return ticket

    def _check(self) -> None:
        if (error := self._state.error) is not None:
            raise BackendError(str(error)) from error.__cause__


def _serve(
    jobs: "queue.SimpleQueue[Any]", state: _SharedState, copy: Copy, what: str
) -> None:
    """Run a queue's copies, without a reference to the copier: it can be collected."""
    while (job := jobs.get()) is not None:
        source, target, after, ticket = job
        try:
            for earlier in after:
                earlier.wait()
            lost = any(earlier.failed for earlier in after)  # maybe of another copier
            ticket.failed = lost or not _copy_chunks(source, target, state, copy)
            if lost:
                state.fail(BackendError("a copy that it waits for failed"), what)
        except Exception as e:  # any failure must reach the waiting thread
            ticket.failed = True
            state.fail(e, what)
        finally:
            del source, target, job
            ticket.over.release()


def _copy_chunks(source: Any, target: Any, state: _SharedState, copy: Copy) -> bool:
    """Copy chunk by chunk; return False if stopped or after a failure elsewhere."""
    for at in range(0, source.size, CHUNK):
        if state.stopped.is_set() or state.error is not None:
            return False
        copy(source[at : at + CHUNK], target[at : at + CHUNK])
    return True


def copy_bytes(source: Any, target: Any) -> None:
    """Copy bytes between views of one size, which may be memory-mapped files."""
    np.copyto(target, source)
    _release_pages(source)
    _release_pages(target)


def _release_pages(view: Any) -> None:
    """Release the pages of a view if it is a memory-mapped file."""
    # Touched pages of a file count as the process's own memory until the system needs
    # them, so tensors offloaded to a file would stay in memory after all. No data is
    # lost: written pages go to the file, reads come from the file or the page cache.
    owner = view
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = view.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    owner.madvise(mmap.MADV_DONTNEED, first, start + view.nbytes - first)


def _bytes(array: Any) -> Any:
    return array.reshape(-1).view(np.uint8)


ALIGNMENT = 64
"""Bytes; a cache line, and the width of the widest vector register."""


class CpuDevice:
    """Host memory and the performance counter; the fingerprint names `libraries`."""

    _libraries: Sequence[str] = ()

    def __init__(self, libraries: Sequence[str] = ()) -> None:
        self._libraries = tuple(libraries)

    @cached_property
    def fingerprint(self) -> str:
        """Processor, threads, and all libraries whose kernels run."""
        ours = f"mucudnn-{installed_version()}"
        numpy = f"numpy-{np.__version__}"
        parts = ["cpu", _processor(), ours, numpy, *_blas()[:1], *self._libraries]
        return "/".join(parts)

    def description(self) -> Mapping[str, str]:
        """Return the processor, usable cores, and library versions."""
        return {
            "processor": _processor(),
            "cores": str(_cores()),
            "system": platform.platform(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "blas": ", ".join(_blas()) or "none found",
        }

    def allocate(self, nbytes: int) -> Any:
        """Return a byte array aligned to a cache line."""
        try:
            raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        # Sizes beyond 2**63 raise the last two.
        except (MemoryError, ValueError, OverflowError) as e:
            raise OutOfMemoryError(f"no room for {nbytes} bytes: {e}") from e
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + nbytes]

    def trim(self) -> None:
        """Do nothing: no memory is cached."""

    def available_bytes(self) -> int:
        """Return the memory available without swapping, within a container's limit."""
        return int(min(_free_memory(), _free_of_container()))

    def view(self, buffer: Any, offset: int, spec: TensorSpec) -> Any:
        """Return a NumPy view."""
        window = buffer[offset : offset + spec.nbytes]
        return window.view(spec.dtype).reshape(spec.shape)

    def dense(self, array: Any, *, copy: bool = False) -> Any:
        """Return a C-contiguous array."""
        if copy:
            return array.copy()
        return array if array.flags.c_contiguous else np.ascontiguousarray(array)

    def overlap(self, one: Any, other: Any) -> bool:
        """Compare bounds, which is exact for arrays without gaps."""
        return np.may_share_memory(one, other)

    def randomize(self, array: Any) -> None:
        """Fill with uniform numbers in [-1, 1)."""
        rng = np.random.default_rng(0)
        if array.dtype in (np.float32, np.float64):
            rng.random(out=array, dtype=array.dtype)
        else:
            array[...] = rng.random(array.shape)
        array *= 2
        array -= 1

    def upload(self, source: Any, target: Any) -> None:
        """Copy from an array to a tensor."""
        np.copyto(target, source)

    def download(self, source: Any) -> Any:
        """Return a copy."""
        return source.copy()

    def queue(self) -> threading.Thread:
        """Return the calling thread, which runs its kernels synchronously."""
        return threading.current_thread()

    def begin(self, launches: int = 1) -> float:
        """Return the time: launching a kernel runs it."""
        return self.record()

    def record(self) -> float:
        """Return the time in ms; kernels have finished when they return."""
        return time.perf_counter() * 1e3

    def elapsed_ms(self, start: float, stop: float) -> float:
        """Return the difference of two marks."""
        return stop - start

    def host(self, nbytes: int) -> Any:
        """Return more of the same memory, which represents the host."""
        return self.allocate(nbytes)

    def copier(self) -> CpuCopier:
        """Return two copy threads, whose copies overlap with kernels."""
        return CpuCopier()

    def peer(self, index: int, nbytes: int) -> "DiskTier":
        """Return shared memory, which represents another device."""
        if index == 0:
            raise ValueError(
                "peer:0 is the device itself; the first other device is peer:1"
            )
        if not _SHARED_MEMORY.is_dir():
            raise BackendUnavailableError(
                f"peer:{index} on the CPU is shared memory in {_SHARED_MEMORY}, which "
                "this system lacks"
            )
        return DiskTier(nbytes, _SHARED_MEMORY, f"peer:{index}")


def _blas() -> list[str]:
    return [
        f"{lib['internal_api']}-{lib['version']}-{lib.get('architecture', '')}"
        f"/{lib['num_threads']}-threads"
        for lib in (library.info() for library in numpy_blas())
    ]


def _cores() -> int:
    allowed: Any = getattr(os, "sched_getaffinity", None)
    return os.cpu_count() or 1 if allowed is None else len(allowed(0))


def _free_memory() -> int:
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_of_container(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the unused part of a control group's limit; infinity without one."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return math.inf
    return math.inf if limit == "max" else max(0, int(limit) - used)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields: dict[str, str] = {}
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
        if model := fields.get("model name"):
            family = f"family {fields.get('cpu family')} model {fields.get('model')}"
            return f"{model} ({family})"
    return platform.processor() or platform.machine()


_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_SHARED_MEMORY = Path("/dev/shm")


class DiskTier(Slab):
    """A memory-mapped anonymous file, which disappears with the mapping.

    The file has its full size from the start, so that a full disk raises an error
    instead of crashing whoever writes to the mapping later. No file remains even if the
    process is killed. The driver stages a GPU's copies to such memory, and the host
    waits for them.

    Args:
        nbytes: Size of the file, reserved at once.
        folder: Folder on the file system to use; the system's temporary folder if None.
        name: How messages call the memory.
    """

    def __init__(
        self, nbytes: int, folder: str | Path | None = None, name: str = ""
    ) -> None:
        where = Path(tempfile.gettempdir() if folder is None else folder)
        try:
            with tempfile.TemporaryFile(dir=where, prefix="mucudnn-") as file:
                _reserve(file.fileno(), max(1, nbytes), where)
                mapping = mmap.mmap(file.fileno(), max(1, nbytes))
        except OSError as e:
            raise ValueError(
                f"cannot create a file in {where}: {e.strerror}; name a writable folder"
            ) from e
        slab = np.frombuffer(mapping, np.uint8)
        super().__init__(name or f"a file in {where}", slab, nbytes)


def _reserve(file: int, nbytes: int, where: Path) -> None:
    """Give a file its full size; a sparse file where space cannot be reserved."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, nbytes)
        else:
            os.ftruncate(file, nbytes)
    except (OSError, OverflowError) as e:
        # A size that no file may have arrives as an overflow.
        full = isinstance(e, OverflowError) or e.errno in _FULL
        if not full:
            raise
        if nbytes > (most := file_size_limit()):
            raise OutOfMemoryError(
                f"a file in {where} cannot have {format_bytes(nbytes, int(most))}: "
                f"the limit of this process is {format_bytes(int(most), nbytes)} per "
                "file (`ulimit -f`, in blocks); raise it, or use less of this tier"
            ) from e
        stat = os.statvfs(where)
        free = stat.f_bavail * stat.f_frsize
        raise OutOfMemoryError(
            f"no room for {format_bytes(nbytes, free)} on the disk of {where}; "
            f"{format_bytes(free, nbytes)} are free, or less if there is a quota"
        ) from e


def file_size_limit() -> float:
    """Return how many bytes a file of this process may have; infinity for no limit."""
    try:
        import resource
    except ImportError:  # a system without such limits
        return math.inf
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return math.inf if most == resource.RLIM_INFINITY else most
