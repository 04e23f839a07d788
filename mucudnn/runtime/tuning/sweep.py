"""Measure one convolution: every algorithm at every micro-batch size of a policy.

What the cache knows is not measured again; what a limit prevented is listed with the
reason and not remembered.
"""

import math
import threading
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
from mucudnn.runtime.tuning.kernel_bench import KernelBench
from mucudnn.runtime.tuning.timing import StoppingRule

__all__ = ["Progress", "Sweep"]


@dataclass(frozen=True, slots=True)
class Progress:
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
        cache: What is known already, and where the rest is remembered.
        rule: When a kernel has been timed enough.
        numerics: Which ways of computing are accepted; others are not measured.
        memory_limit: Bytes for operands and workspace, on each device.
        deadline: `time.monotonic()` after which nothing more is started.
        progress: Called after each measurement, from one thread at a time.
        isolation: Whether to measure in this process or in children.
    """

    backends: Sequence[Backend]
    cache: BenchmarkCache
    rule: StoppingRule
    numerics: Numerics = field(default_factory=Numerics)
    memory_limit: float = math.inf
    deadline: float = math.inf
    progress: Callable[[Progress], None] | None = None
    isolation: Isolation = field(default_factory=Isolation)

    def table(
        self, problem: ConvProblem, policy: BatchPolicy, *, prune: bool, overhead: float
    ) -> PerfTable:
        """Measure `problem`; failing algorithms are rows, never exceptions.

        Args:
            problem: At its whole mini-batch.
            policy: Which micro-batch sizes are candidates.
            prune: Under `all`, measure only what could enter a good plan.
            overhead: ms that starting one more micro-batch costs.
        """
        sizes = candidate_batches(problem.batch, policy)
        alignment = self.backends[0].split_alignment
        work = _Work(self, problem, aligned_batches(problem, sizes, alignment))
        try:
            if prune and policy == "all":
                while points := [
                    p for p in work.promising(overhead) if p not in work.rows
                ]:
                    work.measure(points)
            else:
                work.measure([p for p in work.workspaces if p not in work.rows])
        finally:
            work.release()
        rows = sorted(work.rows.values(), key=lambda p: (-p.batch, p.algo))
        return PerfTable(problem, tuple(rows), overhead)


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
        self._benches = [
            sweep.isolation.bench(
                backend,
                problem,
                sweep.rule,
                memory_limit=sweep.memory_limit,
                deadline=sweep.deadline,
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
                if (
                    refusal := sweep.numerics.refusal(
                        traits, whole=batch == problem.batch
                    )
                ) is not None:
                    self.rows[algo, batch] = _excluded(algo, batch, refusal)
                    continue
                self.workspaces[algo, batch] = nbytes
                self._traits[algo, batch] = traits
            for algo, reason in conv.excluded(micro):
                self.rows[algo, batch] = _excluded(algo, batch, reason)
        self._hints: dict[str, list[AlgoPerf]] = {}
        for perf in sweep.cache.get_all(self._fingerprint, problem):
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

    def promising(self, overhead: float) -> Sequence[Point]:
        """Points that pruning asks for next."""
        return next_measurements(
            self._sizes,
            self.workspaces,
            tuple(self.rows.values()),
            launch_overhead_ms=overhead,
        )

    def measure(self, points: Iterable[Point]) -> None:
        """Time the points, largest sizes first, on all devices at once."""
        by_batch: dict[int, list[str]] = {}
        for algo, batch in points:
            by_batch.setdefault(batch, []).append(algo)
        batches = sorted(by_batch, reverse=True)
        if math.isfinite(self._sweep.deadline) and not (self._hints or self._times()):
            batches = [*batches[-1:], *batches[:-1]]  # it tells what the others take
        total = len(self.rows) + sum(map(len, by_batch.values()))
        shares = [
            (bench, batches[i :: len(self._benches)])
            for i, bench in enumerate(self._benches)
        ]

        def work(share: tuple[KernelBench, list[int]]) -> None:
            bench, sizes = share
            for batch in sizes:
                self._measure_size(bench, batch, by_batch[batch], total)

        if len(shares) == 1:
            work(shares[0])
            return
        with ThreadPoolExecutor(len(shares)) as pool:
            list(pool.map(work, shares))

    def _measure_size(
        self,
        bench: KernelBench,
        batch: int,
        algos: Sequence[str],
        total: int,
    ) -> None:
        micro = self._problem.with_batch(batch)

        def keep(perf: AlgoPerf) -> None:
            with self._lock:
                self.rows[perf.algo, batch] = perf
                if perf.status is not RowStatus.LIMITED:
                    self._sweep.cache.put(self._fingerprint, micro, [perf])
                if self._sweep.progress is not None:
                    done = len(self.rows)
                    self._sweep.progress(
                        Progress(micro, perf.algo, batch, done, max(done, total))
                    )

        with self._lock:
            expected = {algo: self._expected_ms(algo, batch) for algo in algos}
            best_ms = min(
                (p.time_ms for p in self.rows.values() if p.batch == batch),
                default=math.inf,
            )
        ordered = sorted(algos, key=expected.__getitem__)  # likely winners first
        if math.isfinite(self._sweep.deadline):
            with self._lock:
                expected = {
                    algo: self._cautious_ms(ms, batch) for algo, ms in expected.items()
                }
        workspaces = {algo: self.workspaces[algo, batch] for algo in ordered}
        bench.run(batch, workspaces, keep, best_ms, expected)

    def _times(self) -> list[AlgoPerf]:
        return [perf for perf in self.rows.values() if perf.error is None]

    def _cautious_ms(self, expected: float, batch: int) -> float:
        """What a run may take of which nothing is known: as long as any other."""
        rates = (perf.time_ms / perf.batch for perf in self._times())
        return expected or batch * max(rates, default=0.0)

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
        algo=algo,
        batch=batch,
        time_ms=math.inf,
        workspace=0,
        error=reason,
        samples=0,
    )
