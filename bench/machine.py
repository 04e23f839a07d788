"""Which machine and which libraries a figure was measured with."""

import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["describe"]


def describe() -> dict[str, Any]:
    """Processor, cores, libraries, and the settings that change BLAS's speed."""
    from mucudnn.backends import get_backend
    from mucudnn.plugins import installed_version

    return {
        "measured_at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": " ".join(["python -m bench", *map(_beside, sys.argv[1:])]),
        "fingerprint": get_backend("cpu").device.fingerprint,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "mucudnn": installed_version(),
        "numpy": version("numpy"),
        "pulp": version("pulp"),
        "torch": _version("torch"),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("OPENBLAS_", "OMP_", "MKL_", "ONEDNN_"))
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _beside(argument: str) -> str:
    """An argument; of a path, only its way from here: the rest is one machine's."""
    path = Path(argument)
    return os.path.relpath(path) if path.is_absolute() else argument
