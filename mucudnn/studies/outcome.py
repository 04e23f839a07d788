"""What a comparison of planned with undivided convolutions found, as frozen values."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
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
    """Bytes of workspace, for each kernel or (`total`) for all of them together."""

    nbytes: int
    total: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one layer under one limit: a choice, or the reason for none."""

    limit: Limit
    choice: Choice | None
    reason: str | None = None

    @property
    def speedup(self) -> float | None:
        """Undivided over planned time; None where one of them is missing, or is 0."""
        found = None if self.choice is None else self.choice.speedup
        return found if found is not None and 0 < found < math.inf else None

    @property
    def missing(self) -> str | None:
        """Why there is no speed-up, in two words or three; None where there is one."""
        if self.choice is not None:
            return None if self.choice.speedup is not None else _NO_RIVAL
        reason = self.reason or ""
        known = (_NO_TIME, _NO_MEMORY, _NOTHING_FITS)
        return next((words for words in known if words in reason), _OTHER)

    def to_json(self) -> dict[str, Any]:
        """Plain values; what does not exist is null."""
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
            "undivided": None if choice.undivided is None else _steps(choice.undivided),
            "steps": _steps(plan),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class LayerResult:
    """One direction of one layer.

    Attributes:
        name: Of the layer.
        count: How often its network contains it.
        problem: What was measured.
        table: All measurements, failed ones included.
        front: Divisions no other beats in both time and workspace.
        outcomes: One a limit.
    """

    name: str
    count: int
    problem: ConvProblem
    table: PerfTable
    front: tuple[ConvPlan, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def direction(self) -> Direction:
        """Which of the three kernels."""
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
        """The failures for people: many alike are one entry that counts them."""
        usable = {perf.algo for perf in self.table.usable}
        return left_out(p for p in self.table.perfs if p.algo not in usable)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
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
    """All layers under one limit; only those that have a speed-up count.

    Attributes:
        limit: The limit.
        layers: How many layers have both a planned and an undivided time.
        geomean: Geometric mean of their speed-ups.
        best: The largest.
        worst: The smallest.
        undivided_ms: Their undivided times, each as often as its layer occurs.
        planned_ms: Likewise, planned.
        missing: (Why, how many) of the layers that have none.
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
        """Whether there would be more with more time: a mean of these says little."""
        return any(why in (_NOT_BEGUN, _NO_TIME) for why, _ in self.missing)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
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
    """Planned against undivided convolutions: layer by layer, limit by limit.

    Attributes:
        backend: Name of the backend.
        fingerprint: Its device and libraries.
        batch_policy: Which micro-batch sizes were candidates.
        planner: What divided the mini-batches.
        numerics: Which ways of computing were accepted.
        limits: Every limit, in the order of `LayerResult.outcomes`.
        layers: What is done.
        asked: How many were to be done.
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
        """One entry a limit."""
        return tuple(self._summarise(i) for i in range(len(self.limits)))

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Every algorithm with a measurement, in order of appearance."""
        names = (p.algo for layer in self.layers for p in layer.table.usable)
        return tuple(dict.fromkeys(names))

    def to_json(self) -> dict[str, Any]:
        """Plain values that `json.dumps(…, allow_nan=False)` accepts."""
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
        """For notebooks."""
        return drawn("comparison", self)

    def _summarise(self, index: int) -> LimitSummary:
        rows = list(self._compared(index))
        speedups = [speedup for speedup, *_ in rows]
        return LimitSummary(
            limit=self.limits[index],
            layers=len(rows),
            geomean=_geomean(speedups),
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


def _geomean(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return math.exp(sum(map(math.log, values)) / len(values))


def _steps(plan: ConvPlan) -> list[dict[str, Any]]:
    return [
        {
            "algo": step.algo,
            "batch": step.batch,
            "time_ms": step.time_ms,
            "workspace": step.workspace,
        }
        for step in plan.steps
    ]
