"""Decide what to measure for one table, and in which order.

The filler measures nothing itself: whoever times kernels takes its rounds and returns
rows. Cached rows are not measured again. A row that a limit prevented carries the
reason and is not cached.
"""

import enum
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from mucudnn.backends.base import Backend
from mucudnn.ir.conv import AlgoPerf, ConvProblem, PerfTable
from mucudnn.ir.measurement import ANY_LIMIT, LimitRange
from mucudnn.ir.numerics import TF32, Numerics, RowStatus, Traits
from mucudnn.passes.convolution.pruning import Point, Race, next_measurements, race
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.kernel_timer import MeasureLimits, SizeRequest, row_of
from mucudnn.runtime.tuning.timing import LAUNCH_OVERHEAD_MS

Sizes = Sequence[tuple[int, Sequence[str]]]
"""(micro-batch size, algorithms to time at it), in the order of timing."""


class Pruning(enum.Enum):
    """Rules for measurements that a table may omit."""

    NONE = enum.auto()
    ALGORITHMS = enum.auto()
    """At each size, algorithms far behind others; such rows say so."""
    SIZES = enum.auto()
    """Also sizes that no good plan needs; these have no rows."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A finished measurement, for progress reports."""

    problem: ConvProblem
    algo: str
    batch: int
    done: int
    total: int


class TableFiller:
    """Requests sizes in rounds, and stores the rows in a table and the cache.

    `sizes` are the micro-batch sizes to consider, `limits` those of timing kernels,
    `workspace` those under which plans will be made.
    """

    def __init__(
        self,
        backend: Backend,
        problem: ConvProblem,
        limits: MeasureLimits,
        sizes: Sequence[int],
        cache: BenchmarkCache,
        numerics: Numerics,
        *,
        progress: Callable[[Measured], None] | None = None,
        pruning: Pruning = Pruning.NONE,
        workspace: LimitRange = ANY_LIMIT,
    ) -> None:
        self.backend = backend
        self._problem = problem
        self._limits = limits
        self._numerics = numerics
        self._fingerprint = backend.device.fingerprint
        self._cache = cache
        self._progress = progress
        self._lock = threading.Lock()
        self._sizes = tuple(sorted(sizes))
        self._total = 0  # expected number of rows, known ones included
        self._pruning, self._workspace = pruning, workspace
        self._left: Sequence[Point] = ()
        self._workspaces: dict[Point, int] = {}
        self._traits: dict[Point, Traits] = {}
        self._rows: dict[Point, AlgoPerf] = {}
        for batch in reversed(self._sizes):
            self._list_algorithms(batch, numerics)
        # Rows at any size tell which algorithms are likely to win, so those are timed
        # first.
        self._hints: dict[str, list[AlgoPerf]] = {}
        for perf in cache.get_all(self._fingerprint, self._problem):
            self._hints.setdefault(perf.algo, []).append(perf)
            # A cached row counts if it has today's traits and workspace.
            point, traits = (perf.algo, perf.batch), _traits_of(perf)
            listed = self._traits.get(point)
            checked = backend.plan_serializer is not None
            if listed and checked and traits.math_mode == TF32:
                listed = replace(listed, math_mode=TF32)  # as its results have shown
            if (perf.workspace, traits) == (self._workspaces.get(point), listed):
                self._rows[point] = self._accepted(perf)

    def rounds(self, *, probe: bool) -> Iterator[Sizes]:
        """Yield rounds of sizes whose algorithms may be timed concurrently.

        The next round may be requested once all rows of a round are stored. Large sizes
        come first, as their buffers serve all others. Where nothing is known, the
        smallest size comes first, as a cheap estimate of the rest: with `probe`, meant
        for concurrent workers, it is a round of its own and all others are the next.
        Without it, rounds are the stages of a race, which leave out more.
        """
        while points := self._wanted(staged=not probe):
            by_batch: dict[int, list[str]] = {}
            for algo, batch in points:
                by_batch.setdefault(batch, []).append(algo)
            knows = bool(self._hints or self._times())
            batches = sorted(by_batch, reverse=True)
            if not knows:
                batches = [*batches[-1:], *batches[:-1]]
            self._total = len(self._rows) + len(self._left)
            sizes = [(batch, by_batch[batch]) for batch in batches]
            if probe and not knows:
                yield sizes[:1]
                sizes = sizes[1:]
            if sizes:
                yield sizes

    def request(self, batch: int, algos: Sequence[str]) -> SizeRequest:
        """Return the request to time algorithms at one size, with the times so far."""
        with self._lock:
            times = self._times()
            expected = {algo: self._expected_ms(algo, batch) for algo in algos}
            ordered = sorted(algos, key=expected.__getitem__)  # likely winners first
            if math.isfinite(self._limits.deadline):
                slowest = max((p.time_ms / p.batch for p in times), default=0.0)
                for algo in algos:  # assume an unknown algorithm to be the slowest
                    expected[algo] = expected[algo] or batch * slowest
            at_size = (p.time_ms for p in times if p.batch == batch)
            best_ms = min(at_size, default=math.inf)
        return SizeRequest(
            problem=self._problem,
            batch=batch,
            workspaces={algo: self._workspaces[algo, batch] for algo in ordered},
            limits=self._limits,
            best_ms=best_ms,
            expected_ms=expected,
        )

    def keep(self, perf: AlgoPerf) -> None:
        """Store a row in the table and, unless a limit caused it, in the cache."""
        micro = self._problem.with_batch(perf.batch)
        with self._lock:
            self._rows[perf.algo, perf.batch] = self._accepted(perf)
            if perf.status is not RowStatus.LIMITED:
                self._cache.put(self._fingerprint, micro, [perf])
            if self._progress is not None:
                done = len(self._rows)
                total = max(done, self._total)
                self._progress(Measured(micro, perf.algo, perf.batch, done, total))

    def _accepted(self, perf: AlgoPerf) -> AlgoPerf:
        """Return a row; without its time if its results are in refused arithmetic."""
        whole = perf.batch == self._problem.batch
        refusal = self._numerics.refusal(_traits_of(perf), whole=whole)
        if refusal is None or perf.error is not None:
            return perf
        return replace(perf, time_ms=math.inf, error=refusal, noise_ms=0.0, samples=0)

    def table(self) -> PerfTable:
        """Return the table of all rows so far."""
        rows = dict(self._rows)
        if self._pruning is Pruning.ALGORITHMS:
            for (algo, batch), ahead in self._race().hopeless.items():
                nbytes = self._workspaces[algo, batch]
                reason = f"{ahead} is far ahead and fits where it does"
                if nbytes > self._workspace.most:
                    reason = f"over the limits, and {ahead} is faster with no more"
                micro = self._problem.with_batch(batch)
                text = RowStatus.HOPELESS.text(reason)
                rows[algo, batch] = row_of(self.backend, micro, algo, nbytes, text)
        ordered = sorted(rows.values(), key=lambda p: (-p.batch, p.algo))
        return PerfTable(self._problem, tuple(ordered), LAUNCH_OVERHEAD_MS)

    def _list_algorithms(self, batch: int, numerics: Numerics) -> None:
        conv, micro = self.backend.conv, self._problem.with_batch(batch)
        excluded = dict(conv.excluded(micro))
        for algo, nbytes in conv.algorithms(micro):
            traits = conv.traits(micro, algo)
            refusal = numerics.refusal(traits, whole=batch == self._problem.batch)
            if refusal is not None:
                excluded.setdefault(algo, refusal)
                continue
            self._workspaces[algo, batch] = nbytes
            self._traits[algo, batch] = traits
        for algo, reason in excluded.items():
            self._rows[algo, batch] = AlgoPerf(
                algo=algo,
                batch=batch,
                time_ms=math.inf,
                workspace=0,
                error=reason,
                samples=0,
            )

    def _wanted(self, *, staged: bool) -> Sequence[Point]:
        """Return the points of the next round, or of all stages of a race."""
        rows = self._rows
        points: Sequence[Point]
        match self._pruning:
            case Pruning.NONE:
                points = self._left = [p for p in self._workspaces if p not in rows]
            case Pruning.ALGORITHMS:
                stages = self._race().points
                self._left = [point for stage in stages for point in stage]
                points = stages[0] if stages and staged else self._left
            case Pruning.SIZES:
                found = next_measurements(
                    self._sizes,
                    self._workspaces,
                    tuple(rows.values()),
                    launch_overhead_ms=LAUNCH_OVERHEAD_MS,
                    limits=self._workspace,
                )
                points = self._left = [point for point in found if point not in rows]
        return points

    def _race(self) -> Race:
        hints = (perf for perfs in self._hints.values() for perf in perfs)
        others = [p for p in hints if (p.algo, p.batch) not in self._workspaces]
        return race(
            self._sizes,
            self._workspaces,
            [*others, *self._rows.values()],
            limits=self._workspace,
        )

    def _times(self) -> list[AlgoPerf]:
        return [perf for perf in self._rows.values() if perf.error is None]

    def _expected_ms(self, algo: str, batch: int) -> float:
        """Estimate one run in proportion to the nearest known size; 0 if none."""
        known = [
            perf
            for perf in (*self._rows.values(), *self._hints.get(algo, ()))
            if perf.algo == algo and perf.error is None
        ]
        if not known:
            return 0.0
        nearest = min(known, key=lambda perf: abs(perf.batch - batch))
        expected: float = nearest.time_ms * batch / nearest.batch
        return expected


def _traits_of(perf: AlgoPerf) -> Traits:
    return Traits(perf.deterministic, perf.math_mode, perf.notes)
