"""Compare composed plans with their undivided baselines; calls of the planners.

Consecutive kernels are not always as fast as each one alone, so a division is run once
before it is used. The result is a measurement like any other: it is cached, and
recordings carry it to machines that cannot run the plans.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mucudnn.backends.base import Backend
from mucudnn.backends.recorded import recording_of
from mucudnn.errors import MucudnnError, PlanningError
from mucudnn.ir.conv import ConvPlan, ConvProblem, PerfTable
from mucudnn.ir.measurement import Verdict, signature
from mucudnn.passes.convolution.explain import Trial, explain
from mucudnn.passes.microbatch import PLANNERS, Planner, divided_by
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.kernel_timer import operands
from mucudnn.runtime.tuning.timing import StoppingRule, Timing, measure_together

logger = logging.getLogger(__name__)


REJECTED = 1.0
"""Ratio stored for a plan that was not faster by more than the noise."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and its baseline, measured in one run.

    Attributes:
        plan: Plan to use: the planner's, or `undivided` if that was not beaten.
        undivided: Fastest single call under the same limit; None if none fits.
        planned_ms: Measured time of `plan`.
        undivided_ms: Measured time of `undivided`.
        predicted_ms: Time that the planner predicted for its own plan.
        rejected: Whether the planner's plan was not faster by more than the noise.
    """

    plan: ConvPlan
    undivided: ConvPlan | None
    planned_ms: float
    undivided_ms: float | None
    predicted_ms: float
    rejected: bool

    @property
    def speedup(self) -> float | None:
        """Undivided over planned time; None without an undivided plan."""
        if self.undivided_ms is None:
            return None
        if self.planned_ms == self.undivided_ms:
            return 1.0
        return self.undivided_ms / self.planned_ms if self.planned_ms else math.inf


class Validator:
    """Runs divided plans as a whole, in turn with their undivided baselines."""

    def __init__(
        self,
        backend: Backend,
        cache: Callable[[], BenchmarkCache],
        rule: StoppingRule,
        memory_limit: float,
    ) -> None:
        self._backend = backend
        self._fingerprint = backend.device.fingerprint
        self._recording = recording_of(backend)
        self._cache = cache
        self._rule = rule
        self._memory_limit = memory_limit
        self._used: dict[tuple[ConvProblem, str], float] = {}

    def kept(self, plan: ConvPlan, table: PerfTable) -> ConvPlan:
        """Return the plan, or its undivided baseline if that was not beaten.

        Both have the same workspace limit.
        """
        undivided = fastest_undivided(table, plan.workspace_limit or 0)
        if undivided is None or not plan.divided:
            return plan
        ratio = self.known(plan, undivided)
        if ratio is not None:
            return plan if ratio < REJECTED else undivided
        try:
            return self.choice(plan, undivided).plan
        except MucudnnError as e:
            logger.warning("%s is not divided, for want of proof: %s", plan.problem, e)
            return undivided

    def choice(
        self, plan: ConvPlan, undivided: ConvPlan | None, time_limit_s: float = math.inf
    ) -> Choice:
        """Measure a plan and its undivided baseline in one run; return the faster.

        A recording returns the ratio that its machine measured, if it ran both.

        Raises:
            OutOfMemoryError: The operands do not fit the memory limit.
            StepFailedError: A kernel failed.
        """
        if undivided is None or undivided.steps == plan.steps:
            (timing,) = self.time_plans([plan], time_limit_s)
            baseline_ms = None if undivided is None else timing.time_ms
            return _choice_of(plan, undivided, timing.time_ms, baseline_ms)
        if (ratio := self._recorded(plan, undivided)) is not None:
            baseline_ms, won = undivided.time_ms, ratio < REJECTED
            return _choice_of(
                plan, undivided, ratio * baseline_ms, baseline_ms, won=won
            )
        both = [plan, undivided]
        ours, theirs = self.time_plans(both, time_limit_s, challenger=True)
        noise_ms = max(ours.noise_ms, theirs.noise_ms)
        won = ours.time_ms < theirs.time_ms - noise_ms
        ratio = ours.time_ms / theirs.time_ms if won else REJECTED
        self._store(plan, undivided, ratio, remember=ours.samples > 0)
        return _choice_of(plan, undivided, ours.time_ms, theirs.time_ms, won=won)

    def time_plans(
        self,
        plans: Sequence[ConvPlan],
        time_limit_s: float = math.inf,
        *,
        challenger: bool = False,
    ) -> tuple[Timing, ...]:
        """Run plans of one problem in turn and time each as a whole.

        Where the first is a `challenger`, long runs stop once it is not the fastest.
        """
        backend = self._backend
        workspace = max(plan.workspace for plan in plans)
        a, b, out = operands(backend, plans[0].problem, workspace, self._memory_limit)
        scratch = backend.device.allocate(workspace)

        def call(plan: ConvPlan) -> Callable[[], None]:
            runner = backend.bind(plan)
            return lambda: runner.run(a, b, out, scratch, False)

        return measure_together(
            [call(plan) for plan in plans],
            backend.device,
            self._rule,
            launches=[len(plan.steps) for plan in plans],
            challenger=challenger,
            deadline=time.monotonic() + time_limit_s,
        )

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Every verdict that was reached or looked up, in order."""
        return tuple(
            Verdict(
                fingerprint=self._fingerprint,
                problem=problem,
                signature=plans,
                ratio=ratio,
            )
            for (problem, plans), ratio in self._used.items()
        )

    def known(self, plan: ConvPlan, baseline: ConvPlan) -> float | None:
        """Return the ratio that a recording or the cache has, or None."""
        ratio = self._recorded(plan, baseline)
        if ratio is not None:
            return ratio
        plans = signature(plan, baseline)
        found = self._cache().get_verdict(self._fingerprint, plan.problem, plans)
        return self._note(plan, baseline, found)

    def _recorded(self, plan: ConvPlan, baseline: ConvPlan) -> float | None:
        """Return the ratio in the backend's recording, or None."""
        if self._recording is None:
            return None
        return self._note(
            plan,
            baseline,
            self._recording.verdict(plan.problem, signature(plan, baseline)),
        )

    def _store(
        self, plan: ConvPlan, baseline: ConvPlan, ratio: float, *, remember: bool
    ) -> None:
        """Store a verdict, in the cache as well if `remember`.

        A backend that replays a recording runs nothing, so nothing is stored.
        """
        if self._recording is not None:
            return
        self._note(plan, baseline, ratio)
        if remember:
            plans = signature(plan, baseline)
            self._cache().put_verdict(self._fingerprint, plan.problem, plans, ratio)

    def _note(
        self, plan: ConvPlan, baseline: ConvPlan, ratio: float | None
    ) -> float | None:
        if ratio is not None:
            self._used[plan.problem, signature(plan, baseline)] = ratio
        return ratio


def _choice_of(
    plan: ConvPlan,
    undivided: ConvPlan | None,
    planned_ms: float,
    undivided_ms: float | None,
    *,
    won: bool = True,
) -> Choice:
    """Return the choice between two timed plans; `won` if the plan is faster."""
    if not won and undivided is not None and undivided_ms is not None:
        chosen, chosen_ms, rejected = undivided, undivided_ms, True
    else:
        chosen, chosen_ms, rejected = plan, planned_ms, False
    return Choice(
        plan=chosen,
        undivided=undivided,
        planned_ms=chosen_ms,
        undivided_ms=undivided_ms,
        predicted_ms=plan.time_ms,
        rejected=rejected,
    )


def plans_within(
    planner: Planner,
    tables: Sequence[PerfTable],
    workspace_limit: int,
    total_workspace: int | None,
) -> tuple[ConvPlan, ...]:
    """Plan each table, under the limit per kernel or under a total for all.

    A plan records its limit; under a total, that is the workspace it uses.
    """
    if total_workspace is None:
        plans = divided_by(planner, tables, workspace_limit)
        return tuple(plan.under(workspace_limit) for plan in plans)
    plans = divided_by(planner, tables, total_workspace)
    return tuple(plan.under(plan.workspace) for plan in plans)


def fastest_undivided(table: PerfTable, workspace_limit: int) -> ConvPlan | None:
    """Return the fastest single call within the limit, or None."""
    try:
        return PLANNERS.resolve("undivided")([table], workspace_limit)[0]
    except PlanningError:
        return None


def explained(
    planner: Planner,
    table: PerfTable,
    plan: ConvPlan,
    workspace_limit: int,
    verdict: Callable[[ConvPlan, ConvPlan], float | None],
) -> str:
    """Explain a plan in words; see `mucudnn.passes.convolution.explain`.

    `verdict` returns the known ratio of a division to its baseline: `Validator.known`.
    """
    baseline = fastest_undivided(table, workspace_limit)
    divided = plan if plan.divided else _division(planner, table, workspace_limit)
    if baseline is None or divided is None:
        return explain(table, plan, workspace_limit)
    trial = Trial(divided, verdict(divided, baseline))
    return explain(table, plan, workspace_limit, trial)


def _division(
    planner: Planner, table: PerfTable, workspace_limit: int
) -> ConvPlan | None:
    """Return the planner's division that an undivided plan was preferred to."""
    try:
        (plan,) = planner([table], workspace_limit)
    except PlanningError:
        return None
    return plan if plan.divided else None
