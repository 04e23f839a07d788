"""What became of plans that were run whole, in turn with their undivided rivals.

Kernels that follow one another are not always as fast as each by itself, so a division
is run once before it is trusted. That is a measurement like any other: a cache
remembers it, and a recording carries it to machines that cannot run the plans.
"""

import math
from dataclasses import dataclass

from mucudnn.backends.base import Backend
from mucudnn.backends.recorded import recording_of
from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.measurement import Verdict, signature
from mucudnn.runtime.database.cache import BenchmarkCache

__all__ = ["REJECTED", "Choice", "Verdicts", "decided"]

REJECTED = 1.0
"""Ratio of a plan that did not win by more than the noise."""


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


def decided(
    plan: ConvPlan,
    undivided: ConvPlan | None,
    planned_ms: float,
    undivided_ms: float | None,
    *,
    won: bool = True,
) -> Choice:
    """The choice between two plans whose times are known; `won` says which it is."""
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


class Verdicts:
    """Ratios of a plan's time to its rival's on one device; see `Verdict.ratio`.

    Args:
        backend: Which device.
        cache: What was found out before, and where the rest is remembered.
    """

    def __init__(self, backend: Backend, cache: BenchmarkCache) -> None:
        self._fingerprint = backend.device.fingerprint
        self._recording = recording_of(backend)
        self._cache = cache
        self._used: dict[tuple[ConvProblem, str], float] = {}

    @property
    def used(self) -> tuple[Verdict, ...]:
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

    def recorded(self, plan: ConvPlan, rival: ConvPlan) -> float | None:
        """What the machine found that the backend stands for, if it stands for one."""
        if self._recording is None:
            return None
        return self._note(
            plan, rival, self._recording.verdict(plan.problem, signature(plan, rival))
        )

    def known(self, plan: ConvPlan, rival: ConvPlan) -> float | None:
        """What a recording or the cache knows."""
        ratio = self.recorded(plan, rival)
        if ratio is not None:
            return ratio
        plans = signature(plan, rival)
        found = self._cache.get_verdict(self._fingerprint, plan.problem, plans)
        return self._note(plan, rival, found)

    def keep(
        self, plan: ConvPlan, rival: ConvPlan, ratio: float, *, remember: bool
    ) -> None:
        """A verdict was reached; `remember` it for other runs, too.

        Where a recording is silent nothing was run, and so nothing is kept.
        """
        if self._recording is not None:
            return
        self._note(plan, rival, ratio)
        if remember:
            plans = signature(plan, rival)
            self._cache.put_verdict(self._fingerprint, plan.problem, plans, ratio)

    def _note(
        self, plan: ConvPlan, rival: ConvPlan, ratio: float | None
    ) -> float | None:
        if ratio is not None:
            self._used[plan.problem, signature(plan, rival)] = ratio
        return ratio
