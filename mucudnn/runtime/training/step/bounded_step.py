"""Measure, plan and place a step within a budget.

A step is planned several times: after each time, the chosen convolution plans are
measured. If the new times make the step hardly slower, the residencies are kept, as
well as what was decided when the step was split, since another search would take most
of the time. If the step cannot be measured or does not fit, the error names the bytes
that suffice for everything.
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
from mucudnn.runtime.training.step.sizes import measuring_bytes, size_profile
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["BoundedStep"]

_ROUNDS = 4
"""Maximum number of planning rounds, each with the previous plans measured."""

_HARDLY_SLOWER = 1.1
"""Slowdown by refined times up to which residencies are kept."""


@dataclass(frozen=True, slots=True)
class BoundedStep:
    """A graph to place within a budget.

    Attributes:
        graph: Graph in the order of execution.
        budget: Budget of the graph and of `beside`.
        beside: Bytes of persistent state on the device that the graph does not use.
        hosted: Host-resident state, where another graph has decided that.
        tiers: Offload targets; none means unlimited host memory.
        state: Tier placement of host-resident state, where another graph has decided
            that.
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
        """Measure, plan and place the step.

        Raises:
            PlanningError: The step does not fit; the message says by how many bytes.
            OutOfMemoryError: There is no room to measure.
            UnsupportedError: The placement is virtual, and memory cannot be mapped.
        """
        chunks = None
        if self.placement != STATIC:
            chunks = mapping_costs(self.tuner.backend, self._nbytes)
        costs = self._costs(progress)
        if chunks is not None:
            costs = replace(costs, chunks=chunks)
        request = self._request(costs)
        try:
            return self._refined(request)
        except PlanningError as e:
            advised = self._advised(e)
            if advised is e:
                raise
            raise advised from e

    @property
    def _nbytes(self) -> int:
        """Bytes for the step; with a shared mapped arena, in whole chunks."""
        nbytes = self.budget.nbytes - self.beside
        mapper = self.tuner.backend.mapper
        if self.hosted is None or self.placement == STATIC or mapper is None:
            return nbytes
        specs = self.graph.with_role(*PERSISTENT)
        stays = sum(rounded(s.nbytes) for s in specs if s.name not in self.hosted)
        return nbytes - max(0, nbytes - stays) % mapper.chunk_bytes

    def _request(self, profile: Profile) -> StepRequest:
        """Return the planning request; without a backward pass, of paging."""
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

    def _costs(self, progress: OnNode | None) -> Profile:
        """Return the given profile if it is of this graph, or measure one."""
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
        """Place the step, then again with the chosen plans measured."""
        placed = self._place_first(request)
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
                placed = self._place_refined(request, placed)
            except PlanningError:  # keep the last plan that fits
                break
        return self._with_input_buffers(request, placed)

    def _with_input_buffers(
        self, request: StepRequest, placed: PlacedStep
    ) -> PlacedStep:
        """Shrink the step to make room for input buffers, if that is faster.

        Without such buffers, a step begins by fetching its inputs. Inputs and fetched
        tensors share a link in either case.
        """
        arriving = sum(spec.nbytes for spec in self.graph.with_role(Role.INPUT))
        left = request.budget - arriving
        asked = self.tuner.backend.transit is not None and self.hosted is None
        if not asked or self.tiers or not 0 < left < placed.nbytes:
            return placed
        less = request.within(left)
        with suppress(PlanningError):
            other = place_step(less, _with_known_residency(less, placed.plan))
            rate, found = request.profile.in_bytes_per_ms, other.plan.prediction
            ms = max(found.step_ms, (found.in_bytes + arriving) / rate)
            if ms <= placed.plan.prediction.step_ms + arriving / rate:
                return other
        return placed

    def _place_refined(self, request: StepRequest, placed: PlacedStep) -> PlacedStep:
        """Place the step with refined times; search anew if it became slower."""
        known = placed.plan
        if request.policy == PLANNED and not self.tiers:
            with suppress(PlanningError):
                plan = _with_known_residency(request, known)
                if plan.prediction.step_ms <= _HARDLY_SLOWER * known.prediction.step_ms:
                    return place_step(request, plan)
            request = replace(request, seed=known.residency)
        return self._place(request)

    def _place_first(self, request: StepRequest) -> PlacedStep:
        """Place the step by the plan that the budget brings along, or by a new one."""
        found, measured = self.budget.found, self.budget.measured
        if found is None or measured is None or not self._is_of(measured):
            return self._place(request)
        if request.policy == PLANNED and not self.tiers:
            with suppress(PlanningError):
                return place_step(request, _with_known_residency(request, found))
        return self._place(request)

    def _is_of(self, profile: Profile) -> bool:
        return {node.name for node in self.graph.nodes} <= profile.node_ms.keys()

    def _place(self, request: StepRequest) -> PlacedStep:
        if not self.tiers:
            return place_step(request)
        return place_tiered_step(request, self.tiers, self.state)

    def _advised(self, error: PlanningError) -> PlanningError:
        """Return the error with bytes that suffice for measuring and others, too."""
        least = self._measuring_bytes()
        if self.budget.convolutions == "fastest":  # more memory may change the fastest
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
        """Return an upper bound of the required bytes, by sizes alone."""
        sizes = size_profile(self.tuner, in_place(self.graph))
        try:
            place_step(self._request(sizes).within(0))
        except PlanningError as e:
            return e.least_bytes or 0
        return 0


def _with_known_residency(request: StepRequest, known: StepPlan) -> StepPlan:
    asked = request
    if request.scheduler is None:
        asked = request.scheduled(known.scheduler)
    plan = plan_residency(asked, known.residency)
    return replace(plan, least_ms=lower_bound(request).step_ms)


def _will_do(nbytes: int) -> str:
    return f"{exact_bytes(nbytes)} will do"
