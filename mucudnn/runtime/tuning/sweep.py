"""Measure convolutions: every algorithm at every micro-batch size of a policy.

`TableFiller` decides what to measure. This module distributes it over local devices or
the workers of an executor.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from mucudnn.backends.base import Backend
from mucudnn.ir.conv import ConvProblem, PerfTable
from mucudnn.ir.limits import ANY_LIMIT, LimitRange
from mucudnn.ir.numerics import Numerics
from mucudnn.passes.microbatch import BatchPolicy, aligned_batches, candidate_batches
from mucudnn.runtime.database.cache import BenchmarkCache
from mucudnn.runtime.tuning.isolation import Isolation
from mucudnn.runtime.tuning.kernel_bench import BenchTask, KernelBench
from mucudnn.runtime.tuning.table_filler import Measured, Pruning, Sizes, TableFiller
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.workers import Round, Workers

__all__ = ["Sweep"]


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
