"""A step plan with places: what is promised is the size of the arena, not a sum.

Static offsets may need a little more than the most bytes in use at once. Then copies
give way; where that is not enough, the step is scheduled for a little less, so that
state and arena together keep the budget. What is carried from step to step is hardest
to place: at both ends of the step it must lie beside all else that is. So what is tried
then is to carry less.

The last resort is one step that does not depend on the budget: the one that is planned
in the least bytes, in the smallest arena that is found for it. So it is known which
budget will do where one is refused.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import exact_bytes
from mucudnn.notebook import drawn
from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.placement.fit_to_arena import fit_to_arena, shortest
from mucudnn.passes.placement.grow_workspaces import (
    grow_workspaces,
    with_least_workspaces,
)
from mucudnn.passes.placement.layout import Layout, lay_out
from mucudnn.passes.planning.evaluate import (
    Preparer,
    StepPlan,
    plan_residency,
    state_bytes,
)
from mucudnn.passes.planning.plan_step import (
    PLANNED,
    VDNN_DYN,
    plan_of_least,
    plan_step,
)
from mucudnn.passes.residency import ResidencyPolicy
from mucudnn.passes.scheduling import SCHEDULERS, Scheduler
from mucudnn.passes.scheduling.intervals import short_of

__all__ = ["PlacedStep", "place_step"]

_SEARCHES = 4
_CUTS = (0.0, 0.01, 0.02, 0.04, 0.08)
"""Shares of the budget that a step may be scheduled below it, to find places."""

_MANY = 5000
"""Stays from which on the first places that are found are good enough."""

_FAR = 0.02
"""The share below which the first places that are found are good enough."""

_FRAGMENTED = 0.03
"""Share of what is in use at once that an arena may be larger, before less is tried."""

_UNUSED = 0.75
"""Share of the bytes that are left over, that a schedule may count on beside all."""

_HARDLY = 0.005
"""Share of a step's time for which less waste is worth having."""

_WIDER = (0.0, 0.0025, 0.01, 0.04)
"""Shares that the arena of the last resort may be larger than what is in use at once.
"""

_TOLERATED = 0.02
"""What places may cost of a step's time before others are looked for."""


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """A planned step, and where everything is.

    Attributes:
        plan: What is run.
        layout: Offsets in an arena.
        state_bytes: Parameters and state that never leave, beside the arena.
    """

    plan: StepPlan
    layout: Layout
    state_bytes: int

    def _repr_html_(self) -> str:
        """For notebooks."""
        return drawn("placed_step", self)

    @property
    def nbytes(self) -> int:
        """Device memory of the step, all of it."""
        return self.layout.nbytes + self.state_bytes


def place_step(
    graph: Graph,
    profile: Profile,
    *,
    budget: float,
    policy: str | ResidencyPolicy = PLANNED,
    scheduler: str | Scheduler | None = None,
    convolutions: str = "dynamic",
    plans: Mapping[str, ConvPlan] | None = None,
    hosted: frozenset[str] | None = None,
    plan: StepPlan | None = None,
) -> PlacedStep:
    """Plan a step such that its arena and its state fit a budget.

    Args:
        graph: A training graph that nothing has made in-place yet.
        profile: Of it.
        budget: Bytes for everything.
        policy: Decides what leaves, and what is computed again; a name or a function.
        scheduler: Times the copies; likewise.
        convolutions: How convolutions get their workspace.
        plans: Convolution node -> plan, if they are fixed.
        hosted: Parameters and state whose home is the host, if that is decided.
        plan: Of this step within this budget, if it is planned already.

    Raises:
        PlanningError: It cannot fit; says how many bytes short, and which budget will
            do.
    """
    asked = _Asked(
        graph, profile, budget, policy, scheduler, convolutions, plans, hosted
    )
    if plan is None:
        try:
            plan = asked.search(budget)
        except PlanningError as e:
            raise asked.advised(e) from None
    if math.isinf(budget):
        return PlacedStep(plan, lay_out(plan.schedule), asked.resident(plan))
    target = budget
    for _ in range(_SEARCHES):
        found = asked.settled(plan) or asked.packed(plan)
        if found.nbytes <= budget:
            return found
        target = min(target, plan.peak_bytes) - (found.nbytes - budget)
        try:
            plan = asked.search(target)
        except PlanningError:
            break
    others = (asked.place(other) for other in asked.carrying_less(plan))
    fitting = [other for other in others if other is not None]
    if fitting:
        return min(fitting, key=_step_ms)
    smallest = asked.smallest()
    if smallest.nbytes <= budget:
        return asked.grown(smallest.plan, smallest.layout)
    raise PlanningError(
        f"places for {exact_bytes(plan.peak_bytes)} could not be found within "
        f"{exact_bytes(int(budget))}; {exact_bytes(smallest.nbytes)} will do",
        short_by=smallest.nbytes - int(budget),
        least_bytes=smallest.nbytes,
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What was asked for, and the ways to it; the fields are those of `place_step`."""

    graph: Graph
    profile: Profile
    budget: float
    policy: str | ResidencyPolicy
    scheduler: str | Scheduler | None
    convolutions: str
    plans: Mapping[str, ConvPlan] | None
    hosted: frozenset[str] | None

    def search(self, target: float) -> StepPlan:
        """Plan for a budget, without places.

        Raises:
            PlanningError: It cannot fit.
        """
        return plan_step(
            self.graph,
            self.profile,
            budget=target,
            policy=self.policy,
            scheduler=self.scheduler,
            convolutions=self.convolutions,
            plans=self.plans,
            hosted=self.hosted,
        )

    def smallest(self) -> PlacedStep:
        """The step that is planned in the least bytes, in the least that it is placed.

        It does not depend on the budget. Of all schedulers the one that lets stays be
        shortest finds places most easily.

        Raises:
            PlanningError: No budget works, however large.
        """
        tried: list[PlacedStep] = []
        for scheduler in ("on_demand", None) if self.scheduler is None else (None,):
            found = plan_of_least(
                self.graph,
                self.profile,
                policy=self.policy,
                scheduler=scheduler or self.scheduler,
                convolutions=self.convolutions,
                plans=self.plans,
                hosted=self.hosted,
            )
            tried.append(self.squeezed(self.bare(found)))
            if tried[-1].nbytes <= found.budget:
                break
        return min(tried, key=lambda placed: placed.nbytes)

    def squeezed(self, plan: StepPlan) -> PlacedStep:
        """A step in the smallest arena that is found for it."""
        resident = self.resident(plan)
        short = shortest(plan, self.profile)
        packed = [PlacedStep(p, lay_out(p.schedule), resident) for p in (short, plan)]
        best = min(packed, key=lambda placed: placed.nbytes)
        for share in _WIDER:
            arena = int((1 + share) * (short.peak_bytes - resident))
            arena -= arena % ALIGNMENT
            if best.layout.nbytes <= arena:
                break
            known = fit_to_arena(plan, self.profile, arena)
            if known is not None:
                return PlacedStep(*known, resident)
        return best

    def advised(self, error: PlanningError) -> PlanningError:
        """What planning refused, with a budget that will do for places as well."""
        if error.least_bytes is None or error.node is None:
            return error
        nbytes = self.smallest().nbytes
        if nbytes <= error.least_bytes:
            return error
        remedy = f"with places for all of it {exact_bytes(nbytes)} will do"
        words = short_of(error.node, error.least_bytes, self.budget, remedy)
        return PlanningError(
            str(words),
            node=error.node,
            short_by=nbytes - int(self.budget),
            least_bytes=nbytes,
        )

    def settled(self, plan: StepPlan) -> PlacedStep | None:
        """The fastest step with a plan's residencies that finds places, if any does.

        It is scheduled for a little less, time and again, until what the places cost is
        little; and for a little more, where stays gave way so much that bytes are left
        over.
        """
        tolerable = (1 + _TOLERATED) * plan.prediction.step_ms
        fitting: list[PlacedStep] = []
        for cut in _CUTS:
            tried = [plan] if cut == 0.0 else list(self.replanned(plan, cut))
            fitting += (p for p in map(self.place, tried) if p is not None)
            enough = any(_step_ms(placed) <= tolerable for placed in fitting)
            hurried = cut >= _FAR or len(plan.stays) > _MANY
            if enough or not tried or (fitting and hurried):
                break
        if not fitting:
            return None
        best = _preferred(fitting)
        if best.layout.fragmentation > _FRAGMENTED:
            more = self.replanned(plan, -_UNUSED * best.layout.fragmentation)
            others = (*map(self.place, more), self.tightened(best))
            fitting += (p for p in others if p is not None)
        return _preferred(fitting)

    def replanned(self, plan: StepPlan, cut: float) -> Iterator[StepPlan]:
        """A plan's residencies scheduled for a share less than the budget."""
        schedulers: list[str | Scheduler] = [self.scheduler or plan.scheduler]
        if self.scheduler is None and self.policy == PLANNED:
            schedulers = list(dict.fromkeys((plan.scheduler, "timed")))
        for name in schedulers:
            if self.policy != VDNN_DYN:
                with suppress(PlanningError):
                    yield self.schedule(
                        plan, (1 - cut) * self.budget, name, self.hosted
                    )

    def carrying_less(self, plan: StepPlan) -> Iterator[StepPlan]:
        """A plan's residencies with parameters and state that leave in every step.

        Only those that do already, or all of them.
        """
        if self.scheduler is not None:
            return
        everything = frozenset(s.name for s in self.graph.with_role(*PERSISTENT))
        these = frozenset(plan.schedule.hosted)
        homes = (these, everything) if self.hosted is None else (self.hosted,)
        for home, name in itertools.product(homes, SCHEDULERS.table):
            with suppress(PlanningError):
                yield self.schedule(plan, self.budget, name, home)

    def schedule(
        self,
        plan: StepPlan,
        target: float,
        scheduler: str | Scheduler,
        hosted: frozenset[str] | None,
    ) -> StepPlan:
        """A plan's residencies scheduled anew.

        Raises:
            PlanningError: They cannot fit.
        """
        return plan_residency(
            self.graph,
            self.profile,
            plan.residency,
            budget=target,
            scheduler=scheduler,
            convolutions="fixed" if self.plans is not None else self.convolutions,
            plans=self.plans,
            policy=plan.policy,
            preparer=Preparer(self.graph, self.profile, hosted),
        )

    def place(self, plan: StepPlan) -> PlacedStep | None:
        """Places within the budget, workspaces in the free gaps if they may be."""
        resident = self.resident(plan)
        arena = int(self.budget) - resident
        found = fit_to_arena(self.bare(plan), self.profile, arena)
        return None if found is None else self.grown(*found)

    def tightened(self, placed: PlacedStep) -> PlacedStep | None:
        """The same step in an arena that is hardly larger than what is in use."""
        resident = placed.state_bytes
        arena = int((1 + _FRAGMENTED) * placed.layout.live_peak)
        found = fit_to_arena(placed.plan, self.profile, arena)
        return None if found is None else PlacedStep(*found, resident)

    def packed(self, plan: StepPlan) -> PlacedStep:
        """Places as low as they are found with nothing giving way."""
        bare = self.bare(plan)
        layout = lay_out(bare.schedule)
        placed = PlacedStep(bare, layout, self.resident(plan))
        return placed if placed.nbytes > self.budget else self.grown(bare, layout)

    def bare(self, plan: StepPlan) -> StepPlan:
        """The step with as little workspace as may be chosen."""
        return with_least_workspaces(plan, self.profile) if self.grows else plan

    def grown(self, plan: StepPlan, layout: Layout) -> PlacedStep:
        """A step that has places, with workspaces in the free gaps if they may be."""
        resident = self.resident(plan)
        if self.grows:
            arena = int(self.budget) - resident
            plan, layout = grow_workspaces(plan, layout, self.profile, arena)
        return PlacedStep(plan, layout, resident)

    @property
    def grows(self) -> bool:
        """Whether workspaces take what is free."""
        return self.convolutions == "dynamic" and self.policy != VDNN_DYN

    @staticmethod
    def resident(plan: StepPlan) -> int:
        """Bytes of parameters and state that never leave."""
        return state_bytes(plan.schedule.graph, plan.schedule.resident)


def _preferred(placed: Sequence[PlacedStep]) -> PlacedStep:
    """The fastest, or one that is hardly slower and wastes less."""
    fastest = min(map(_step_ms, placed))
    good = [p for p in placed if _step_ms(p) <= (1 + _HARDLY) * fastest]
    return min(good, key=lambda p: p.layout.fragmentation)


def _step_ms(placed: PlacedStep) -> float:
    return placed.plan.prediction.step_ms
