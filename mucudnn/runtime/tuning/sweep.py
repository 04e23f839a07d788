"""Measure one convolution: every algorithm at every micro-batch size of a policy.

What the cache knows is not measured again; what a limit prevented is listed with the
reason and not remembered.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from mucudnn.backends.base import Backend
from mucudnn.ir.conv import AlgoPerf, ConvProblem, PerfTable
from mucudnn.ir.numerics import Numerics, Traits
from mucudnn.ir.status import RowStatus
from mucudnn.passes.convolution.measurement_pruning import Point, next_measurements
from mucudnn.passes.microbatch import (
    BatchPolicy,
    aligned_batches,
    candidate_batches,
)
from mucudnn.runtime.database.cache import BenchmarkCache
from mucudnn.runtime.tuning.isolation import Isolation
from mucudnn.runtime.tuning.kernel_bench import BenchTask, KernelBench
from mucudnn.runtime.tuning.timing import LAUNCH_OVERHEAD_MS, StoppingRule

__all__ = ["Measured", "Sweep"]


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement done: what it was of, and how many of how many."""

    problem: ConvProblem
    algo: str
    batch: int
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """How to fill a table of measurements.

    Attributes:
        backends: Devices of one model; sizes are dealt out among them.
        cache: Opens what is known already, where the rest is remembered, too.
        rule: When a kernel has been timed enough.
        numerics: Which ways of computing are accepted; others are not measured.
        memory_limit: Bytes for operands and workspace, on each device.
        deadline: Seconds on `clock` after which nothing more is started.
        progress: Called after each measurement, from one thread at a time.
        isolation: Whether to measure in this process or in children.
        clock: Seconds, for the deadline only; children have a clock of their own.
    """

    backends: Sequence[Backend]
    cache: Callable[[], BenchmarkCache]
    rule: StoppingRule
    numerics: Numerics = field(default_factory=Numerics)
    memory_limit: float = math.inf
    deadline: float = math.inf
    progress: Callable[[Measured], None] | None = None
    isolation: Isolation = field(default_factory=Isolation)
    clock: Callable[[], float] = field(default_factory=lambda: time.monotonic)

    def table(
        self, problem: ConvProblem, policy: BatchPolicy, *, prune: bool
    ) -> PerfTable:
        """Measure `problem`; failing algorithms are rows, never exceptions.

        Pruning measures only what could enter a good plan, under the policy `all`; see
        `next_measurements`.
        """
        sizes = candidate_batches(problem.batch, policy)
        alignment = self.backends[0].split_alignment
        work = _Work(self, problem, aligned_batches(problem, sizes, alignment))
        try:
            if prune and policy == "all":
                while points := work.promising():
                    work.measure(points)
            else:
                work.measure(work.workspaces)
        finally:
            work.release()
        rows = sorted(work.rows.values(), key=lambda p: (-p.batch, p.algo))
        return PerfTable(problem, tuple(rows), LAUNCH_OVERHEAD_MS)


class _Work:
    """One table in the making."""

    def __init__(
        self, sweep: Sweep, problem: ConvProblem, sizes: Sequence[int]
    ) -> None:
        self._sweep = sweep
        self._problem = problem
        self._fingerprint = sweep.backends[0].device.fingerprint
        self._lock = threading.Lock()
        self._sizes = tuple(sorted(sizes))
        self._total = 0  # rows there will be, those known counted
        self._benches = [
            sweep.isolation.bench(
                BenchTask(
                    backend=backend,
                    problem=problem,
                    rule=sweep.rule,
                    memory_limit=sweep.memory_limit,
                    deadline=sweep.deadline,
                    clock=sweep.clock,
                )
            )
            for backend in sweep.backends
        ]
        self.workspaces: dict[Point, int] = {}
        self._traits: dict[Point, Traits] = {}
        self.rows: dict[Point, AlgoPerf] = {}
        conv = sweep.backends[0].conv
        for batch in sorted(sizes, reverse=True):
            micro = problem.with_batch(batch)
            for algo, nbytes in conv.algorithms(micro):
                traits = conv.traits(micro, algo)
                whole = batch == problem.batch
                refusal = sweep.numerics.refusal(traits, whole=whole)
                if refusal is not None:
                    self.rows[algo, batch] = _excluded(algo, batch, refusal)
                    continue
                self.workspaces[algo, batch] = nbytes
                self._traits[algo, batch] = traits
            for algo, reason in conv.excluded(micro):
                self.rows[algo, batch] = _excluded(algo, batch, reason)
        self._hints: dict[str, list[AlgoPerf]] = {}
        self._cache = sweep.cache()
        for perf in self._cache.get_all(self._fingerprint, problem):
            self._hints.setdefault(perf.algo, []).append(perf)
            if self._holds(perf):
                self.rows[perf.algo, perf.batch] = perf

    def _holds(self, perf: AlgoPerf) -> bool:
        """Whether a remembered row is of what would run: same mode, same workspace."""
        point = perf.algo, perf.batch
        traits = Traits(perf.deterministic, perf.math_mode, perf.notes)
        return perf.workspace == self.workspaces.get(
            point
        ) and traits == self._traits.get(point)

    def release(self) -> None:
        """Give the buffers back: what runs next may need the memory."""
        for bench in self._benches:
            bench.release()

    def promising(self) -> Sequence[Point]:
        """Points that pruning asks for next."""
        points = next_measurements(
            self._sizes,
            self.workspaces,
            tuple(self.rows.values()),
            launch_overhead_ms=LAUNCH_OVERHEAD_MS,
        )
        return [point for point in points if point not in self.rows]

    def measure(self, points: Iterable[Point]) -> None:
        """Time what is not known of the points, on all devices at once.

        The largest sizes come first, as buffers for them serve all others; but where
        nothing is known the smallest one tells cheaply what the others will take.
        """
        by_batch: dict[int, list[str]] = {}
        for algo, batch in points:
            if (algo, batch) not in self.rows:
                by_batch.setdefault(batch, []).append(algo)
        batches = sorted(by_batch, reverse=True)
        if not (self._hints or self._times()):
            batches = [*batches[-1:], *batches[:-1]]
        self._total = len(self.rows) + sum(map(len, by_batch.values()))
        shares = [
            (bench, batches[i :: len(self._benches)])
            for i, bench in enumerate(self._benches)
        ]

        def work(share: tuple[KernelBench, list[int]]) -> None:
            bench, sizes = share
            for batch in sizes:
                self._measure_size(bench, batch, by_batch[batch])

        if len(shares) == 1:
            work(shares[0])
            return
        with ThreadPoolExecutor(len(shares)) as pool:
            list(pool.map(work, shares))

    def _measure_size(
        self, bench: KernelBench, batch: int, algos: Sequence[str]
    ) -> None:
        with self._lock:
            expected = {algo: self._expected_ms(algo, batch) for algo in algos}
            ordered = sorted(algos, key=expected.__getitem__)  # likely winners first
            if math.isfinite(self._sweep.deadline):
                slowest = max((p.time_ms / p.batch for p in self._times()), default=0.0)
                for algo in algos:  # one of which nothing is known is no faster
                    expected[algo] = expected[algo] or batch * slowest
            best_ms = self._best_ms(batch)
        workspaces = {algo: self.workspaces[algo, batch] for algo in ordered}
        bench.run(batch, workspaces, self._keep, best_ms, expected)

    def _keep(self, perf: AlgoPerf) -> None:
        micro = self._problem.with_batch(perf.batch)
        with self._lock:
            self.rows[perf.algo, perf.batch] = perf
            if perf.status is not RowStatus.LIMITED:
                self._cache.put(self._fingerprint, micro, [perf])
            if self._sweep.progress is not None:
                done = len(self.rows)
                total = max(done, self._total)
                self._sweep.progress(
                    Measured(micro, perf.algo, perf.batch, done, total)
                )

    def _best_ms(self, batch: int) -> float:
        return min(
            (p.time_ms for p in self._times() if p.batch == batch), default=math.inf
        )

    def _times(self) -> list[AlgoPerf]:
        return [perf for perf in self.rows.values() if perf.error is None]

    def _expected_ms(self, algo: str, batch: int) -> float:
        """Time of one run, in proportion to the nearest size known; 0 if none is."""
        known = [
            perf
            for perf in (*self.rows.values(), *self._hints.get(algo, ()))
            if perf.algo == algo and perf.error is None
        ]
        if not known:
            return 0.0
        nearest = min(known, key=lambda perf: abs(perf.batch - batch))
        expected: float = nearest.time_ms * batch / nearest.batch
        return expected


def _excluded(algo: str, batch: int, reason: str) -> AlgoPerf:
    return AlgoPerf(
        algo=algo, batch=batch, time_ms=math.inf, workspace=0, error=reason, samples=0
    )
