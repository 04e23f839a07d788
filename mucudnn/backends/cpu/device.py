"""Memory and time on the CPU."""

import math
import os
import platform
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mucudnn.backends.cpu.blas import numpy_blas
from mucudnn.backends.cpu.copies import CpuCopier
from mucudnn.backends.cpu.peer import SharedSegment
from mucudnn.errors import OutOfMemoryError
from mucudnn.ir.tensor import TensorSpec
from mucudnn.version import installed_version

__all__ = ["ALIGNMENT", "CpuDevice"]

ALIGNMENT = 64
"""Bytes; a cache line, and the width of the widest vector register."""


class CpuDevice:
    """Host memory and the performance counter.

    Args:
        libraries: Others whose kernels run besides, as the fingerprint names them.
    """

    _libraries: Sequence[str] = ()

    def __init__(self, libraries: Sequence[str] = ()) -> None:
        self._libraries = tuple(libraries)

    @cached_property
    def fingerprint(self) -> str:
        """Processor, threads, and the libraries whose kernels run: ours among them."""
        ours = f"mucudnn-{installed_version()}"
        numpy = f"numpy-{np.__version__}"
        parts = ["cpu", _processor(), ours, numpy, *_blas()[:1], *self._libraries]
        return "/".join(parts)

    def description(self) -> Mapping[str, str]:
        """Processor, cores that this process may use, and libraries."""
        return {
            "processor": _processor(),
            "cores": str(_cores()),
            "system": platform.platform(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "blas": ", ".join(_blas()) or "none found",
        }

    def allocate(self, nbytes: int) -> Any:
        """Bytes, aligned to a cache line."""
        try:
            raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        except (
            MemoryError,
            ValueError,
            OverflowError,
        ) as e:  # beyond 2**63: the others
            raise OutOfMemoryError(f"no room for {nbytes} bytes: {e}") from e
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + nbytes]

    def trim(self) -> None:
        """Nothing is held."""

    def available_bytes(self) -> int:
        """Memory that can be had without swapping, and within a container's limit."""
        return int(min(_free_memory(), _free_of_container()))

    def view(self, buffer: Any, offset: int, spec: TensorSpec) -> Any:
        """A NumPy view."""
        window = buffer[offset : offset + spec.nbytes]
        return window.view(spec.dtype).reshape(spec.shape)

    def dense(self, array: Any, *, copy: bool = False) -> Any:
        """A C-contiguous array."""
        if copy:
            return array.copy()
        return array if array.flags.c_contiguous else np.ascontiguousarray(array)

    def overlap(self, one: Any, other: Any) -> bool:
        """By their bounds, which is exact: neither has gaps."""
        return np.may_share_memory(one, other)

    def randomize(self, array: Any) -> None:
        """Uniform in [-1, 1)."""
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
        """A copy."""
        return source.copy()

    def queue(self) -> threading.Thread:
        """The calling thread: its kernels have finished when they return."""
        return threading.current_thread()

    def begin(self, launches: int = 1) -> float:
        """The time: a kernel is launched by running it."""
        return self.record()

    def record(self) -> float:
        """The time, in ms; kernels have finished when they return."""
        return time.perf_counter() * 1e3

    def elapsed_ms(self, start: float, stop: float) -> float:
        """Difference of two marks."""
        return stop - start

    def host(self, nbytes: int) -> Any:
        """More of the same memory, which plays the host."""
        return self.allocate(nbytes)

    def copier(self) -> CpuCopier:
        """Two threads, so that copies overlap with kernels."""
        return CpuCopier()

    def peer(self, index: int, nbytes: int) -> SharedSegment:
        """Shared memory that another process owns, which plays the other device."""
        return SharedSegment(index, nbytes)


def _blas() -> list[str]:
    """NumPy's BLAS, with its kernels and threads."""
    return [
        f"{lib['internal_api']}-{lib['version']}-{lib.get('architecture', '')}"
        f"/{lib['num_threads']}-threads"
        for lib in (library.info() for library in numpy_blas())
    ]


def _cores() -> int:
    """Those that the system lets this process use, where it tells."""
    allowed: Any = getattr(os, "sched_getaffinity", None)
    return os.cpu_count() or 1 if allowed is None else len(allowed(0))


def _free_memory() -> int:
    """What the system calls available; where it does not say, its free pages."""
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_of_container(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """What a control group leaves of its limit; infinity without one."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return math.inf
    return math.inf if limit == "max" else max(0, int(limit) - used)


def _processor() -> str:
    """Model name where the system tells it, else the machine type."""
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
