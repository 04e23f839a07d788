"""Fill the table of measurements of each problem once, and keep it."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mucudnn.backends.base import Backend
from mucudnn.backends.recorded import recording_of
from mucudnn.forks import Own
from mucudnn.ir.conv import ConvProblem, PerfTable
from mucudnn.ir.limits import ANY_LIMIT, LimitRange
from mucudnn.ir.status import RowStatus
from mucudnn.passes.convolution.pareto import check_divisible
from mucudnn.passes.microbatch import BatchPolicy, candidate_batches
from mucudnn.runtime.tuning.kernel_bench import check_room
from mucudnn.runtime.tuning.sweep import Sweep
from mucudnn.runtime.tuning.workers import refuse_other_model

__all__ = ["Measurer"]


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
    sweep: Sweep
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
