"""Evaluation of residencies one after another, keeping the best plan."""

import math
from collections.abc import Mapping
from copy import copy

from mucudnn.errors import PlanningError
from mucudnn.passes.planning.request import (
    StepRequest,
    UnsimulatedPlan,
    schedule_residency,
)
from mucudnn.passes.residency import Residency
from mucudnn.passes.scheduling.step_plan import StepPlan

_ROUNDED = 1 - 1e-9


def closer(one: PlanningError, other: PlanningError) -> PlanningError:
    """Return the error with the smaller sufficient budget."""
    return min(one, other, key=lambda e: e.least_bytes or math.inf)


class SearchState:
    """The best plan so far, and the number of trials left.

    With `by_nodes` the limit counts scheduled nodes and offloaded parameters and state
    instead of trials.
    """

    def __init__(
        self, request: StepRequest, left: int, *, by_nodes: bool = False
    ) -> None:
        self._request = request
        self._left = left
        self._by_nodes = by_nodes
        self._best: UnsimulatedPlan | StepPlan | None = None
        self._step_ms = math.inf
        self._error: PlanningError | None = None
        self._tried: set[frozenset[tuple[str, Residency]]] = set()

    def exhausted(self) -> bool:
        """Return whether the limit is reached."""
        return self._left <= 0

    def allow(self, more: int) -> None:
        """Raise the limit."""
        self._left += more

    @property
    def step_ms(self) -> float:
        """Time of the best plan; infinity without one."""
        return self._step_ms

    @property
    def found(self) -> bool:
        """True if there is a plan that fits."""
        return self._best is not None

    @property
    def residency(self) -> Mapping[str, Residency]:
        """Residencies of the best plan; empty without one."""
        return {} if self._best is None else self._best.residency

    @property
    def plan(self) -> StepPlan:
        """The best plan, emitted on first access; without one, the closest error."""
        if self._best is None:
            raise copy(self._error or PlanningError("nothing was tried"))
        if isinstance(self._best, UnsimulatedPlan):
            self._best = self._best.plan()
        return self._best

    def consider(
        self, residency: Mapping[str, Residency], *, free: bool = False
    ) -> bool:
        """Try residencies; return whether they are better than all before."""
        key = frozenset(residency.items())
        if key in self._tried or (self.exhausted() and not free):
            return False
        self._tried.add(key)
        too_much = self._too_much_compute(residency)
        self._left -= 0 if free else self._cost(residency, too_much)
        if too_much:
            return False
        try:
            found = schedule_residency(self._request, residency)
        except PlanningError as e:
            error = copy(e)  # without a traceback, which would hold callers' locals
            self._error = closer(self._error or error, error)
            return False
        step_ms = found.step_ms(self.step_ms)
        if step_ms >= self.step_ms:
            return False
        self._best, self._step_ms = found, step_ms
        return True

    def _cost(self, residency: Mapping[str, Residency], too_much: bool) -> int:
        if not self._by_nodes:
            return 1
        if too_much:
            return len(self._request.nodes(residency))
        ready = self._request.rewritten(residency)
        hosted = sum(ready.uses[name].persistent for name in ready.swaps)
        return len(ready.graph.nodes) + hosted

    def _too_much_compute(self, residency: Mapping[str, Residency]) -> bool:
        """Return whether compute alone takes as long as the best plan."""
        if self._best is None or self._request.convolutions != "dynamic":
            return False
        return self._request.compute_ms(residency) * _ROUNDED >= self.step_ms

    def offer(self, plan: StepPlan) -> bool:
        """Offer a plan; return whether it is better than all before."""
        if plan.prediction.step_ms >= self.step_ms:
            return False
        self._best, self._step_ms = plan, plan.prediction.step_ms
        return True

    def take(self, found: UnsimulatedPlan) -> bool:
        """Take a scheduled plan; return whether it is better than all before."""
        step_ms = found.step_ms(self.step_ms)
        if step_ms >= self.step_ms:
            return False
        self._best, self._step_ms = found, step_ms
        return True

    def take_over(self, other: "SearchState") -> bool:
        """Adopt the best plan of others; return whether it is better."""
        if other.step_ms >= self.step_ms:
            return False
        self._best, self._step_ms = other._best, other._step_ms
        return True
