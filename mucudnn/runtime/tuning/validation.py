"""Compare composed plans with their undivided baselines.

Consecutive kernels are not always as fast as each one alone, so a division is run once
before it is used. The result is a measurement like any other: it is cached, and
recordings carry it to machines that cannot run the plans.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mucudnn.backends.base import Backend
from mucudnn.backends.recorded import recording_of
from mucudnn.errors import MucudnnError, PlanningError
from mucudnn.ir.conv import ConvPlan, ConvProblem, PerfTable
from mucudnn.ir.measurement import Verdict, signature
from mucudnn.passes.microbatch import PLANNERS
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.kernel_timer import operands
from mucudnn.runtime.tuning.timing import StoppingRule, Timing, measure_together

logger = logging.getLogger(__name__)

REJECTED = 1.0
"""Ratio stored for a plan that was not faster by more than the noise."""


@dataclass(frozen=True, slots=True)
class ValidatedPlan:
    """The faster of a plan and its baseline, measured in one run.

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


@dataclass(frozen=True)
class Validator:
    """Runs divided plans as a whole, in turn with their undivided baselines."""

    backend: Backend
    cache: Callable[[], BenchmarkCache]
    rule: StoppingRule
    memory_limit: float
    _used: dict[tuple[ConvProblem, str], float] = field(default_factory=dict)

    @property
    def _fingerprint(self) -> str:
        return self.backend.device.fingerprint

    def accept_if_faster(self, plan: ConvPlan, table: PerfTable) -> ConvPlan:
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
            return self.validate(plan, undivided).plan
        except MucudnnError as e:
            logger.warning(
                "%s is not divided, as no gain could be verified: %s", plan.problem, e
            )
            return undivided

    def validate(
        self, plan: ConvPlan, undivided: ConvPlan | None, time_limit_s: float = math.inf
    ) -> ValidatedPlan:
        """Measure a plan and its undivided baseline in one run; return the faster.

        A recording returns the ratio that its machine measured, if it ran both.
        """
        chosen, rejected = plan, False
        if undivided is None or undivided.steps == plan.steps:
            (timing,) = self.time_plans([plan], time_limit_s)
            planned_ms = timing.time_ms
            baseline_ms = None if undivided is None else planned_ms
        else:
            # A recording answers for its machine; otherwise both run in turn.
            if (ratio := self._recorded(plan, undivided)) is not None:
                baseline_ms = undivided.time_ms
                planned_ms = ratio * baseline_ms
                rejected = not ratio < REJECTED
            else:
                both = [plan, undivided]
                ours, theirs = self.time_plans(both, time_limit_s, challenger=True)
                planned_ms, baseline_ms = ours.time_ms, theirs.time_ms
                noise_ms = max(ours.noise_ms, theirs.noise_ms)
                rejected = not planned_ms < baseline_ms - noise_ms
                ratio = REJECTED if rejected else planned_ms / baseline_ms
                if recording_of(self.backend) is None:  # a replay runs nothing
                    problem, plans = plan.problem, signature(plan, undivided)
                    self._used[problem, plans] = ratio
                    if ours.samples > 0:
                        cache = self.cache()
                        cache.put_verdict(self._fingerprint, problem, plans, ratio)
            if rejected:
                chosen, planned_ms = undivided, baseline_ms
        return ValidatedPlan(
            plan=chosen,
            undivided=undivided,
            planned_ms=planned_ms,
            undivided_ms=baseline_ms,
            predicted_ms=plan.time_ms,
            rejected=rejected,
        )

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
        backend = self.backend
        workspace = max(plan.workspace for plan in plans)
        a, b, out = operands(backend, plans[0].problem, workspace, self.memory_limit)
        scratch = backend.device.allocate(workspace)

        def call(plan: ConvPlan) -> Callable[[], None]:
            runner = backend.bind(plan)
            return lambda: runner.run(a, b, out, scratch, False)

        return measure_together(
            [call(plan) for plan in plans],
            backend.device,
            self.rule,
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
        ratio, plans = self._recorded(plan, baseline), signature(plan, baseline)
        if ratio is None:
            ratio = self.cache().get_verdict(self._fingerprint, plan.problem, plans)
            if ratio is not None:
                self._used[plan.problem, plans] = ratio
        return ratio

    def _recorded(self, plan: ConvPlan, baseline: ConvPlan) -> float | None:
        """Return the ratio in the backend's recording, or None."""
        recording = recording_of(self.backend)
        if recording is None:
            return None
        plans = signature(plan, baseline)
        ratio = recording.verdict(plan.problem, plans)
        if ratio is not None:
            self._used[plan.problem, plans] = ratio
        return ratio


def fastest_undivided(table: PerfTable, workspace_limit: int) -> ConvPlan | None:
    """Return the fastest single call within the limit, or None."""
    try:
        return PLANNERS.resolve("undivided")([table], workspace_limit)[0]
    except PlanningError:
        return None
