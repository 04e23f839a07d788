"""Measure problems: one table each, filled here or by workers, and remembered."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from mucudnn.backends.base import Backend
from mucudnn.backends.recorded import recording_of
from mucudnn.ir.conv import ConvProblem, PerfTable
from mucudnn.ir.measurement import ANY_LIMIT, LimitRange
from mucudnn.ir.numerics import Numerics, RowStatus
from mucudnn.passes.convolution.pareto import check_divisible
from mucudnn.passes.microbatch import BatchPolicy, aligned_batches, candidate_batches
from mucudnn.processes import Own
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.isolation import Isolation
from mucudnn.runtime.tuning.kernel_timer import BenchTask, KernelBench, check_room
from mucudnn.runtime.tuning.tables import Measured, Pruning, Sizes, TableFiller
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.workers import Round, Workers, refuse_other_model


@dataclass(frozen=True, kw_only=True)
class Measurer:
    """Fills tables one at a time; `Tuner` documents the other attributes.

    Attributes:
        backend: Backend that is measured.
        sweep: Settings of measuring, with the tuner's memory limit and no deadline.
        lock: Held while kernels are timed, as two at once would disturb each other.

    Raises:
        ValueError: The devices are not of one model, or the policy is unknown.
    """

    backend: Backend
    sweep: "Sweep"
    batch_policy: BatchPolicy
    time_limit_s: float
    prune: bool
    lock: Own[Any]
    _tables: dict[ConvProblem, tuple[LimitRange, PerfTable]] = field(
        default_factory=dict, init=False
    )

    def __post_init__(self) -> None:
        candidate_batches(1, self.batch_policy)
        mine = self.backend.device.fingerprint
        for backend in self.sweep.backends:
            refuse_other_model(mine, backend.device.fingerprint)

    def table(
        self,
        problem: ConvProblem,
        time_limit_s: float | None = None,
        memory_limit: float = math.inf,
        limits: LimitRange = ANY_LIMIT,
    ) -> PerfTable:
        """Measure every algorithm at every candidate micro-batch size.

        Rows of failed algorithms carry the error. Rows that a limit prevented carry the
        limit; such a table is not kept. The limits are the tuner's own: `time_limit_s`
        replaces that of time, `memory_limit` holds in addition. Pruning skips rows that
        no plan under `limits` needs.

        Raises:
            PlanningError: There are too many samples to be divided.
            OutOfMemoryError: There is no room for the smallest micro-batch.
        """
        (table,) = self.tables([problem], time_limit_s, memory_limit, limits)
        return table

    def tables(
        self,
        problems: Sequence[ConvProblem],
        time_limit_s: float | None = None,
        memory_limit: float = math.inf,
        limits: LimitRange = ANY_LIMIT,
    ) -> tuple[PerfTable, ...]:
        """Measure several problems; see `table`. Workers measure them concurrently.

        The tuner's time limit applies to each problem, `time_limit_s` to all of them
        together.

        Raises:
            PlanningError: A problem has too many samples to be divided.
        """
        found = self._known(problems, limits)
        missing = [problem for problem in problems if problem not in found]
        if missing:
            with self.lock.mine:
                found |= self._measured(missing, time_limit_s, memory_limit, limits)
        return tuple(found[problem] for problem in problems)

    def forget(self) -> None:
        """Drop all tables, to read them from the cache again."""
        self._tables.clear()

    def check(self, problem: ConvProblem) -> None:
        """Raise `PlanningError` where there are too many samples to be divided."""
        if self.batch_policy != "undivided":
            every = self.batch_policy == "all"
            sizes = problem.batch if every else problem.batch.bit_length()
            check_divisible(problem.batch, sizes)

    def _measured(
        self,
        problems: Sequence[ConvProblem],
        time_limit_s: float | None,
        memory_limit: float,
        limits: LimitRange,
    ) -> dict[ConvProblem, PerfTable]:
        for problem in problems:
            self.check(problem)
        found = self._known(problems, limits)
        missing = [problem for problem in problems if problem not in found]
        together = self.sweep.workers is not None
        for problem in () if together else missing:
            least = problem.with_batch(
                min(candidate_batches(problem.batch, self.batch_policy))
            )
            check_room(self.backend.device, f"the least of {least}", least.operands())
        begun = time.monotonic()
        for some in [missing] if together else [[problem] for problem in missing]:
            if time_limit_s is None:
                deadline = time.monotonic() + self.time_limit_s * len(some)
            else:
                deadline = begun + time_limit_s
            found |= self._swept(some, deadline, memory_limit, limits)
        return found

    def _known(
        self, problems: Sequence[ConvProblem], limits: LimitRange
    ) -> dict[ConvProblem, PerfTable]:
        """Return the kept tables that serve these limits as well."""
        known = ((p, self._tables[p]) for p in problems if p in self._tables)
        return {p: table for p, (served, table) in known if served.covers(limits)}

    def _swept(
        self,
        problems: Sequence[ConvProblem],
        deadline: float,
        memory_limit: float,
        limits: LimitRange,
    ) -> dict[ConvProblem, PerfTable]:
        sweep = replace(
            self.sweep,
            memory_limit=min(self.sweep.memory_limit, memory_limit),
            deadline=deadline,
            limits=limits,
        )
        # Reading a recording takes no time, and plans were made with all its rows.
        prune = self.prune and recording_of(self.backend) is None
        tables = sweep.tables(problems, self.batch_policy, prune=prune)
        for table in tables:
            if not any(perf.status is RowStatus.LIMITED for perf in table.perfs):
                self._tables[table.problem] = limits, table
        return {table.problem: table for table in tables}


# Measure convolutions: every algorithm at every micro-batch size of a policy.
#
# `TableFiller` decides what to measure. This module distributes it over local devices
# or the workers of an executor.


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Settings of filling tables of measurements; `Tuner` documents the rest.

    Attributes:
        backends: Devices of one model; sizes are distributed over them.
        cache: Opens the cache of known rows, which takes new ones.
        deadline: Time on `clock` (seconds) after which nothing is started.
        limits: Workspace limits under which plans will be made.
        isolation: Chooses between measuring in this process and in children.
        workers: Workers that measure instead of `backends`, of which the first still
            provides the list of algorithms.
        clock: Clock in seconds, for the deadline only; children have their own.
    """

    backends: Sequence[Backend]
    cache: Callable[[], BenchmarkCache]
    rule: StoppingRule
    numerics: Numerics = field(default_factory=Numerics)
    memory_limit: float = math.inf
    deadline: float = math.inf
    limits: LimitRange = ANY_LIMIT
    progress: Callable[[Measured], None] | None = None
    isolation: Isolation = field(default_factory=Isolation)
    workers: Workers | None = None
    clock: Callable[[], float] = field(default_factory=lambda: time.monotonic)

    def tables(
        self, problems: Sequence[ConvProblem], policy: BatchPolicy, *, prune: bool
    ) -> tuple[PerfTable, ...]:
        """Measure problems; failing algorithms are rows, never exceptions.

        Workers measure many problems at once; locally they are measured in turn.
        Problems that differ in N only share rows, so they are measured one after
        another. Pruning skips what cannot enter a good plan within `limits`: see
        `Pruning`.
        """
        pruning = Pruning.NONE
        if prune:
            pruning = Pruning.SIZES if policy == "all" else Pruning.ALGORITHMS
        done: dict[ConvProblem, PerfTable] = {}
        if self.workers is None:
            for problem in dict.fromkeys(problems):
                self._fill_here(problem, policy, pruning, done)
        else:
            self.workers.fill(
                [
                    self._rounds(same, policy, pruning, done)
                    for same in _layers(problems)
                ]
            )
        return tuple(done[problem] for problem in problems)

    def _rounds(
        self,
        problems: Sequence[ConvProblem],
        policy: BatchPolicy,
        pruning: Pruning,
        done: dict[ConvProblem, PerfTable],
    ) -> Iterator[Round]:
        """Yield the rounds of problems that differ in N only, for workers."""
        for problem in problems:
            filler = self._filler(problem, policy, pruning)
            for sizes in filler.rounds(probe=True):
                yield Round(filler, sizes)
            done[problem] = filler.table()

    def _fill_here(
        self,
        problem: ConvProblem,
        policy: BatchPolicy,
        pruning: Pruning,
        done: dict[ConvProblem, PerfTable],
    ) -> None:
        filler = self._filler(problem, policy, pruning)
        benches = [
            self.isolation.bench(self._task(backend, problem))
            for backend in self.backends
        ]
        try:
            for sizes in filler.rounds(probe=False):
                _deal_out(filler, sizes, benches)
        finally:  # the next problem may need the memory
            for bench in benches:
                bench.release()
        done[problem] = filler.table()

    def _filler(
        self, problem: ConvProblem, policy: BatchPolicy, pruning: Pruning
    ) -> TableFiller:
        sizes = candidate_batches(problem.batch, policy)
        aligned = aligned_batches(problem, sizes, self.backends[0].split_alignment)
        task = self._task(self.backends[0], problem)
        return TableFiller(
            task,
            aligned,
            self.cache(),
            self.numerics,
            self.progress,
            pruning,
            self.limits,
        )

    def _task(self, backend: Backend, problem: ConvProblem) -> BenchTask:
        return BenchTask(
            backend=backend,
            problem=problem,
            rule=self.rule,
            memory_limit=self.memory_limit,
            deadline=self.deadline,
            clock=self.clock,
        )


def _layers(problems: Sequence[ConvProblem]) -> list[list[ConvProblem]]:
    """Group problems by layer, each with the largest N first to share its rows."""
    layers: dict[ConvProblem, list[ConvProblem]] = {}
    for problem in sorted(dict.fromkeys(problems), key=lambda p: -p.batch):
        layers.setdefault(problem.with_batch(1), []).append(problem)
    return list(layers.values())


def _deal_out(
    filler: TableFiller, sizes: Sizes, benches: Sequence[KernelBench]
) -> None:
    def work(i: int) -> None:
        for batch, algos in sizes[i :: len(benches)]:
            filler.measure(benches[i], filler.size(batch, algos))

    if len(benches) == 1:
        work(0)
        return
    with ThreadPoolExecutor(len(benches)) as pool:
        list(pool.map(work, range(len(benches))))
