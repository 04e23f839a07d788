"""Try techniques on a step under a budget: plans, lower bound, placement, limits.

Ctrl-C ends the trials with the results so far.
"""

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from mucudnn.errors import PlanningError
from mucudnn.ir.devices import get_device
from mucudnn.ir.tiers import MemoryTier
from mucudnn.passes.planning.bound.lower_bound import lower_bound
from mucudnn.passes.planning.comparison import (
    Technique,
    best_technique,
    largest_batch_within,
    try_technique,
    unbounded,
)
from mucudnn.passes.planning.described_step import DescribedStep
from mucudnn.passes.planning.place_step import PlacedStep, place_step
from mucudnn.passes.planning.plan_step import minimum_budget
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.splitting.choice import Splitting, plan_splitting
from mucudnn.passes.planning.splitting.cutting import WHOLE, Split, cuttings
from mucudnn.passes.planning.tiered_step import place_tiered_step
from mucudnn.passes.registry import by_name, name_of
from mucudnn.passes.residency import PLANNED, ResidencyPolicy
from mucudnn.passes.scheduling import Scheduler
from mucudnn.studies.costed_step import CostedStep
from mucudnn.studies.memory_findings import MemoryStudy, StepSpec
from mucudnn.studies.step_costs import CPU

__all__ = ["IN_PARTS", "MemoryTrials"]

IN_PARTS = "planned, in parts"
"""Technique that also decides whether a step runs in slices of its batch."""

_SHARES = (1.0, 0.7, 0.5, 0.3)
"""Budgets of the curve, as shares of the unbounded peak; the minimum is added."""


class MemoryTrials:
    """The trials of one step by every requested policy and scheduler.

    Without schedulers, each policy uses its own. Without a budget, it is the device's
    memory. Without tiers, host memory is unlimited.
    """

    def __init__(
        self,
        spec: StepSpec | DescribedStep,
        costed: CostedStep,
        policies: Sequence[str | ResidencyPolicy],
        schedulers: Sequence[str | Scheduler],
        budget: int | None,
        say: Callable[[str, int, int], None],
        split: Split,
        tiers: Sequence[MemoryTier] = (),
    ) -> None:
        self._spec, self._costed, self._split = spec, costed, split
        self._tiers = tiers
        self._splitting: Splitting | None = None
        self._least_in_parts: int | None = None
        self._policies = by_name("policies", policies)
        self._schedulers = by_name("schedulers", schedulers)
        self._say = say
        self._step = costed.step
        say("the step without a budget", 0, 1)
        self._unbounded = unbounded(costed.step.graph, costed.step.profile)
        self._budget = _device_memory(spec.device) if budget is None else budget
        self._minimum: int | None = None
        self._techniques: list[Technique] = []
        self._requests_of: dict[tuple[str, str], StepRequest] = {}
        self._placed: PlacedStep | None = None
        self._unplaced = ""
        self._least_ms: dict[int, float] = {}
        self._loose: dict[int, str] = {}
        self._curve: list[Technique] = []
        self._max_batch: dict[str, int] = {}
        self._min_budget: dict[str, int] = {}

    def run(self, *, curve: bool, max_batch: bool, min_budget: bool) -> MemoryStudy:
        """Run all trials; Ctrl-C ends them with the results so far."""
        interrupted = False
        try:
            self._try_techniques()
            if self._split != WHOLE:
                self._say(IN_PARTS, 0, 1)
                technique, self._splitting = self._in_parts(self._budget)
                self._techniques.append(technique)
            self._bound(self._budget)
            self._place_best()
            self._say("the least budget of any policy", 0, 1)
            self._minimum = self._least_of_all()
            if min_budget:
                self._find_min_budgets()
            if max_batch:
                self._find_max_batches()
            if curve:
                self._try_budgets()
        except KeyboardInterrupt:
            interrupted = True
        return MemoryStudy(
            spec=self._spec,
            image=self._costed.image,
            parameters=self._costed.parameters,
            budget=self._budget,
            unbounded=self._unbounded,
            minimum=self._minimum,
            figures=self._costed.figures,
            convolutions=self._costed.convolutions,
            techniques=tuple(self._techniques),
            placed=self._placed,
            unplaced=self._unplaced,
            least_ms=self._least_ms,
            loose=self._loose,
            curve=tuple(self._curve),
            max_batch=self._max_batch,
            min_budget=self._min_budget,
            splitting=self._splitting,
            interrupted=interrupted,
        )

    def _requests(self, step: StepRequest, policy: str) -> list[StepRequest]:
        """Return a request per scheduler, or one with the policy's own."""
        asked = replace(step, policy=self._policies[policy])
        return [asked.scheduled(s) for s in self._schedulers.values()] or [asked]

    def _try_techniques(self) -> None:
        step = self._step.within(self._budget)
        asked = [r for policy in self._policies for r in self._requests(step, policy)]
        for i, request in enumerate(asked):
            self._say(_describe_request(request), i, len(asked))
            found = try_technique(request)
            self._techniques.append(found)
            self._requests_of[found.policy, found.scheduler] = request

    def _bound(self, budget: int) -> None:
        """Find the lower bound on the step time within a budget."""
        if budget not in self._least_ms:
            self._say("the bound of any plan", 0, 1)
            found = lower_bound(self._step.within(budget))
            if math.isfinite(found.step_ms):
                self._least_ms[budget] = found.step_ms
            if found.reason:
                self._loose[budget] = found.reason

    def _in_parts(self, budget: int) -> tuple[Technique, Splitting | None]:
        """Plan the step in parts, or whole if that is faster."""
        step = self._costed.in_parts
        assert step is not None, "study_memory has refused what cannot be split"
        try:
            found = plan_splitting(step(budget), self._split)
        except PlanningError as e:
            self._least_in_parts = e.least_bytes or self._least_in_parts
            return Technique(IN_PARTS, "any", budget, None, e.least_bytes), None
        plan = found.chosen.plan
        name = "any" if plan is None else plan.scheduler
        return Technique(IN_PARTS, name, budget, plan), found

    def _least_of_parts(self, found: Splitting) -> int:
        """Return the least budget of all splits, untried ones included."""
        assert self._costed.in_parts is not None
        step = self._costed.in_parts(self._budget)
        least = {c.cutting: c.least_bytes for c in found.tried}
        for cutting in cuttings(step.graph, self._split):
            if cutting not in least:
                self._say(f"the least budget of {cutting}", 0, 1)
                graph = step.in_parts(cutting)
                costs = step.costs(graph)
                asked = None if costs is None else step.asked(graph, costs)
                least[cutting] = None if asked is None else minimum_budget(asked)
        return min(nbytes for nbytes in least.values() if nbytes is not None)

    def _place_best(self) -> None:
        best = best_technique(self._techniques)
        if best is None:
            return
        self._say("places in the arena", 0, 1)
        if best.policy == IN_PARTS and self._splitting is not None:
            step = self._step.within(self._budget)
            request = self._splitting.chosen.request or step
        else:
            request = self._requests_of[best.policy, best.scheduler]
        try:
            if self._tiers:
                self._placed = place_tiered_step(request, self._tiers)
            else:
                self._placed = place_step(request, best.plan)
        except PlanningError as e:
            self._unplaced = str(e)

    def _try_budgets(self) -> None:
        most = self._unbounded.peak_bytes
        shares = [int(share * most) for share in _SHARES]
        least = self._minimum or 0
        budgets = sorted({*(b for b in shares if b > least), least}, reverse=True)
        pairs = [(budget, policy) for budget in budgets for policy in self._policies]
        for i, (budget, policy) in enumerate(pairs):
            self._say(f"{policy} within {budget / most:.0%}", i, len(pairs))
            request, *_ = self._requests(self._step.within(budget), policy)
            self._curve.append(try_technique(request))
            self._bound(budget)
        for budget in budgets if self._split != WHOLE else ():
            self._say(f"{IN_PARTS} within {budget / most:.0%}", 0, 1)
            self._curve.append(self._in_parts(budget)[0])

    def _least(self, step: StepRequest, policy: str) -> int:
        """Return the least budget of a policy with any of its schedulers."""
        return min(map(minimum_budget, self._requests(step, policy)))

    def _least_of_all(self) -> int:
        """Return the least budget; the planner's own search needs the least."""
        ours = (PLANNED,) if PLANNED in self._policies else self._policies
        whole = min(self._least(self._step, policy) for policy in ours)
        if self._splitting is not None:
            self._least_in_parts = self._least_of_parts(self._splitting)
        return min(whole, self._least_in_parts or whole)

    def _find_min_budgets(self) -> None:
        for i, policy in enumerate(self._policies):
            self._say(f"least budget of {policy}", i, len(self._policies))
            self._min_budget[policy] = self._least(self._step, policy)
        if self._least_in_parts is not None:
            self._min_budget[IN_PARTS] = self._least_in_parts

    def _find_max_batches(self) -> None:
        step = functools.cache(self._costed.at)

        @functools.cache
        def least(batch: int, policy: str) -> int:
            return self._least(step(batch), policy)

        for i, policy in enumerate(self._policies):

            def say(batch: int, policy: str = policy, i: int = i) -> None:
                self._say(f"{policy} at batch {batch}", i, len(self._policies))

            self._max_batch[policy] = largest_batch_within(
                functools.partial(least, policy=policy),
                self._budget,
                start=self._spec.batch,
                progress=say,
            )


def _describe_request(request: StepRequest) -> str:
    free = request.policy == PLANNED and request.scheduler is None
    return f"{name_of(request.policy)}, " + (
        "any scheduler" if free else name_of(request.timing)
    )


def _device_memory(device: str) -> int:
    if device != CPU:
        return int(get_device(device).memory.value)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
