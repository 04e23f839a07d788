"""One table in the making: what is still to be measured of it, in which order.

It measures nothing itself: what times kernels, here or elsewhere, takes its rounds and
brings the rows. What the cache knows is not asked for again; what a limit prevented is
listed with the reason and not remembered.
"""

import enum
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mucudnn.ir.conv import AlgoPerf, ConvProblem, PerfTable
from mucudnn.ir.limits import ANY_LIMIT, LimitRange
from mucudnn.ir.numerics import Numerics, Traits
from mucudnn.ir.status import RowStatus
from mucudnn.passes.convolution.measurement_pruning import next_measurements
from mucudnn.passes.convolution.race import Point, Race, race
from mucudnn.runtime.database.cache import BenchmarkCache
from mucudnn.runtime.tuning.kernel_bench import BenchTask, KernelBench, KernelRun
from mucudnn.runtime.tuning.timing import LAUNCH_OVERHEAD_MS

__all__ = ["Measured", "Pruning", "SizeRun", "Sizes", "TableFiller"]

Sizes = Sequence[tuple[int, Sequence[str]]]
"""(micro-batch size, algorithms to be timed at it), in the order of timing."""


class Pruning(enum.Enum):
    """What of a table may be left out."""

    NONE = enum.auto()
    ALGORITHMS = enum.auto()
    """Of each size the algorithms that others are far ahead of; such rows say so."""
    SIZES = enum.auto()
    """Also sizes that no good plan needs; they have no rows."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement done: what it was of, and how many of how many."""

    problem: ConvProblem
    algo: str
    batch: int
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRun:
    """Algorithms to be timed in turn at one micro-batch size.

    Attributes:
        batch: Micro-batch size.
        workspaces: Algorithm -> bytes, in the order of timing.
        best_ms: The fastest known at this size.
        expected_ms: Algorithm -> about how long one run takes; 0 if nothing is known.
    """

    batch: int
    workspaces: Mapping[str, int]
    best_ms: float = math.inf
    expected_ms: Mapping[str, float] = field(default_factory=dict)


class TableFiller:
    """Asks for sizes in rounds, and keeps and remembers the rows that come.

    Args:
        task: What is measured, where and within which limits.
        sizes: Candidate micro-batch sizes.
        cache: Holds what is known, and takes the rest.
        numerics: Which ways of computing are accepted; others are not measured.
        progress: Called after each measurement, from one thread at a time.
        pruning: What may be left out.
        limits: Of workspace, that plans will be asked for under.
    """

    def __init__(
        self,
        task: BenchTask,
        sizes: Sequence[int],
        cache: BenchmarkCache,
        numerics: Numerics,
        progress: Callable[[Measured], None] | None = None,
        pruning: Pruning = Pruning.NONE,
        limits: LimitRange = ANY_LIMIT,
    ) -> None:
        self.task = task
        self._problem = task.problem
        self._fingerprint = task.backend.device.fingerprint
        self._cache = cache
        self._progress = progress
        self._lock = threading.Lock()
        self._sizes = tuple(sorted(sizes))
        self._total = 0  # rows there will be, those known counted
        self._pruning, self._limits = pruning, limits
        self._left: Sequence[Point] = ()
        self._workspaces: dict[Point, int] = {}
        self._traits: dict[Point, Traits] = {}
        self._rows: dict[Point, AlgoPerf] = {}
        for batch in sorted(sizes, reverse=True):
            self._list_algorithms(batch, numerics)
        self._hints: dict[str, list[AlgoPerf]] = {}
        for perf in cache.get_all(self._fingerprint, self._problem):
            self._hints.setdefault(perf.algo, []).append(perf)
            if self._holds(perf):
                self._rows[perf.algo, perf.batch] = perf

    def rounds(self, *, probe: bool) -> Iterator[Sizes]:
        """Sizes and their algorithms that may be timed side by side.

        The next round is asked for when all rows of one are kept. The largest sizes
        come first, as buffers for them serve all others; but where nothing is known the
        smallest one tells cheaply what the others will take: with `probe` it is a round
        of its own and all others are the next, as for many who measure side by side.
        One alone goes by the stages of a race, and leaves out more.
        """
        while points := self._wanted(staged=not probe):
            sizes = self._by_size(points)
            if probe and not self._knows:
                yield sizes[:1]
                sizes = sizes[1:]
            if sizes:
                yield sizes

    def size(self, batch: int, algos: Sequence[str]) -> SizeRun:
        """How to time algorithms at one size, by what is known now."""
        with self._lock:
            expected = {algo: self._expected_ms(algo, batch) for algo in algos}
            ordered = sorted(algos, key=expected.__getitem__)  # likely winners first
            if math.isfinite(self.task.deadline):
                slowest = max((p.time_ms / p.batch for p in self._times()), default=0.0)
                for algo in algos:  # one of which nothing is known is no faster
                    expected[algo] = expected[algo] or batch * slowest
            best_ms = self._best_ms(batch)
        return SizeRun(
            batch=batch,
            workspaces={algo: self._workspaces[algo, batch] for algo in ordered},
            best_ms=best_ms,
            expected_ms=expected,
        )

    def measure(self, bench: KernelBench, size: SizeRun) -> None:
        """Time a size on a bench of this process, and keep the rows."""
        bench.run(
            size.batch, size.workspaces, self.keep, size.best_ms, size.expected_ms
        )

    def keep(self, perf: AlgoPerf) -> None:
        """Take a row into the table and, but where a limit made it, the cache."""
        micro = self._problem.with_batch(perf.batch)
        with self._lock:
            self._rows[perf.algo, perf.batch] = perf
            if perf.status is not RowStatus.LIMITED:
                self._cache.put(self._fingerprint, micro, [perf])
            if self._progress is not None:
                done = len(self._rows)
                total = max(done, self._total)
                self._progress(Measured(micro, perf.algo, perf.batch, done, total))

    def table(self) -> PerfTable:
        """The rows that are there."""
        rows = dict(self._rows)
        if self._pruning is Pruning.ALGORITHMS:
            for (algo, batch), ahead in self._race().hopeless.items():
                nbytes = self._workspaces[algo, batch]
                reason = f"{ahead} is far ahead and fits where it does"
                if nbytes > self._limits.most:
                    reason = f"over the limits, and {ahead} is faster with no more"
                kernel = KernelRun(batch=batch, algo=algo, nbytes=nbytes)
                text = RowStatus.HOPELESS.text(reason)
                rows[algo, batch] = self.task.row(kernel, None, text)
        ordered = sorted(rows.values(), key=lambda p: (-p.batch, p.algo))
        return PerfTable(self._problem, tuple(ordered), LAUNCH_OVERHEAD_MS)

    def _list_algorithms(self, batch: int, numerics: Numerics) -> None:
        conv, micro = self.task.backend.conv, self._problem.with_batch(batch)
        for algo, nbytes in conv.algorithms(micro):
            traits = conv.traits(micro, algo)
            refusal = numerics.refusal(traits, whole=batch == self._problem.batch)
            if refusal is not None:
                self._rows[algo, batch] = _excluded(algo, batch, refusal)
                continue
            self._workspaces[algo, batch] = nbytes
            self._traits[algo, batch] = traits
        for algo, reason in conv.excluded(micro):
            self._rows[algo, batch] = _excluded(algo, batch, reason)

    def _holds(self, perf: AlgoPerf) -> bool:
        """Whether a remembered row is of what would run: same mode, same workspace."""
        point = perf.algo, perf.batch
        traits = Traits(perf.deterministic, perf.math_mode, perf.notes)
        return perf.workspace == self._workspaces.get(
            point
        ) and traits == self._traits.get(point)

    def _wanted(self, *, staged: bool) -> Sequence[Point]:
        """Points of the next round, or of all stages of a race."""
        match self._pruning:
            case Pruning.NONE:
                points = self._left = self._missing()
            case Pruning.ALGORITHMS:
                stages = self._race().points
                self._left = [point for stage in stages for point in stage]
                points = stages[0] if stages and staged else self._left
            case Pruning.SIZES:
                points = self._left = self._promising()
        return points

    def _race(self) -> Race:
        hints = (perf for perfs in self._hints.values() for perf in perfs)
        others = [p for p in hints if (p.algo, p.batch) not in self._workspaces]
        return race(
            self._sizes,
            self._workspaces,
            [*others, *self._rows.values()],
            limits=self._limits,
        )

    def _promising(self) -> Sequence[Point]:
        """Points of a round that leaves out sizes as well."""
        points = next_measurements(
            self._sizes,
            self._workspaces,
            tuple(self._rows.values()),
            launch_overhead_ms=LAUNCH_OVERHEAD_MS,
            limits=self._limits,
        )
        return [point for point in points if point not in self._rows]

    def _missing(self) -> Sequence[Point]:
        return [point for point in self._workspaces if point not in self._rows]

    def _by_size(self, points: Iterable[Point]) -> list[tuple[int, Sequence[str]]]:
        by_batch: dict[int, list[str]] = {}
        for algo, batch in points:
            by_batch.setdefault(batch, []).append(algo)
        batches = sorted(by_batch, reverse=True)
        if not self._knows:
            batches = [*batches[-1:], *batches[:-1]]
        self._total = len(self._rows) + len(self._left)
        return [(batch, by_batch[batch]) for batch in batches]

    @property
    def _knows(self) -> bool:
        """Whether anything is known of what times will be."""
        return bool(self._hints or self._times())

    def _best_ms(self, batch: int) -> float:
        return min(
            (p.time_ms for p in self._times() if p.batch == batch), default=math.inf
        )

    def _times(self) -> list[AlgoPerf]:
        return [perf for perf in self._rows.values() if perf.error is None]

    def _expected_ms(self, algo: str, batch: int) -> float:
        """Time of one run, in proportion to the nearest size known; 0 if none is."""
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


def _excluded(algo: str, batch: int, reason: str) -> AlgoPerf:
    return AlgoPerf(
        algo=algo, batch=batch, time_ms=math.inf, workspace=0, error=reason, samples=0
    )
