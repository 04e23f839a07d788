"""Results of comparing planned with undivided convolutions."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mucudnn.codecs.values import problem_to_dict
from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction, PerfTable
from mucudnn.notebook import drawn
from mucudnn.passes.convolution.explain import left_out
from mucudnn.runtime.tuning.tuner import Choice

__all__ = ["Comparison", "LayerResult", "Limit", "LimitSummary", "Outcome"]

SCHEMA = 1

_NOT_BEGUN = "interrupted"
_NO_TIME = "time limit"
_NO_MEMORY = "memory limit"
_NOTHING_FITS = "nothing fits"
_NO_RIVAL = "no undivided call fits"
_OTHER = "no plan"


@dataclass(frozen=True, slots=True)
class Limit:
    """Workspace bytes for each kernel or (`total`) for all together."""

    nbytes: int
    total: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a layer under a limit: a choice, or the reason for none."""

    limit: Limit
    choice: Choice | None
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
