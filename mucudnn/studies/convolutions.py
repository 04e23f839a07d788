"""Compare planned with undivided convolutions, for many layers and limits.

Every layer is measured once for all limits: measurements do not depend on them. Each
layer may use an equal share of the remaining time, and what it does not need goes to
the layers after it. Time left at the end goes to layers whose share was too small.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Generic, TypeVar

from mucudnn.codecs import problem_to_dict
from mucudnn.errors import MucudnnError, PlanningError
from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction, PerfTable
from mucudnn.ir.measurement import LimitRange
from mucudnn.ir.numerics import RowStatus
from mucudnn.ir.sizes import format_bytes
from mucudnn.notebook import drawn
from mucudnn.passes.convolution.explain import counted, left_out
from mucudnn.passes.convolution.pareto import least_workspace
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


@dataclass(frozen=True, slots=True)
class Outcome:
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
        """Why there is no speed-up, in two or three words; None if there is one."""
        if self.choice is not None:
            return None if self.choice.speedup is not None else _NO_RIVAL
        reason = self.reason or ""
        known = (_NO_TIME, _NO_MEMORY, _NOTHING_FITS)
        return next((words for words in known if words in reason), _OTHER)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; missing ones are null."""
        kind = "total" if self.limit.total else "per_kernel"
        base = {"workspace_limit": self.limit.nbytes, "kind": kind}
        if self.choice is None:
            names = ("undivided_ms", "planned_ms", "predicted_ms", "speedup")
            empty = dict.fromkeys((*names, "workspace"))
            return {**base, **empty, "steps": [], "reason": self.reason}
        choice, plan = self.choice, self.choice.plan
        return {
            **base,
            "undivided_ms": choice.undivided_ms,
            "planned_ms": choice.planned_ms,
            "predicted_ms": choice.predicted_ms,
            "speedup": self.speedup,
            "workspace": plan.workspace,
            "rejected": choice.rejected,
            "undivided": None
            if choice.undivided is None
            else _steps_to_json(choice.undivided),
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
    outcomes: tuple[Outcome, ...]

    @property
    def direction(self) -> Direction:
        """Direction of the problem."""
        return self.problem.direction

    @property
    def failures(self) -> tuple[tuple[str, str], ...]:
        """(algorithm, reason) of those without any measurement."""
        usable = {perf.algo for perf in self.table.usable}
        return tuple(
            {
                perf.algo: perf.error
                for perf in self.table.perfs
                if perf.error is not None and perf.algo not in usable
            }.items()
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
            "problem": problem_to_dict(self.problem),
            "plans": [outcome.to_json() for outcome in self.outcomes],
            "pareto": [
                {
                    "workspace": plan.workspace,
                    "time_ms": plan.time_ms,
                    "parts": len(plan.steps),
                }
                for plan in self.front
            ],
            "excluded": [
                {"algo": algo, "reason": reason} for algo, reason in self.failures
            ],
        }


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Advance(Generic[R]):
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


class ComparisonInterrupted(KeyboardInterrupt):
    """Ctrl-C during a comparison; `comparison` holds the finished layers."""

    def __init__(self, comparison: "Comparison") -> None:
        super().__init__()
        self.comparison = comparison


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
    progress: Callable[[Advance[LayerResult]], None] | None = None,
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
        ComparisonInterrupted: Ctrl-C; carries the finished layers.
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
            run.measure_ahead(layers, share)
        for result in advancing(layers, one, progress):
            done.append(result)
        short = [i for i, result in enumerate(done) if _ran_out_of_time(result)]
        for again, i in enumerate(short):
            done[i] = one(layers[i], len(short) - again)
        results = run.divide(done, total[0]) if total else done
    except KeyboardInterrupt:
        raise ComparisonInterrupted(comparison(done, divided=False)) from None
    return comparison(results, divided=True)


class _TimedComparison:
    """A comparison's clock and its validated plans."""

    def __init__(
        self,
        tuner: Tuner,
        planner: Planner,
        time_limit_s: float | None,
        limits: LimitRange,
    ) -> None:
        self._tuner = tuner
        self._planner = planner
        self._limits = limits
        self._start = time.monotonic()
        self._time_limit_s = time_limit_s
        self._choices: dict[tuple[ConvPlan, ConvPlan | None], ValidatedPlan] = {}

    def measure_ahead(self, layers: Sequence[Layer], share: float) -> None:
        """Measure all layers at once on workers; one layer cannot occupy all of them.

        Layers that get no time here are measured when they are compared.
        """
        seconds = self._seconds_for(share, 1)
        if seconds is not None:
            seconds *= _MEASURING
        problems = [layer.problem for layer in layers]
        with suppress(PlanningError):  # a layer that is too large fails again later
            self._tuner.measure_all(problems, time_limit_s=seconds, limits=self._limits)

    def layer(
        self, layer: Layer, limits: Sequence[Limit], share: float, left: int
    ) -> LayerResult:
        """Measure one layer, then plan and validate it under each limit."""
        seconds = self._seconds_for(share, left)
        ends = None if seconds is None else time.monotonic() + seconds
        try:
            table = self._measure(layer.problem, seconds)
        except PlanningError as e:  # the problem is too large to be divided
            return LayerResult(
                name=layer.name,
                count=layer.count,
                problem=layer.problem,
                table=PerfTable(layer.problem, ()),
                front=(),
                outcomes=tuple(Outcome(limit, None, str(e)) for limit in limits),
            )
        outcomes = []
        for i, limit in enumerate(limits):
            seconds = None if ends is None else ends - time.monotonic()
            if seconds is not None:
                seconds = max(0.0, seconds / (len(limits) - i))
            outcomes.append(self._plan_under(table, limit, seconds))
        most = max((perf.workspace for perf in table.usable), default=0)
        return LayerResult(
            name=layer.name,
            count=layer.count,
            problem=layer.problem,
            table=table,
            front=tuple(pareto_plans(table, most)),
            outcomes=tuple(outcomes),
        )

    def _measure(self, problem: ConvProblem, seconds: float | None) -> PerfTable:
        """Measure within a share of the time.

        One sample is tried first: it shows which algorithms are fast, so that these are
        measured first at the whole mini-batch.
        """
        if seconds is None:
            return self._tuner.measure(problem, limits=self._limits)
        ends = time.monotonic() + seconds * _MEASURING
        self._tuner.measure(problem.with_batch(1), time_limit_s=seconds * _TRYING)
        left = max(0.0, ends - time.monotonic())
        return self._tuner.measure(problem, time_limit_s=left, limits=self._limits)

    def divide(
        self, results: Sequence[LayerResult], limit: Limit
    ) -> Sequence[LayerResult]:
        """Add an outcome per layer: a total divided among all that can run."""
        runnable = [i for i, result in enumerate(results) if result.table.usable]
        outcomes = [Outcome(limit, None, _why_unusable(r.table)) for r in results]
        equal = limit.nbytes // max(1, len(runnable))
        try:
            plans = workspace_division(
                [results[i].table for i in runnable], limit.nbytes
            )
        except PlanningError as e:
            for i in runnable:
                outcomes[i] = Outcome(limit, None, str(e))
        else:
            for done, (i, plan) in enumerate(zip(runnable, plans, strict=True)):
                baseline = self._tuner.undivided(results[i].table, equal)
                seconds = self._seconds_for(1.0, len(runnable) - done)
                outcomes[i] = self._validate(plan, baseline, limit, seconds)
            self._keep_to_total(
                outcomes, dict(zip(runnable, plans, strict=True)), limit
            )
        return [
            replace(result, outcomes=(*result.outcomes, outcome))
            for result, outcome in zip(results, outcomes, strict=True)
        ]

    def _keep_to_total(
        self, outcomes: list[Outcome], plans: dict[int, ConvPlan], limit: Limit
    ) -> None:
        """Withdraw rejections that, together, would exceed the total.

        A rejected plan is replaced by its baseline, which may use an equal share
        although the plan used less. If the sum then exceeds the total, plans are
        restored.
        """
        used = sum(o.choice.plan.workspace for o in outcomes if o.choice is not None)
        for i, plan in plans.items():
            choice = outcomes[i].choice
            if used <= limit.nbytes or choice is None:
                return
            if choice.rejected and choice.plan.workspace > plan.workspace:
                used -= choice.plan.workspace - plan.workspace
                alone = self._tuner.validate(plan, None)
                kept = replace(alone, undivided=choice.undivided)
                outcomes[i] = Outcome(
                    limit, replace(kept, undivided_ms=choice.undivided_ms)
                )

    def _plan_under(
        self, table: PerfTable, limit: Limit, seconds: float | None
    ) -> Outcome:
        if (reason := _why_unusable(table)) is not None:
            return Outcome(limit, None, reason)
        try:
            (plan,) = divided_by(self._planner, [table], limit.nbytes)
        except PlanningError as e:
            least = least_workspace(table)
            if least is None or least <= limit.nbytes:
                return Outcome(limit, None, str(e))
            needs = format_bytes(least, limit.nbytes)
            return Outcome(limit, None, f"nothing fits; the smallest needs {needs}")
        baseline = self._tuner.undivided(table, limit.nbytes)
        return self._validate(plan, baseline, limit, seconds)

    def _validate(
        self,
        plan: ConvPlan,
        baseline: ConvPlan | None,
        limit: Limit,
        seconds: float | None,
    ) -> Outcome:
        """Measure a plan against its undivided baseline, each pair once."""
        choice = self._choices.get((plan, baseline))
        if choice is None:
            # Each is warmed up and run at least once.
            expected_ms = 2 * sum(p.time_ms for p in {plan, baseline} if p is not None)
            if seconds is not None and seconds <= expected_ms / 1e3:
                return Outcome(limit, None, _OUT_OF_TIME)
            try:
                choice = self._tuner.validate(
                    plan, baseline, time_limit_s=inf if seconds is None else seconds
                )
            except MucudnnError as e:
                return Outcome(limit, None, f"not compared: {e}")
            self._choices[plan, baseline] = choice
        return Outcome(limit, choice, _remark(plan.problem, choice, limit))

    def _seconds_for(self, of_limit: float, parts: int) -> float | None:
        """Return the time for the next of `parts` equal parts of the remaining time."""
        if self._time_limit_s is None:
            return None
        ends = self._start + of_limit * self._time_limit_s
        return max(0.0, ends - time.monotonic()) / parts


def _ran_out_of_time(result: LayerResult) -> bool:
    return any(perf.status is RowStatus.LIMITED for perf in result.table.perfs) or any(
        outcome.reason == _OUT_OF_TIME for outcome in result.outcomes
    )


def _why_unusable(table: PerfTable) -> str | None:
    if table.usable:
        return None
    withheld = [perf for perf in table.perfs if perf.status is RowStatus.LIMITED]
    reasons = sorted({str(perf.error) for perf in withheld})
    if len(reasons) > _MOST_REASONS:
        return counted((perf.algo, str(perf.error)) for perf in withheld)
    if reasons:
        return "; ".join(reasons)
    entries = (f"{who}: {why}" for who, why in left_out(table.perfs))
    return "; ".join(entries) or "the backend has no algorithm for it"


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


SCHEMA = 1


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
        """Whether layers are missing for lack of time."""
        return any(why in (_NOT_BEGUN, _NO_TIME) for why, _ in self.missing)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "workspace_limit": self.limit.nbytes,
            "kind": "total" if self.limit.total else "per_kernel",
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
        return tuple(self._summarise(i) for i in range(len(self.limits)))

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Every algorithm with a measurement, in order of appearance."""
        names = (p.algo for layer in self.layers for p in layer.table.usable)
        return tuple(dict.fromkeys(names))

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `json.dumps(…, allow_nan=False)` accepts."""
        return {
            "schema": SCHEMA,
            "backend": self.backend,
            "fingerprint": self.fingerprint,
            "batch_policy": self.batch_policy,
            "planner": self.planner,
            "numerics": self.numerics,
            "interrupted": len(self.layers) < self.asked,
            "layers": [layer.to_json() for layer in self.layers],
            "summary": [entry.to_json() for entry in self.summary],
        }

    def _repr_html_(self) -> str:
        return drawn("comparison", self)

    def _summarise(self, index: int) -> LimitSummary:
        rows = list(self._compared(index))
        speedups = [speedup for speedup, *_ in rows]
        return LimitSummary(
            limit=self.limits[index],
            layers=len(rows),
            geomean=math.exp(sum(map(math.log, speedups)) / len(speedups))
            if speedups
            else None,
            best=max(speedups, default=None),
            worst=min(speedups, default=None),
            undivided_ms=sum(undivided for _, undivided, _ in rows),
            planned_ms=sum(planned for *_, planned in rows),
            missing=self._missing(index),
        )

    def _missing(self, index: int) -> tuple[tuple[str, int], ...]:
        found = Counter(
            why
            for layer in self.layers
            if (why := layer.outcomes[index].missing) is not None
        )
        found[_NOT_BEGUN] += self.asked - len(self.layers)
        return tuple((why, n) for why, n in found.items() if n)

    def _compared(self, index: int) -> Iterator[tuple[float, float, float]]:
        for layer in self.layers:
            outcome = layer.outcomes[index]
            choice, speedup = outcome.choice, outcome.speedup
            if choice is None or choice.undivided_ms is None:
                continue
            if speedup is not None:
                undivided = choice.undivided_ms * layer.count
                yield speedup, undivided, choice.planned_ms * layer.count


def _steps_to_json(plan: ConvPlan) -> list[dict[str, Any]]:
    return [
        {
            "algo": step.algo,
            "batch": step.batch,
            "time_ms": step.time_ms,
            "workspace": step.workspace,
        }
        for step in plan.steps
    ]


def advancing(
    layers: Sequence[Layer],
    work: Callable[[Layer, int], R],
    tell: Callable[[Advance[R]], None] | None,
) -> Iterator[R]:
    """Yield a result per layer, each before its report, so that Ctrl-C keeps it.

    `work` gets a layer and the number of layers left, with this one.
    """
    say = tell or (lambda at: None)
    for i, layer in enumerate(layers):
        begun: Advance[R] = Advance(layer, i, len(layers))
        say(begun)
        result = work(layer, len(layers) - i)
        yield result
        say(replace(begun, result=result))
