"""Problem -> measurements -> plan, and the check that the plan keeps its word."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.backends import Backend, get_backend
from mucudnn.errors import MucudnnError, PlanningError
from mucudnn.ir.conv import ConvPlan, ConvProblem, PerfTable
from mucudnn.ir.numerics import Numerics
from mucudnn.ir.sizes import parse_bytes
from mucudnn.passes.explain import explain
from mucudnn.passes.microbatch import (
    PLANNERS,
    BatchPolicy,
    Planner,
    candidate_batches,
    pareto_plans,
)
from mucudnn.runtime.bench_kernels import limited, operands
from mucudnn.runtime.cache import BenchmarkCache
from mucudnn.runtime.environment import tuner_options
from mucudnn.runtime.execution import compile_plan
from mucudnn.runtime.isolation import Isolation
from mucudnn.runtime.plan_texts import restore_plans
from mucudnn.runtime.recovery import Arena, ResilientPlan
from mucudnn.runtime.sweep import Progress, Sweep
from mucudnn.runtime.timing import StoppingRule, Timing, measure_together

__all__ = ["Choice", "Progress", "Tuner"]

logger = logging.getLogger(__name__)

DEFAULT_WORKSPACE_LIMIT = 64 << 20
"""Bytes; µ-cuDNN's default."""

LAUNCH_OVERHEAD_MS = 0.005
"""What one more micro-batch costs the host, beyond the kernel's own time."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and its rival, both measured in one run.

    Attributes:
        plan: What to use: the planner's plan, or `undivided` if that was not beaten.
        undivided: The fastest single call under the same limit; None if none fits.
        planned_ms: Measured time of `plan`.
        undivided_ms: Measured time of `undivided`.
        predicted_ms: What the planner expected of its own plan.
        rejected: Whether the planner's plan did not win by more than the noise.
    """

    plan: ConvPlan
    undivided: ConvPlan | None
    planned_ms: float
    undivided_ms: float | None
    predicted_ms: float
    rejected: bool

    @property
    def speedup(self) -> float | None:
        """Undivided over planned; None where there is no undivided plan."""
        if self.undivided_ms is None:
            return None
        if self.planned_ms == self.undivided_ms:
            return 1.0
        return self.undivided_ms / self.planned_ms if self.planned_ms else math.inf


class Tuner:
    """Measures convolutions, plans them and runs the plans.

    Its arguments are the configuration; threads may share it.

    Args:
        backend: A backend or its name.
        workspace_limit: Bytes (or "64MiB") that each kernel may use.
        total_workspace: Bytes that all kernels planned together may use; turns
            division on (`workspace_division` instead of `planner`).
        batch_policy: Which micro-batch sizes to consider.
        planner: Name of a registered planner, or a function.
        cache: Where measurements are remembered; in memory if not given.
        memory_limit: Bytes for operands and workspaces while measuring.
        time_limit_s: Seconds that one `measure` may take.
        prune: Under policy `all`, skip sizes that cannot be part of a good plan.
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
    """

    def __init__(
        self,
        *,
        backend: Backend | str = "cpu",
        workspace_limit: int | str = DEFAULT_WORKSPACE_LIMIT,
        total_workspace: int | str | None = None,
        batch_policy: BatchPolicy = "powers_of_two",
        planner: str | Planner = "workspace_reuse",
        cache: BenchmarkCache | None = None,
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
        self.cache = BenchmarkCache() if cache is None else cache
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
        self._isolation = Isolation(isolate)
        self._arena = Arena(self.backend.device)
        self._tables: dict[ConvProblem, PerfTable] = {}
        self._compiled: dict[ConvProblem, ResilientPlan] = {}
        self._lock = threading.RLock()

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

    def close(self) -> None:
        """End the processes that measured; a later measurement starts new ones.

        They end with the tuner, too, and with the program, however that ends.
        """
        with self._lock:
            self._isolation.close()

    def measure(
        self, problem: ConvProblem, *, time_limit_s: float | None = None
    ) -> PerfTable:
        """Every algorithm at every candidate micro-batch size.

        Rows of failed algorithms carry the error. Rows that a limit prevented carry
        the limit; such a table is not remembered.
        """
        if (table := self._tables.get(problem)) is not None:
            return table
        with self._lock:  # two at once would disturb each other
            if (table := self._tables.get(problem)) is None:
                table = self._sweep(problem, time_limit_s)
            return table

    def _sweep(self, problem: ConvProblem, time_limit_s: float | None) -> PerfTable:
        limit = self.time_limit_s if time_limit_s is None else time_limit_s
        sweep = Sweep(
            backends=self.benchmark_backends,
            cache=self.cache,
            rule=self.rule,
            numerics=self.numerics,
            memory_limit=self.memory_limit,
            deadline=time.monotonic() + limit,
            progress=self.progress,
            isolation=self._isolation,
        )
        table = sweep.table(
            problem, self.batch_policy, prune=self.prune, overhead=LAUNCH_OVERHEAD_MS
        )
        if not any(limited(perf) for perf in table.perfs):
            self._tables[problem] = table
        return table

    def plan(self, problems: Sequence[ConvProblem]) -> tuple[ConvPlan, ...]:
        """One plan a problem, each at least as fast as undivided under its limit.

        Raises:
            PlanningError: A problem has no plan within the limit.
        """
        tables = [self.measure(problem) for problem in problems]
        total = self.total_workspace
        plans = self.planner(tables, self.workspace_limit if total is None else total)
        if not self.validates:
            return tuple(plans)
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

        Raises:
            OutOfMemoryError: The operands do not fit the memory limit.
            StepFailedError: A kernel failed.
        """
        rivals = [plan]
        if undivided is not None and undivided.steps != plan.steps:
            rivals.append(undivided)
        timings = self.time_plans(rivals, time_limit_s=time_limit_s)
        planned = timings[0].time_ms
        predicted = plan.time_ms
        if undivided is None:
            return Choice(plan, None, planned, None, predicted, rejected=False)
        rival = timings[-1].time_ms
        noise = max(timings[0].noise_ms, timings[-1].noise_ms)
        if len(rivals) == 2 and planned >= rival - noise:
            return Choice(undivided, undivided, rival, rival, predicted, rejected=True)
        return Choice(plan, undivided, planned, rival, predicted, rejected=False)

    def compiled(self, problem: ConvProblem) -> ResilientPlan:
        """The plan of a problem, ready to run; planned on first use."""
        if (ready := self._compiled.get(problem)) is not None:
            return ready
        with self._lock:
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
        with self._lock:
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
        """Say in words why a plan is what it is."""
        return explain(self.measure(plan.problem), plan, self.workspace_limit)

    def _kept(self, table: PerfTable, plan: ConvPlan) -> ConvPlan:
        """The plan, or undivided where that was not beaten when both were run."""
        alone = self.total_workspace is None
        limit = self.workspace_limit if alone else plan.workspace
        undivided = self.undivided(table, limit)
        if undivided is None or not plan.divided:
            return plan
        device = self.backend.device.fingerprint
        signature = f"{_signature(plan)} / {_signature(undivided)}"
        ratio = self.cache.get_verdict(device, plan.problem, signature)
        if ratio is None:
            try:
                choice = self.validate(plan, undivided)
            except MucudnnError as e:
                logger.warning("%s is not divided, for want of proof: %s", signature, e)
                return undivided
            ratio = 1.0 if choice.rejected else 1 / (choice.speedup or 1.0)
            self.cache.put_verdict(device, plan.problem, signature, ratio)
        return plan if ratio < 1.0 else undivided

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


def _signature(plan: ConvPlan) -> str:
    return "+".join(f"{step.algo}@{step.batch}" for step in plan.steps)
