"""Compare planned with undivided convolutions, for many layers and limits.

Every layer is measured once for all limits: measurements do not depend on them. Each
layer may use an equal share of the remaining time, and what it does not need goes to
the layers after it. Time left at the end goes to layers whose share was too small.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Generic, TypeVar

from mucudnn.codecs import encode_fields
from mucudnn.errors import MucudnnError, PlanningError
from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction, PerfTable
from mucudnn.ir.measurement import LimitRange
from mucudnn.ir.numerics import RowStatus
from mucudnn.ir.sizes import format_bytes
from mucudnn.notebook import html_of
from mucudnn.passes.convolution.explain import counted, left_out
from mucudnn.passes.convolution.pareto import by_reason, least_workspace
from mucudnn.passes.microbatch import (
    PLANNERS,
    Planner,
    divided_by,
    pareto_plans,
    workspace_division,
)
from mucudnn.passes.registry import name_of
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.runtime.tuning.validation import ValidatedPlan
from mucudnn.suites import Layer


@dataclass(frozen=True, slots=True)
class Limit:
    """Workspace bytes for each kernel or (`total`) for all together."""

    nbytes: int
    total: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        kind = "total" if self.total else "per_kernel"
        return {"workspace_limit": self.nbytes, "kind": kind}


@dataclass(frozen=True, slots=True)
class LimitResult:
    """Result of a layer under a limit: a choice, or the reason for none."""

    limit: Limit
    choice: ValidatedPlan | None
    reason: str | None = None

    @property
    def speedup(self) -> float | None:
        """Undivided over planned time; None if one is missing or 0."""
        found = None if self.choice is None else self.choice.speedup
        return found if found is not None and 0 < found < math.inf else None

    @property
    def missing(self) -> str | None:
        """Short reason why there is no speed-up; None if there is one."""
        if self.choice is not None:
            return None if self.choice.speedup is not None else _NO_RIVAL
        reason = self.reason or ""
        known = (_NO_TIME, _NO_MEMORY, _NOTHING_FITS)
        return next((words for words in known if words in reason), _OTHER)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; missing ones are null."""
        names = ("undivided_ms", "planned_ms", "predicted_ms")
        if self.choice is None:
            empty = dict.fromkeys((*names, "speedup", "workspace"))
            return {**self.limit.to_json(), **empty, "steps": [], "reason": self.reason}
        choice, plan = self.choice, self.choice.plan
        return {
            **self.limit.to_json(),
            **{name: getattr(choice, name) for name in names},
            "speedup": self.speedup,
            "workspace": plan.workspace,
            "rejected": choice.rejected,
            "undivided": choice.undivided and _steps_to_json(choice.undivided),
            "steps": _steps_to_json(plan),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class LayerResult:
    """Results of one direction of a layer, with one outcome per limit.

    Attributes:
        count: Number of occurrences in its network.
        table: All measurements, failed ones included.
        front: Pareto front of divisions in time and workspace.
    """

    name: str
    count: int
    problem: ConvProblem
    table: PerfTable
    front: tuple[ConvPlan, ...]
    outcomes: tuple[LimitResult, ...]

    @property
    def direction(self) -> Direction:
        """Direction of the problem."""
        return self.problem.direction

    @property
    def failures(self) -> tuple[tuple[str, str], ...]:
        """(algorithm, reason) of those without any measurement."""
        usable = {perf.algo for perf in self.table.usable}
        unusable = (perf for perf in self.table.perfs if perf.algo not in usable)
        reasons = {p.algo: p.error for p in unusable if p.error is not None}
        return tuple(reasons.items())

    @property
    def ran_out_of_time(self) -> bool:
        """True if the time limit left a measurement or a comparison out."""
        return any(p.status is RowStatus.LIMITED for p in self.table.perfs) or any(
            outcome.reason == _OUT_OF_TIME for outcome in self.outcomes
        )

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Failures for display: equal ones are one entry with a count."""
        usable = {perf.algo for perf in self.table.usable}
        return left_out(p for p in self.table.perfs if p.algo not in usable)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "name": self.name,
            "direction": self.direction.value,
            "count": self.count,
            "problem": encode_fields(self.problem),
            "plans": [outcome.to_json() for outcome in self.outcomes],
            "pareto": [
                {"workspace": p.workspace, "time_ms": p.time_ms, "parts": len(p.steps)}
                for p in self.front
            ],
            "excluded": [
                {"algo": algo, "reason": reason} for algo, reason in self.failures
            ],
        }


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class LayerProgress(Generic[R]):
    """Progress of a study: a layer begun, or (with a result) done."""

    layer: Layer
    index: int
    total: int
    result: R | None = None


_MEASURING = 0.6
"""Share of a layer's time for its table; the rest is for validating its plans."""

_TRYING = 0.15
"""Share of a layer's time for trying the algorithms on one sample."""

_PER_KERNEL = 0.8
"""Share of the total time for per-kernel limits if there is a total limit, too."""

_MOST_REASONS = 6
"""Maximum number of reasons that are listed; more are only counted."""

_OUT_OF_TIME = "not compared: the time limit was reached"


class StudyInterrupted(KeyboardInterrupt):
    """Ctrl-C during a study of convolutions; `found` holds the finished layers."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found


def in_directions(
    layers: Iterable[Layer], directions: Sequence[Direction]
) -> tuple[Layer, ...]:
    """Return every layer once per direction."""
    return tuple(
        replace(layer, problem=layer.problem.with_direction(direction))
        for layer in layers
        for direction in directions
    )


def compare(
    tuner: Tuner,
    layers: Sequence[Layer],
    limits: Sequence[int],
    *,
    planner: str | Planner = "workspace_reuse",
    total_workspace: int | None = None,
    time_limit_s: float | None = None,
    progress: Callable[[LayerProgress[LayerResult]], None] | None = None,
) -> "Comparison":
    """Measure, plan and validate every layer under every limit.

    Args:
        tuner: Measures and validates; its own limit and planner are ignored.
        layers: Layers, each in the direction of its problem.
        limits: Workspace limits per kernel in bytes.
        planner: Planner that divides mini-batches.
        total_workspace: Bytes for all layers together, divided among them by
            `workspace_division`. This adds one row per layer, whose baseline is the
            fastest undivided call within an equal share. A layer that occurs several
            times counts once.
        time_limit_s: Seconds for everything. Layers without enough time have a reason
            instead of a plan.
        progress: Called when a layer begins and when it is done.

    Raises:
        StudyInterrupted: Ctrl-C; carries the finished layers.
        ValueError: The planner is unknown.
    """
    widest = max(*limits, total_workspace or 0, 0)
    least = 0 if total_workspace is not None else min(limits, default=0)
    run = _TimedComparison(
        tuner, PLANNERS.resolve(planner), time_limit_s, LimitRange(least, widest)
    )
    per_kernel = tuple(Limit(nbytes) for nbytes in dict.fromkeys(limits))
    total = () if total_workspace is None else (Limit(total_workspace, total=True),)
    done: list[LayerResult] = []

    def comparison(results: Sequence[LayerResult], *, divided: bool) -> Comparison:
        return Comparison(
            backend=tuner.backend.name,
            fingerprint=tuner.backend.device.fingerprint,
            batch_policy=name_of(tuner.batch_policy),
            planner=name_of(planner),
            numerics=tuner.numerics.words,
            limits=per_kernel + (total if divided else ()),
            layers=tuple(results),
            asked=len(layers),
        )

    share = _PER_KERNEL if total else 1.0

    def one(layer: Layer, left: int) -> LayerResult:
        return run.layer(layer, per_kernel, share, left)

    try:
        if tuner.executor is not None:
            # Measure all layers at once on workers, as one layer cannot occupy all of
            # them. Layers that get no time here are measured when they are compared.
            seconds = run.seconds_for(share * _MEASURING, 1)
            problems = [layer.problem for layer in layers]
            with suppress(PlanningError):  # a layer that is too large fails again later
                tuner.measure_all(problems, time_limit_s=seconds, limits=run.limits)
        study_layers(layers, one, done, progress)
        short = [i for i, result in enumerate(done) if result.ran_out_of_time]
        for again, i in enumerate(short):
            done[i] = one(layers[i], len(short) - again)
        results = run.divide(done, total[0]) if total else done
    except KeyboardInterrupt:
        raise StudyInterrupted(comparison(done, divided=False)) from None
    return comparison(results, divided=True)


@dataclass(slots=True)
class _TimedComparison:
    """A comparison's clock and its validated plans, by plan and baseline."""

    tuner: Tuner
    planner: Planner
    time_limit_s: float | None
    limits: LimitRange
    start: float = field(default_factory=lambda: time.monotonic())
    choices: dict[tuple[ConvPlan, ConvPlan | None], ValidatedPlan] = field(
        default_factory=dict
    )

    def layer(
        self, layer: Layer, limits: Sequence[Limit], share: float, left: int
    ) -> LayerResult:
        """Measure one layer, then plan and validate it under each limit."""
        seconds = self.seconds_for(share, left)
        ends = None if seconds is None else time.monotonic() + seconds
        outcomes = []
        try:
            table = self._measure(layer.problem, seconds)
        except PlanningError as e:  # the problem is too large to be divided
            table = PerfTable(layer.problem, ())
            outcomes = [LimitResult(limit, None, str(e)) for limit in limits]
        else:
            for i, limit in enumerate(limits):
                seconds = None if ends is None else ends - time.monotonic()
                if seconds is not None:
                    seconds = max(0.0, seconds / (len(limits) - i))
                outcomes.append(self._plan_under(table, limit, seconds))
        most = max((perf.workspace for perf in table.usable), default=0)
        front = tuple(pareto_plans(table, most)) if table.usable else ()
        return LayerResult(
            layer.name, layer.count, layer.problem, table, front, tuple(outcomes)
        )

    def _measure(self, problem: ConvProblem, seconds: float | None) -> PerfTable:
        """Measure within a share of the time.

        One sample is tried first: it shows which algorithms are fast, so that these are
        measured first at the whole mini-batch.
        """
        if seconds is None:
            return self.tuner.measure(problem, limits=self.limits)
        ends = time.monotonic() + seconds * _MEASURING
        self.tuner.measure(problem.with_batch(1), time_limit_s=seconds * _TRYING)
        left = max(0.0, ends - time.monotonic())
        return self.tuner.measure(problem, time_limit_s=left, limits=self.limits)

    def divide(
        self, results: Sequence[LayerResult], limit: Limit
    ) -> Sequence[LayerResult]:
        """Add an outcome per layer: a total divided among all that can run."""
        runnable = [i for i, result in enumerate(results) if result.table.usable]
        outcomes = [LimitResult(limit, None, _why_unusable(r.table)) for r in results]
        equal = limit.nbytes // max(1, len(runnable))
        try:
            plans = workspace_division(
                [results[i].table for i in runnable], limit.nbytes
            )
        except PlanningError as e:
            for i in runnable:
                outcomes[i] = LimitResult(limit, None, str(e))
        else:
            for begun, (i, plan) in enumerate(zip(runnable, plans, strict=True)):
                baseline = self.tuner.undivided(results[i].table, equal)
                seconds = self.seconds_for(1.0, len(runnable) - begun)
                outcomes[i] = self._validate(plan, baseline, limit, seconds)
            # Withdraw rejections that, together, would exceed the total: a rejected
            # plan is replaced by its baseline, which may use an equal share although
            # the plan used less.
            done = [o.choice for o in outcomes if o.choice is not None]
            used = sum(choice.plan.workspace for choice in done)
            for i, plan in zip(runnable, plans, strict=True):
                choice = outcomes[i].choice
                if used <= limit.nbytes or choice is None:
                    break
                if choice.rejected and choice.plan.workspace > plan.workspace:
                    used -= choice.plan.workspace - plan.workspace
                    alone = self.tuner.validate(plan, None)
                    kept = replace(
                        alone,
                        undivided=choice.undivided,
                        undivided_ms=choice.undivided_ms,
                    )
                    outcomes[i] = LimitResult(limit, kept)
        return [
            replace(result, outcomes=(*result.outcomes, outcome))
            for result, outcome in zip(results, outcomes, strict=True)
        ]

    def _plan_under(
        self, table: PerfTable, limit: Limit, seconds: float | None
    ) -> LimitResult:
        if (reason := _why_unusable(table)) is not None:
            return LimitResult(limit, None, reason)
        try:
            (plan,) = divided_by(self.planner, [table], limit.nbytes)
        except PlanningError as e:
            least = least_workspace(table)
            if least is None or least <= limit.nbytes:
                return LimitResult(limit, None, str(e))
            needs = format_bytes(least, limit.nbytes)
            return LimitResult(limit, None, f"nothing fits; the smallest needs {needs}")
        baseline = self.tuner.undivided(table, limit.nbytes)
        return self._validate(plan, baseline, limit, seconds)

    def _validate(
        self,
        plan: ConvPlan,
        baseline: ConvPlan | None,
        limit: Limit,
        seconds: float | None,
    ) -> LimitResult:
        """Measure a plan against its undivided baseline, each pair once."""
        choice = self.choices.get((plan, baseline))
        if choice is None:
            # Each is warmed up and run at least once.
            expected_ms = 2 * sum(p.time_ms for p in {plan, baseline} if p is not None)
            if seconds is not None and seconds <= expected_ms / 1e3:
                return LimitResult(limit, None, _OUT_OF_TIME)
            try:
                choice = self.tuner.validate(
                    plan, baseline, time_limit_s=inf if seconds is None else seconds
                )
            except MucudnnError as e:
                return LimitResult(limit, None, f"not compared: {e}")
            self.choices[plan, baseline] = choice
        return LimitResult(limit, choice, _remark(plan.problem, choice, limit))

    def seconds_for(self, of_limit: float, parts: int) -> float | None:
        """Return the time for the next of `parts` equal parts of the remaining time."""
        if self.time_limit_s is None:
            return None
        ends = self.start + of_limit * self.time_limit_s
        return max(0.0, ends - time.monotonic()) / parts


def _why_unusable(table: PerfTable) -> str | None:
    if table.usable:
        return None
    withheld = [perf for perf in table.perfs if perf.status is RowStatus.LIMITED]
    reasons = sorted({str(perf.error) for perf in withheld})
    if len(reasons) > _MOST_REASONS:
        return counted((perf.algo, str(perf.error)) for perf in withheld)
    if reasons:
        return "; ".join(reasons)
    return by_reason(left_out(table.perfs)) or "the backend has no algorithm for it"


def _remark(problem: ConvProblem, choice: ValidatedPlan, limit: Limit) -> str | None:
    if choice.undivided is None:
        within = "an equal share of " if limit.total else ""
        return (
            f"no algorithm was measured at the whole mini-batch of {problem.batch} "
            f"within {within}{format_bytes(limit.nbytes)}"
        )
    if choice.rejected:
        return "the planned division did not beat undivided when measured"
    return None


# Results of comparing planned with undivided convolutions.


_NOT_BEGUN = "interrupted"
_NO_TIME = "time limit"
_NO_MEMORY = "memory limit"
_NOTHING_FITS = "nothing fits"
_NO_RIVAL = "no undivided call fits"
_OTHER = "no plan"


@dataclass(frozen=True, slots=True)
class LimitSummary:
    """Summary of all layers with a speed-up under one limit.

    Attributes:
        layers: Number of layers with both a planned and an undivided time.
        geomean: Geometric mean of their speed-ups; `best` and `worst` are the extremes.
        undivided_ms: Sum of undivided times, weighted by the layers' counts.
        planned_ms: Sum of planned times, likewise.
        missing: (reason, number) of layers without a speed-up.
    """

    limit: Limit
    layers: int
    geomean: float | None
    best: float | None
    worst: float | None
    undivided_ms: float
    planned_ms: float
    missing: tuple[tuple[str, int], ...] = ()

    @property
    def cut_short(self) -> bool:
        """True if the time limit left layers out."""
        return any(why in (_NOT_BEGUN, _NO_TIME) for why, _ in self.missing)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            **self.limit.to_json(),
            "geomean_speedup": self.geomean,
            "max_speedup": self.best,
            "min_speedup": self.worst,
            "layers": self.layers,
            "missing": dict(self.missing),
            "undivided_ms": self.undivided_ms,
            "planned_ms": self.planned_ms,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Planned against undivided convolutions, by layer and limit.

    `limits` has the order of `LayerResult.outcomes`; of `asked` layers, `layers` are
    done.
    """

    backend: str
    fingerprint: str
    batch_policy: str
    planner: str
    numerics: str
    limits: tuple[Limit, ...]
    layers: tuple[LayerResult, ...]
    asked: int

    @property
    def summary(self) -> tuple[LimitSummary, ...]:
        """One entry per limit."""
        return tuple(self._summarize(i) for i in range(len(self.limits)))

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Every algorithm with a measurement, in order of appearance."""
        names = (p.algo for layer in self.layers for p in layer.table.usable)
        return tuple(dict.fromkeys(names))

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `json.dumps(…, allow_nan=False)` accepts."""
        names = ("backend", "fingerprint", "batch_policy", "planner", "numerics")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in names},
            "interrupted": len(self.layers) < self.asked,
            "layers": [layer.to_json() for layer in self.layers],
            "summary": [entry.to_json() for entry in self.summary],
        }

    _repr_html_ = html_of

    def _summarize(self, index: int) -> LimitSummary:
        speedups: list[float] = []
        undivided_ms = planned_ms = 0.0
        missing: Counter[str] = Counter()
        for layer in self.layers:
            outcome = layer.outcomes[index]
            if outcome.missing is not None:
                missing[outcome.missing] += 1
            choice, speedup = outcome.choice, outcome.speedup
            # Both sums are over the same layers, or their ratio would mean nothing.
            if choice is None or choice.undivided_ms is None or speedup is None:
                continue
            speedups.append(speedup)
            undivided_ms += choice.undivided_ms * layer.count
            planned_ms += choice.planned_ms * layer.count
        if len(self.layers) < self.asked:
            missing[_NOT_BEGUN] += self.asked - len(self.layers)
        count = len(speedups)
        return LimitSummary(
            limit=self.limits[index],
            layers=count,
            geomean=math.exp(sum(map(math.log, speedups)) / count) if count else None,
            best=max(speedups, default=None),
            worst=min(speedups, default=None),
            undivided_ms=undivided_ms,
            planned_ms=planned_ms,
            missing=tuple(missing.items()),
        )


def _steps_to_json(plan: ConvPlan) -> list[dict[str, Any]]:
    names = ("algo", "batch", "time_ms", "workspace")
    return [{name: getattr(step, name) for name in names} for step in plan.steps]


def study_layers(
    layers: Sequence[Layer],
    study: Callable[[Layer, int], R],
    done: list[R],
    progress: Callable[[LayerProgress[R]], None] | None,
) -> None:
    """Append a result per layer to `done`, so that Ctrl-C keeps the finished ones.

    `study` gets a layer and the number of layers left, with this one.
    """
    report = progress or (lambda at: None)
    for i, layer in enumerate(layers):
        begun: LayerProgress[R] = LayerProgress(layer, i, len(layers))
        report(begun)
        done.append(study(layer, len(layers) - i))
        report(replace(begun, result=done[-1]))
