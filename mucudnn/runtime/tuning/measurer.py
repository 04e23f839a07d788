"""Problem -> table of measurements; a table is filled once and remembered."""

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
    """Fills tables, one at a time; `Tuner` says what the rest of the attributes are.

    Attributes:
        backend: Whose measurements they are.
        sweep: How, with the tuner's own limit of memory, and no deadline yet.
        lock: Held while kernels are timed: two at once would disturb each other.

    Raises:
        ValueError: The devices are not of one model, or there is no such policy.
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
        """Every algorithm at every candidate micro-batch size.

        Rows of failed algorithms carry the error. Rows that a limit prevented carry
        the limit; such a table is not remembered.

        Limits of time and memory are the tuner's own; a time given replaces it, bytes
        given hold as well. Pruning leaves out what plans under `limits` do not need.

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
        """The table of each; see `table`. Workers measure all of them at once.

        The tuner's own limit of time is that of one problem, a time given that of all.

        Raises:
            PlanningError: Of some problem there are too many samples to be divided.
        """
        found = self._known(problems, limits)
        missing = [problem for problem in problems if problem not in found]
        if missing:
            with self.lock.mine:
                found |= self._measured(missing, time_limit_s, memory_limit, limits)
        return tuple(found[problem] for problem in problems)

    def forget(self) -> None:
        """Take tables from the cache again."""
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
        """Tables that serve these limits as well."""
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
        # What was recorded takes no time to ask for, and all of it was planned with.
        prune = self.prune and recording_of(self.backend) is None
        tables = sweep.tables(problems, self.batch_policy, prune=prune)
        for table in tables:
            if not any(perf.status is RowStatus.LIMITED for perf in table.perfs):
                self._tables[table.problem] = limits, table
        return {table.problem: table for table in tables}
