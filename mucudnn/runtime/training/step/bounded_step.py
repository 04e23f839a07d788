"""A step within a budget: measured, planned by that, and placed.

It is planned a few times, each time with the convolution plans it chose before
measured. Where the step is then hardly slower than it seemed, what was decided about
tensors stays, as does what was found when it was cut: another search would take most of
the time. What cannot be measured or does not fit says what will do for all of it.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mucudnn.errors import OutOfMemoryError, PlanningError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT, Graph, Phase, Role
from mucudnn.ir.placement import STATIC
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import exact_bytes
from mucudnn.ir.tiers import MemoryTier, TierPlacement
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.liveness import rounded
from mucudnn.passes.planning.bound.lower_bound import lower_bound
from mucudnn.passes.planning.evaluate import plan_residency
from mucudnn.passes.planning.place_step import PlacedStep, place_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.tiered_step import place_tiered_step
from mucudnn.passes.residency import PLANNED
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.profiling.mapping_costs import mapping_costs
from mucudnn.runtime.profiling.profiler import OnNode, profile, refine
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.step.sizes import measuring_bytes, sketch
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["BoundedStep"]

_ROUNDS = 4
"""How often a step is planned, each time with the plans it chose before measured."""

_HARDLY_SLOWER = 1.1
"""Times the predicted step, up to which better known times change no residency."""


@dataclass(frozen=True, slots=True)
class BoundedStep:
    """A graph to be placed within a budget.

    Attributes:
        tuner: Measures and plans its convolutions.
        graph: In the order that it runs in.
        budget: Of it and of what lies beside it.
        beside: Bytes of state that it does not touch and that stays on the device.
        hosted: What of the state leaves, where another graph has decided that.
        plans: Node -> plan, where these are fixed.
        placement: Of `PLACEMENTS`.
        tiers: Memory off the device; none means the host's, without end.
        state: Where the state lies that leaves, where another graph has decided that.
    """

    tuner: Tuner
    graph: Graph
    budget: MemoryBudget
    beside: int
    hosted: frozenset[str] | None
    plans: dict[str, ConvPlan] | None
    placement: str
    tiers: Sequence[MemoryTier]
    state: TierPlacement | None

    def placed(self, progress: OnNode | None) -> PlacedStep:
        """Measure, plan and place.

        Raises:
            PlanningError: It cannot fit, and says how many bytes short.
            OutOfMemoryError: There is no room to measure.
            UnsupportedError: Memory is to be mapped and cannot be.
        """
        request = self._request(self._measured(progress))
        try:
            return self._refined(request)
        except PlanningError as e:
            advised = self._advised(e)
            if advised is e:
                raise
            raise advised from e

    @property
    def _nbytes(self) -> int:
        """Its bytes: whole chunks where an arena is shared that is mapped."""
        nbytes = self.budget.nbytes - self.beside
        mapper = self.tuner.backend.mapper
        if self.hosted is None or self.placement == STATIC or mapper is None:
            return nbytes
        specs = self.graph.with_role(*PERSISTENT)
        stays = sum(rounded(s.nbytes) for s in specs if s.name not in self.hosted)
        return nbytes - max(0, nbytes - stays) % mapper.chunk_bytes

    def _request(self, profile: Profile) -> StepRequest:
        """What is asked of a step; where there is no backward pass, it is paged."""
        budget = self.budget
        trains = any(node.phase is Phase.BACKWARD for node in self.graph.nodes)
        return StepRequest(
            self.graph,
            profile,
            budget=max(0, self._nbytes),
            policy=budget.policy if trains else "paging",
            scheduler=budget.scheduler if trains else None,
            convolutions=budget.convolutions,
            plans=self.plans,
            hosted=self.hosted,
            placement=STATIC if profile.chunks is None else self.placement,
        )

    def _measured(self, progress: OnNode | None) -> Profile:
        """What the graph costs, and mapping the memory of it where that is asked.

        Raises:
            PlanningError: A convolution has no algorithm within the limits.
            OutOfMemoryError: There is no room to measure.
            UnsupportedError: Memory is to be mapped and cannot be.
        """
        if self.placement == STATIC:
            return self._costs(progress)
        chunks = mapping_costs(self.tuner.backend, self._nbytes)
        return replace(self._costs(progress), chunks=chunks)

    def _costs(self, progress: OnNode | None) -> Profile:
        """The profile that is given, if it is of this graph, or a new one.

        Raises:
            PlanningError: A convolution has no algorithm within the limits.
            OutOfMemoryError: There is no room to measure.
        """
        given = self.budget.measured
        if given is not None and self._is_of(given):
            return given
        final = in_place(self.graph)
        try:
            return profile(self.tuner, final, memory=self._nbytes, progress=progress)
        except (OutOfMemoryError, PlanningError) as e:
            least = max(self._measuring_bytes(), self._least_by_sizes()) + self.beside
            raise type(e)(f"{e}; for all of the step {_will_do(least)}") from e

    def _refined(self, request: StepRequest) -> PlacedStep:
        """A placed step, planned again with the plans it chose measured in between.

        Raises:
            PlanningError: It cannot fit.
        """
        placed = self._first(request)
        times: dict[ConvPlan, float] = {}
        for _ in range(0 if self.plans is not None else _ROUNDS - 1):
            chosen = placed.plans.values()
            if all(plan in times for plan in chosen):
                break
            better = refine(
                self.tuner, request.profile, chosen, times, memory=self._nbytes
            )
            request = replace(request, profile=better)
            try:
                placed = self._again(request, placed)
            except PlanningError:  # other times, other residencies: what fits is kept
                break
        return self._beside_inputs(request, placed)

    def _beside_inputs(self, request: StepRequest, placed: PlacedStep) -> PlacedStep:
        """The step in less memory, if it is faster to have inputs arrive beside it.

        Where there is no room for these, a step begins by fetching them. Either way
        they take the link that tensors come back by.
        """
        arriving = sum(spec.nbytes for spec in self.graph.with_role(Role.INPUT))
        left = request.budget - arriving
        asked = self.tuner.backend.transit is not None and self.hosted is None
        if not asked or self.tiers or not 0 < left < placed.nbytes:
            return placed
        less = request.within(left)
        with suppress(PlanningError):
            other = place_step(less, _kept(less, placed.plan))
            rate, found = request.profile.in_bytes_per_ms, other.plan.prediction
            ms = max(found.step_ms, (found.in_bytes + arriving) / rate)
            if ms <= placed.plan.prediction.step_ms + arriving / rate:
                return other
        return placed

    def _again(self, request: StepRequest, placed: PlacedStep) -> PlacedStep:
        """The step with other times, where these matter with other residencies.

        Raises:
            PlanningError: It cannot fit.
        """
        known = placed.plan
        if request.policy == PLANNED and not self.tiers:
            with suppress(PlanningError):
                plan = _kept(request, known)
                if plan.prediction.step_ms <= _HARDLY_SLOWER * known.prediction.step_ms:
                    return place_step(request, plan)
            request = replace(request, seed=known.residency)
        return self._place(request)

    def _first(self, request: StepRequest) -> PlacedStep:
        """The step as it was found before, or else as it is found now.

        Raises:
            PlanningError: It cannot fit.
        """
        found, measured = self.budget.found, self.budget.measured
        if found is None or measured is None or not self._is_of(measured):
            return self._place(request)
        if request.policy == PLANNED and not self.tiers:
            with suppress(PlanningError):
                return place_step(request, _kept(request, found))
        return self._place(request)

    def _is_of(self, profile: Profile) -> bool:
        """Whether a profile has every node of the step."""
        return {node.name for node in self.graph.nodes} <= profile.node_ms.keys()

    def _place(self, request: StepRequest) -> PlacedStep:
        """A step in the memory that there is, on the device and off it."""
        if not self.tiers:
            return place_step(request)
        return place_tiered_step(request, self.tiers, self.state)

    def _advised(self, error: PlanningError) -> PlanningError:
        """The error with what will do for measuring, and for others, as well."""
        least = self._measuring_bytes()
        if self.budget.convolutions == "fastest":  # in more memory others may be
            least = max(least, self._least_by_sizes())
        known = error.least_bytes
        if known is None or (known >= least and not self.beside):
            return error
        least = max(least, known) + self.beside
        short = least - self.budget.nbytes
        return PlanningError(
            f"{exact_bytes(short)} short: the budget is "
            f"{exact_bytes(self.budget.nbytes)}, node {error.node!r} needs most; with "
            f"what measuring takes, and others meanwhile, {_will_do(least)}",
            node=error.node,
            short_by=short,
            least_bytes=least,
        )

    def _measuring_bytes(self) -> int:
        return measuring_bytes(self.tuner.backend, in_place(self.graph))

    def _least_by_sizes(self) -> int:
        """Bytes that will do whatever is measured, as far as sizes say."""
        sizes = sketch(self.tuner, in_place(self.graph))
        try:
            place_step(self._request(sizes).within(0))
        except PlanningError as e:
            return e.least_bytes or 0
        return 0


def _kept(request: StepRequest, known: StepPlan) -> StepPlan:
    """A step whose residencies are those of a known plan.

    Raises:
        PlanningError: It cannot fit.
    """
    asked = request
    if request.scheduler is None:
        asked = request.scheduled(known.scheduler)
    plan = plan_residency(asked, known.residency)
    return replace(plan, least_ms=lower_bound(request).step_ms)


def _will_do(nbytes: int) -> str:
    return f"{exact_bytes(nbytes)} will do"
