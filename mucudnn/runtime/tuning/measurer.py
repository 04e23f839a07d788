"""Problem -> table of measurements; a table is filled once and remembered."""

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

from mucudnn.backends.base import Backend
from mucudnn.backends.recorded import recording_of
from mucudnn.forks import Own
from mucudnn.ir.conv import ConvProblem, PerfTable
from mucudnn.ir.status import RowStatus
from mucudnn.passes.convolution.pareto import check_divisible
from mucudnn.passes.microbatch import BatchPolicy, candidate_batches
from mucudnn.runtime.tuning.sweep import Sweep

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
    _tables: dict[ConvProblem, PerfTable] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        candidate_batches(1, self.batch_policy)
        mine = self.backend.device.fingerprint
        for backend in self.sweep.backends:
            if (other := backend.device.fingerprint) != mine:
                raise ValueError(
                    f"measurements do not carry over between {mine!r} and {other!r}; "
                    "use devices of one model"
                )

    def table(
        self,
        problem: ConvProblem,
        time_limit_s: float | None = None,
        memory_limit: float = math.inf,
    ) -> PerfTable:
        """Every algorithm at every candidate micro-batch size.

        Rows of failed algorithms carry the error. Rows that a limit prevented carry
        the limit; such a table is not remembered.

        Limits of time and memory are the tuner's own; a time given replaces it, bytes
        given hold as well.

        Raises:
            PlanningError: There are too many samples to be divided.
        """
        if (table := self._tables.get(problem)) is not None:
            return table
        with self.lock.mine:
            if (table := self._tables.get(problem)) is None:
                table = self._sweep(problem, time_limit_s, memory_limit)
            return table

    def _sweep(
        self, problem: ConvProblem, time_limit_s: float | None, memory_limit: float
    ) -> PerfTable:
        limit_s = self.time_limit_s if time_limit_s is None else time_limit_s
        if self.batch_policy != "undivided":
            every = self.batch_policy == "all"
            sizes = problem.batch if every else problem.batch.bit_length()
            check_divisible(problem.batch, sizes)
        sweep = replace(
            self.sweep,
            memory_limit=min(self.sweep.memory_limit, memory_limit),
            deadline=time.monotonic() + limit_s,
        )
        # What was recorded takes no time to ask for, and all of it was planned with.
        prune = self.prune and recording_of(self.backend) is None
        table = sweep.table(problem, self.batch_policy, prune=prune)
        if not any(perf.status is RowStatus.LIMITED for perf in table.perfs):
            self._tables[problem] = table
        return table
