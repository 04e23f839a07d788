"""What a part is told, and what it answers."""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.facts import facts
from bench.gpu.keeping import Keeper
from bench.gpu.store import write_json
from mucudnn.backends import Backend, get_backend
from mucudnn.errors import BackendUnavailableError
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.timing import StoppingRule

__all__ = ["CACHE", "RECORDINGS", "RULE", "Job", "Report"]

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
