"""Problem -> measurements -> plan, and the check that the plan keeps its word."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from mucudnn.backends import Backend, get_backend
from mucudnn.backends.recorded import recording_of
from mucudnn.errors import MucudnnError, PlanningError
from mucudnn.forks import Own
from mucudnn.ir.conv import ConvPlan, ConvProblem, PerfTable
from mucudnn.ir.measurement import Verdict
from mucudnn.ir.numerics import Numerics
from mucudnn.ir.sizes import parse_bytes
from mucudnn.ir.status import RowStatus
from mucudnn.passes.convolution.explain import Trial, explain
from mucudnn.passes.convolution.pareto import check_divisible
from mucudnn.passes.microbatch import (
    PLANNERS,
    BatchPolicy,
    Planner,
    candidate_batches,
    divided_by,
    pareto_plans,
)
from mucudnn.runtime.environment import (
    USERS,
    CacheChoice,
    open_cache,
    tuner_options,
)
from mucudnn.runtime.tuning.bound_plan import compile_plan
from mucudnn.runtime.tuning.isolation import Isolation
from mucudnn.runtime.tuning.kernel_bench import operands
from mucudnn.runtime.tuning.plan_texts import restore_plans
from mucudnn.runtime.tuning.recovery import Arena, ResilientPlan
from mucudnn.runtime.tuning.sweep import Progress, Sweep
from mucudnn.runtime.tuning.timing import StoppingRule, Timing, measure_together
from mucudnn.runtime.tuning.validation import REJECTED, Choice, Verdicts, decided

__all__ = ["Choice", "Progress", "Tuner"]

logger = logging.getLogger(__name__)

DEFAULT_WORKSPACE_LIMIT = 64 << 20
"""Bytes; µ-cuDNN's default."""


class Tuner:
    """Measures convolutions, plans them and runs the plans.

    Its arguments are the configuration; threads may share it.

    Args:
        backend: A backend or its name.
        workspace_limit: Bytes (or "64MiB") that each kernel may use.
        total_workspace: Bytes that all kernels planned together may use; turns
            division on (`workspace_division` instead of `planner`).
        batch_policy: Which micro-batch sizes to consider; a name or a function.
        planner: Name of a registered planner, or a function.
        cache: Where measurements are remembered: a file, made where it is missing, or
            a `BenchmarkCache`; None remembers them in memory only. By default it is a
            file in the user's cache directory, but for backends that compute nothing.
        memory_limit: Bytes for operands and workspaces while measuring.
        time_limit_s: Seconds that one `measure` may take.
        prune: Skip what cannot be part of a good plan: sizes under policy `all`, else
            algorithms far behind at the extreme sizes that no division makes smaller.
        validate: Measure a divided plan once and reject it if it does not beat the
            undivided one.
        numerics: Which ways of computing are accepted, as a policy or in words
            (`strict,deterministic`).
        replay: Launch a whole plan at once where the backend can (a CUDA graph): for
            calls that come back with the same operands.
        benchmark_backends: Devices of one model to measure on at once; `backend` alone
            if none are given.
        rule: When a kernel has been timed enough.
        progress: Called after each measurement.
        isolate: Whether to measure in a child process, so that a kernel that crashes
            or spoils the device's context costs one row; by default where the backend
            is fragile.

    Raises:
        ValueError: A name, size or policy is not valid, or the devices differ.
        TypeError: `cache` is nothing that measurements can be remembered in.
    """

    def __init__(
        self,
        *,
        backend: Backend | str = "cpu",
        workspace_limit: int | str = DEFAULT_WORKSPACE_LIMIT,
        total_workspace: int | str | None = None,
        batch_policy: BatchPolicy = "powers_of_two",
        planner: str | Planner = "workspace_reuse",
        cache: CacheChoice = USERS,
        memory_limit: int | str | None = None,
        time_limit_s: float | None = None,
        prune: bool = True,
        validate: bool = True,
        numerics: Numerics | str = "tf32",
        replay: bool = False,
        benchmark_backends: Sequence[Backend] = (),
        rule: StoppingRule | None = None,
        progress: Callable[[Progress], None] | None = None,
        isolate: bool | None = None,
    ) -> None:
        self.backend = get_backend(backend) if isinstance(backend, str) else backend
        self.workspace_limit = parse_bytes(workspace_limit)
        self.total_workspace = (
            None if total_workspace is None else parse_bytes(total_workspace)
        )
        candidate_batches(1, batch_policy)
        self.batch_policy = batch_policy
        self.planner = PLANNERS.resolve(planner)
        if self.total_workspace is not None:
            self.planner = PLANNERS.resolve("workspace_division")
        self.cache = open_cache(cache, self.backend)
        self.memory_limit = (
            math.inf if memory_limit is None else parse_bytes(memory_limit)
        )
        self.time_limit_s = math.inf if time_limit_s is None else time_limit_s
        self.prune = prune
        self.validates = validate
        self.numerics = (
            Numerics.parse(numerics) if isinstance(numerics, str) else numerics
        )
        self.replay = replay
        self.rule = rule or StoppingRule()
        self.progress = progress
        self.benchmark_backends = tuple(benchmark_backends) or (self.backend,)
        for other in self.benchmark_backends:
            if other.device.fingerprint != self.backend.device.fingerprint:
                raise ValueError(
                    "measurements do not carry over between "
                    f"{self.backend.device.fingerprint!r} and "
                    f"{other.device.fingerprint!r}; use devices of one model"
                )
        self.ready: dict[object, Any] = {}  # call signature -> what runs it
        self._verdicts = Verdicts(self.backend, self.cache)
        self._isolation = Isolation(isolate)
        self._arena = Arena(self.backend.device)
        self._tables: dict[ConvProblem, PerfTable] = {}
        self._compiled: dict[ConvProblem, ResilientPlan] = {}
        self._lock = Own(threading.RLock)

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, **overrides: Any
    ) -> "Tuner":
        """A tuner configured by µ-cuDNN's environment variables.

        `MUCUDNN_BATCH_SIZE_POLICY`, `MUCUDNN_WORKSPACE_LIMIT`,
        `MUCUDNN_TOTAL_WORKSPACE_SIZE` (more than 0 turns division on),
        `MUCUDNN_DATABASE` (a path; else the user's cache directory) and
        `MUCUDNN_BENCHMARK_DEVICES` (`all` or a comma list). Arguments win over the
        environment, the environment over the defaults.

        Raises:
            ValueError: A variable is not valid; the message names it.
        """
        env = os.environ if environ is None else environ
        return cls(**tuner_options(env, overrides))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Tuner cannot be copied or pickled, as it holds a device, a lock and a "
            "cache; share this one among threads and forked processes, or make another "
            "with the same arguments, which finds in the same cache what was measured"
        )

    def close(self) -> None:
        """End the processes that measured; a later measurement starts new ones.

        They end with the tuner, too, and with the program, however that ends.
        """
        with self._lock.mine:
            self._isolation.close()

    def measure(
        self,
        problem: ConvProblem,
        *,
        time_limit_s: float | None = None,
        memory_limit: float = math.inf,
    ) -> PerfTable:
        """Every algorithm at every candidate micro-batch size.

        Rows of failed algorithms carry the error. Rows that a limit prevented carry
        the limit; such a table is not remembered.

        Args:
            problem: What to measure.
            time_limit_s: Seconds; the tuner's own if not given.
            memory_limit: Bytes; the tuner's own holds as well.

        Raises:
            PlanningError: There are too many samples to be divided.
        """
        if (table := self._tables.get(problem)) is not None:
            return table
        with self._lock.mine:  # two at once would disturb each other
            if (table := self._tables.get(problem)) is None:
                table = self._sweep(problem, time_limit_s, memory_limit)
            return table

    def _sweep(
        self, problem: ConvProblem, time_limit_s: float | None, memory_limit: float
    ) -> PerfTable:
        limit = self.time_limit_s if time_limit_s is None else time_limit_s
        if self.batch_policy != "undivided":
            every = self.batch_policy == "all"
            sizes = problem.batch if every else problem.batch.bit_length()
            check_divisible(problem.batch, sizes)
        sweep = Sweep(
            backends=self.benchmark_backends,
            cache=self.cache,
            rule=self.rule,
            numerics=self.numerics,
            memory_limit=min(self.memory_limit, memory_limit),
            deadline=time.monotonic() + limit,
            progress=self.progress,
            isolation=self._isolation,
        )
        # What was recorded takes no time to ask for, and all of it was planned with.
        prune = self.prune and recording_of(self.backend) is None
        table = sweep.table(problem, self.batch_policy, prune=prune)
        if not any(perf.status is RowStatus.LIMITED for perf in table.perfs):
            self._tables[problem] = table
        return table

    def plan(self, problems: Sequence[ConvProblem]) -> tuple[ConvPlan, ...]:
        """One plan a problem, each at least as fast as undivided under its limit.

        Raises:
            PlanningError: A problem has no plan within the limit.
        """
        tables = [self.measure(problem) for problem in problems]
        total = self.total_workspace
        limit = self.workspace_limit if total is None else total
        plans = tuple(
            plan.under(limit if total is None else plan.workspace)  # its share
            for plan in divided_by(self.planner, tables, limit)
        )
        if not self.validates:
            return plans
        return tuple(
            self._kept(table, plan) for table, plan in zip(tables, plans, strict=True)
        )

    def undivided(self, table: PerfTable, workspace_limit: int) -> ConvPlan | None:
        """The fastest single call within the limit, or None."""
        try:
            return PLANNERS.resolve("undivided")([table], workspace_limit)[0]
        except PlanningError:
            return None

    def validate(
        self,
        plan: ConvPlan,
        undivided: ConvPlan | None,
        *,
        time_limit_s: float = math.inf,
    ) -> Choice:
        """Measure a plan and its undivided rival in one run; keep the faster.

        A recording answers with what its machine found, where that ran both.

        Raises:
            OutOfMemoryError: The operands do not fit the memory limit.
            StepFailedError: A kernel failed.
        """
        if undivided is None or undivided.steps == plan.steps:
            (timing,) = self.time_plans([plan], time_limit_s=time_limit_s)
            rival_ms = None if undivided is None else timing.time_ms
            return decided(plan, undivided, timing.time_ms, rival_ms)
        if (ratio := self._verdicts.recorded(plan, undivided)) is not None:
            rival_ms, won = undivided.time_ms, ratio < REJECTED
            return decided(plan, undivided, ratio * rival_ms, rival_ms, won=won)
        ours, theirs = self.time_plans([plan, undivided], time_limit_s=time_limit_s)
        noise_ms = max(ours.noise_ms, theirs.noise_ms)
        won = ours.time_ms < theirs.time_ms - noise_ms
        ratio = ours.time_ms / theirs.time_ms if won else REJECTED
        self._verdicts.keep(plan, undivided, ratio, remember=ours.samples > 0)
        return decided(plan, undivided, ours.time_ms, theirs.time_ms, won=won)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """What became of divided plans when they were run whole."""
        return self._verdicts.used

    def compiled(self, problem: ConvProblem) -> ResilientPlan:
        """The plan of a problem, ready to run; planned on first use."""
        if (ready := self._compiled.get(problem)) is not None:
            return ready
        with self._lock.mine:
            if (ready := self._compiled.get(problem)) is None:
                (plan,) = self.plan([problem])
                ready = self.adopt(plan)
            return ready

    def adopt(self, plan: ConvPlan) -> ResilientPlan:
        """Run `plan` from now on for its problem (plans made ahead, or by hand)."""
        restore_plans(self.backend, self.cache, plan)

        def smaller() -> Sequence[ConvPlan]:
            return pareto_plans(self.measure(plan.problem), plan.workspace)

        ready = ResilientPlan(
            self.backend, plan, smaller, self._arena, replay=self.replay
        )
        with self._lock.mine:
            known = self._compiled.get(plan.problem)
            self._compiled[plan.problem] = ready
            if known is not None:
                self.ready.clear()
        return ready

    def prepare(self, problems: Sequence[ConvProblem]) -> tuple[ConvPlan, ...]:
        """Plan ahead: afterwards the first call of each problem is a hit.

        With `total_workspace` this is how kernels come to share it: all of them must
        be named in one call.
        """
        plans = self.plan(problems)
        for plan in plans:
            self.adopt(plan)
        return plans

    def explain(self, plan: ConvPlan) -> str:
        """Say in words why a plan is what it is, under the limit it was made under."""
        table = self.measure(plan.problem)
        limit = plan.workspace_limit
        if limit is None:
            limit = max(self.workspace_limit, plan.workspace)
        rival = self.undivided(table, limit)
        division = plan if plan.divided else self._division(table, limit)
        if rival is None or division is None:
            return explain(table, plan, limit)
        trial = Trial(division, self._verdicts.known(division, rival))
        return explain(table, plan, limit, trial)

    def _division(self, table: PerfTable, limit: int) -> ConvPlan | None:
        """What an undivided plan was preferred to, if the planner wanted to divide."""
        try:
            (plan,) = self.planner([table], limit)
        except PlanningError:
            return None
        return plan if plan.divided else None

    def _kept(self, table: PerfTable, plan: ConvPlan) -> ConvPlan:
        """The plan, or undivided where that was not beaten when both were run."""
        alone = self.total_workspace is None
        limit = self.workspace_limit if alone else plan.workspace
        undivided = self.undivided(table, limit)
        if undivided is None or not plan.divided:
            return plan
        ratio = self._verdicts.known(plan, undivided)
        if ratio is not None:
            return plan if ratio < REJECTED else undivided
        try:
            return self.validate(plan, undivided).plan
        except MucudnnError as e:
            logger.warning("%s is not divided, for want of proof: %s", plan.problem, e)
            return undivided

    def time_plans(
        self, plans: Sequence[ConvPlan], *, time_limit_s: float = math.inf
    ) -> tuple[Timing, ...]:
        """Run plans of one problem in turn and time each as a whole.

        Raises:
            OutOfMemoryError: Operands and workspace do not fit the memory limit.
        """
        backend = self.backend
        workspace = max(plan.workspace for plan in plans)
        a, b, out = operands(backend, plans[0].problem, workspace, self.memory_limit)
        scratch = backend.device.allocate(workspace)

        def runner(plan: ConvPlan) -> Callable[[], None]:
            compiled = compile_plan(backend, plan)
            return lambda: compiled.run(a, b, out, scratch, False)

        return measure_together(
            [runner(plan) for plan in plans],
            backend.device,
            self.rule,
            deadline=time.monotonic() + time_limit_s,
        )
