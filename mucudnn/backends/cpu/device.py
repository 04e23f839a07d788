"""Memory and time on the CPU."""

import platform
import time
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from mucudnn.errors import OutOfMemoryError
from mucudnn.ir.tensor import TensorSpec

__all__ = ["ALIGNMENT", "CpuDevice"]

ALIGNMENT = 64
"""Bytes; a cache line, and the width of the widest vector register."""


class CpuDevice:
    """Host memory and the performance counter."""

    @cached_property
    def fingerprint(self) -> str:
        """Processor, threads, and the libraries whose kernels run: ours among them."""
        blas = [
            f"{lib['internal_api']}-{lib['version']}-{lib.get('architecture', '')}"
            f"/{lib['num_threads']}-threads"
            for lib in threadpool_info()
            if lib["user_api"] == "blas"
        ]
        ours = f"mucudnn-{_installed_version()}"
        numpy = f"numpy-{np.__version__}"
        return "/".join(["cpu", _processor(), ours, numpy, *blas[:1]])

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

    def view(self, buffer: Any, offset: int, spec: TensorSpec) -> Any:
        """A NumPy view."""
        window = buffer[offset : offset + spec.nbytes]
        return window.view(spec.dtype).reshape(spec.shape)

    def dense(self, array: Any) -> Any:
        """A C-contiguous array."""
        return array if array.flags.c_contiguous else np.ascontiguousarray(array)

    def randomize(self, array: Any) -> None:
        """Uniform in [-1, 1)."""
        rng = np.random.default_rng(0)
        if array.dtype in (np.float32, np.float64):
            rng.random(out=array, dtype=array.dtype)
        else:
            array[...] = rng.random(array.shape)
        array *= 2
        array -= 1

    def record(self) -> float:
        """The time, in ms; kernels have finished when they return."""
        return time.perf_counter() * 1e3

    def elapsed_ms(self, start: float, stop: float) -> float:
        """Difference of two marks."""
        return stop - start


def _installed_version() -> str:
    try:
        return version("mucudnn")
    except PackageNotFoundError:
        return "unknown"


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
