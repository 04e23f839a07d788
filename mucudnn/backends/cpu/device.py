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

    def peer(self, index: int, nbytes: int) -> SharedSegment:
        """Return shared memory of another process, which represents another device."""
        return SharedSegment(index, nbytes)


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
