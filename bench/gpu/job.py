"""What a part of `bench.gpu` is told and answers, and how its results are kept."""

import functools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.gpu.archive import pack
from mucudnn.backends import Backend, get_backend
from mucudnn.errors import BackendUnavailableError
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.timing import StoppingRule

CACHE = "cache.sqlite"
"""Every measurement, as it is made; parts share it."""

RECORDINGS = "recording-*.json.gz"
"""The same to take away, a file a data type and layout; they fill an empty cache."""

RULE = StoppingRule(
    min_samples=3, max_samples=10, margin=0.02, budget_ms=30.0, hopeless=float("inf")
)
"""For kernels of a few milliseconds at most.

A first run builds its plan, so that its time is no reason to give a kernel up.
"""

_RESERVED_S = 3.0
"""Of a part's time, kept for writing down what it has."""


_SHARE = 0.05
"""Of the time: a part may be killed without notice, but packing costs time, too."""


@dataclass
class Keeper:
    """Packs one folder into another.

    Args:
        work: Where results are.
        out: Where archives go; None if the folder itself is kept.
        least_s: Seconds between two times at least.
    """

    work: Path
    out: Path | None
    least_s: float = 5.0
    _due: float = field(default=0.0, init=False)

    def keep(
        self, prepare: Callable[[], object] | None = None, *, now: bool = False
    ) -> None:
        """Write down and pack, where it is time.

        Args:
            prepare: Writes what is not yet a file, such as a recording.
            now: Whatever it costs.
        """
        begun = time.monotonic()
        if begun < self._due and not now:
            return
        if prepare is not None:
            prepare()
        if self.out is not None:
            pack(self.work, self.out)
        ended = time.monotonic()
        self._due = ended + max(self.least_s, (ended - begun) / _SHARE)


@dataclass(frozen=True)
class Job:
    """One run of one part.

    Attributes:
        out: Folder for what it writes.
        backend_name: What to measure.
        ends: `time.monotonic()` at which it must be over.
        batch: Mini-batch size instead of the layers' own, for rehearsals.
        layers: How many layers of each suite at most, for rehearsals.
        tests: Where the tests are.
        rehearsal: Whether there may be no GPU: what only it can run is not missed.
        hang_s: Seconds after which a test that has not ended is given up.
        keeper: Packs results as they come; None where that is not wanted.
    """

    out: Path
    backend_name: str
    ends: float
    batch: int | None = None
    layers: int | None = None
    tests: Path = Path("tests")
    rehearsal: bool = False
    hang_s: float = 60.0
    keeper: Keeper | None = None

    @property
    def left_s(self) -> float:
        """Seconds for measuring."""
        return self.ends - _RESERVED_S - time.monotonic()

    @property
    def deadline(self) -> float:
        """`time.monotonic()` after which nothing more is begun."""
        return self.ends - _RESERVED_S

    @functools.cached_property
    def backend(self) -> Backend:
        """Loaded when first asked for.

        Raises:
            BackendUnavailableError: It cannot be used here.
        """
        return get_backend(self.backend_name)

    def open_cache(self) -> BenchmarkCache:
        """The measurements so far; those of recordings where only they are left."""
        cache = BenchmarkCache(self.out / CACHE)
        if not cache.fingerprints():
            for recording in sorted(self.out.glob(RECORDINGS)):
                cache.import_json(recording)
        return cache

    def keep(
        self, prepare: Callable[[], object] | None = None, *, now: bool = False
    ) -> None:
        """See `Keeper.keep`."""
        if self.keeper is not None:
            self.keeper.keep(prepare, now=now)
        elif now and prepare is not None:
            prepare()

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """A JSON file that says what made it; it is replaced as a whole."""
        try:
            machine = facts(self.backend)
        except BackendUnavailableError:  # what needs no device is asked all the same
            machine = facts()
        write_json(self.out / name, {"machine": machine, **data})


@dataclass(frozen=True)
class Report:
    """How a part ended.

    Attributes:
        complete: Whether there is nothing left to do.
        failures: One line each.
        text: For people.
    """

    complete: bool
    failures: tuple[str, ...] = field(default=())
    text: str = ""


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


def read_json(file: Path) -> dict[str, Any]:
    """What is in a file; nothing where there is none or it cannot be read."""
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Replace a file; numbers that are not finite become null."""
    write_text(file, json.dumps(_finite(data), indent=1, allow_nan=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write beside the file, then rename over it."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(file)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value
