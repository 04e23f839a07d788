"""Which machine, libraries and command a result is of."""

import functools
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mucudnn.backends import Backend

__all__ = ["facts"]

_PACKAGES = (
    *("mucudnn", "numpy", "pulp", "torch", "triton"),
    *("cupy-cuda13x", "cupy-cuda12x", "cuda-pathfinder"),
    *("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
)
_SETTINGS = ("CUDA_", "CUDNN_", "CUPY_", "NVIDIA_", "TORCH_", "OMP_", "MUCUDNN_")


@functools.cache
def facts(backend: Backend | None = None) -> dict[str, Any]:
    """Plain values; the device only where a backend is given."""
    device = {} if backend is None else dict(backend.device.description())
    return {
        "measured_at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": " ".join(["python -m bench.gpu", *sys.argv[1:]]),
        "fingerprint": None if backend is None else backend.device.fingerprint,
        "device": device,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {n: v for n in _PACKAGES if (v := _version(n)) is not None},
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_SETTINGS)
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
