"""Measure convolutions: every algorithm at every micro-batch size of a policy.

`TableFiller` decides what to measure. `Measuring` distributes that over local devices
or the workers of an executor, and keeps complete tables.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from mucudnn.backends.base import Backend
from mucudnn.backends.recorded import recording_of
from mucudnn.ir.conv import ConvProblem, PerfTable
from mucudnn.ir.measurement import ANY_LIMIT, LimitRange
from mucudnn.ir.numerics import Numerics, RowStatus
from mucudnn.passes.convolution.pareto import check_divisible
from mucudnn.passes.microbatch import BatchPolicy, aligned_batches, candidate_batches
from mucudnn.processes import PerProcess
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.isolation import Isolation
from mucudnn.runtime.tuning.kernel_timer import (
    KernelTimer,
    MeasureLimits,
    check_room,
    measure_size,
)
from mucudnn.runtime.tuning.tables import Measured, Pruning, Sizes, TableFiller
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.workers import Round, Workers, refuse_other_model


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """Measures tables of convolutions; `Tuner` documents the other attributes.

    Attributes:
        backend: Backend that is measured.
        backends: Devices of the same model; sizes are distributed over them.
        cache: Opens the cache of known rows, which takes new ones.
        isolation: Chooses between measuring in this process and in children.
        workers: Workers that measure instead of `backends`, of which the first still
            provides the list of algorithms.
        lock: Held while kernels are timed, as two at once would disturb each other.
        clock: Clock in seconds, for the deadline only; children have their own.

    Raises:
        ValueError: The devices are not of one model, or the policy is unknown.
    """

    backend: Backend
    backends: Sequence[Backend]
    cache: Callable[[], BenchmarkCache]
    rule: StoppingRule
    numerics: Numerics
    batch_policy: BatchPolicy
    memory_limit: float
    time_limit_s: float
    prune: bool
    progress: Callable[[Measured], None] | None
    isolation: Isolation
    workers: Workers | None
    lock: PerProcess[Any]
    clock: Callable[[], float] = field(default=lambda: time.monotonic())
    _tables: dict[ConvProblem, tuple[LimitRange, PerfTable]] = field(
        default_factory=dict, init=False
    )

    def __post_init__(self) -> None:
        candidate_batches(1, self.batch_policy)
        mine = self.backend.device.fingerprint
        for backend in self.backends:
            refuse_other_model(mine, backend.device.fingerprint)

    def tables(
        self,
        problems: Sequence[ConvProblem],
        *,
        time_limit_s: float | None = None,
        memory_limit: float = math.inf,
        limits: LimitRange = ANY_LIMIT,
    ) -> tuple[PerfTable, ...]:
        """Measure every algorithm at every candidate micro-batch size of problems.

        For arguments and errors see `Tuner.measure`. `time_limit_s` is for all problems
        together; the tuner's own limit applies to each one.
        """
        found = self._known(problems, limits)
        if any(problem not in found for problem in problems):
            with self.lock.value:
                found = self._known(problems, limits)  # another thread may be done
                missing = [p for p in dict.fromkeys(problems) if p not in found]
                self._check(missing)
                begun = self.clock()
                # One device measures problem by problem; workers need all of them to be
                # busy.
                groups = [[p] for p in missing] if self.workers is None else [missing]
                for group in filter(None, groups):
                    if time_limit_s is None:
                        deadline = self.clock() + self.time_limit_s * len(group)
                    else:
                        deadline = begun + time_limit_s
                    measure_limits = MeasureLimits(
                        rule=self.rule,
                        memory_limit=min(self.memory_limit, memory_limit),
                        deadline=deadline,
                        clock=self.clock,
                    )
                    found |= self._measure(group, measure_limits, limits)
        return tuple(found[problem] for problem in problems)

    def forget(self) -> None:
        """Drop all tables, to read them from the cache again."""
        self._tables.clear()

    def _known(
        self, problems: Sequence[ConvProblem], limits: LimitRange
    ) -> dict[ConvProblem, PerfTable]:
        """Return the kept tables that cover these limits."""
        known = ((p, self._tables[p]) for p in problems if p in self._tables)
        return {p: table for p, (served, table) in known if served.covers(limits)}

    def _check(self, problems: Sequence[ConvProblem]) -> None:
        """Raise an error for problems that cannot be measured at all."""
        for problem in problems if self.batch_policy != "undivided" else ():
            every = self.batch_policy == "all"
            sizes = problem.batch if every else problem.batch.bit_length()
            check_divisible(problem.batch, sizes)
        for problem in problems if self.workers is None else ():
            least = min(candidate_batches(problem.batch, self.batch_policy))
            micro = problem.with_batch(least)
            check_room(self.backend.device, f"the least of {micro}", micro.operands())

    def _measure(
        self,
        problems: Sequence[ConvProblem],
        limits: MeasureLimits,
        workspace: LimitRange,
    ) -> dict[ConvProblem, PerfTable]:
        """Measure problems and keep complete tables; failures are rows."""

        def filler_of(problem: ConvProblem) -> TableFiller:
            backend, pruning = self.backends[0], Pruning.NONE
            sizes = candidate_batches(problem.batch, self.batch_policy)
            # Reading a recording takes no time, and plans were made with all its rows.
            if self.prune and recording_of(self.backend) is None:
                every = self.batch_policy == "all"
                pruning = Pruning.SIZES if every else Pruning.ALGORITHMS
            return TableFiller(
                backend,
                problem,
                limits,
                aligned_batches(problem, sizes, backend.split_alignment),
                self.cache(),
                self.numerics,
                progress=self.progress,
                pruning=pruning,
                workspace=workspace,
            )

        done: dict[ConvProblem, PerfTable] = {}

        def rounds(same: Sequence[ConvProblem]) -> Iterator[Round]:
            for problem in same:
                filler = filler_of(problem)
                for sizes in filler.rounds(probe=True):
                    yield filler, sizes
                done[problem] = filler.table()

        if self.workers is None:
            for problem in problems:
                done[problem] = self._fill_here(filler_of(problem))
        else:
            # Problems that differ only in N share rows: measure them in sequence, the
            # largest N first.
            layers: dict[ConvProblem, list[ConvProblem]] = {}
            for problem in sorted(problems, key=lambda p: -p.batch):
                layers.setdefault(problem.with_batch(1), []).append(problem)
            self.workers.fill([rounds(same) for same in layers.values()])
        for problem, table in done.items():
            if not any(perf.status is RowStatus.LIMITED for perf in table.perfs):
                self._tables[problem] = workspace, table
        return done

    def _fill_here(self, filler: TableFiller) -> PerfTable:
        """Measure a table on the local devices, each with a share of the sizes."""
        timers = [self.isolation.timer(backend) for backend in self.backends]
        try:
            for sizes in filler.rounds(probe=False):
                shares = [sizes[i :: len(timers)] for i in range(len(timers))]
                if len(timers) == 1:
                    _measure_share(filler, timers[0], sizes)
                    continue
                with ThreadPoolExecutor(len(timers)) as pool:
                    fillers = [filler] * len(timers)
                    list(pool.map(_measure_share, fillers, timers, shares))
        finally:  # the next problem may need the memory
            for timer in timers:
                timer.release()
        return filler.table()


def _measure_share(filler: TableFiller, timer: KernelTimer, sizes: Sizes) -> None:
    for batch, algos in sizes:
        measure_size(timer, filler.request(batch, algos), filler.keep)
