"""From a lowered graph to a plan within a budget: the planner's own, asked once.

The planner counts every byte; the user's budget leaves out what the caller holds. So
the one is the other and those bytes, and errors say the user's.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from mucudnn.arguments import a_number
from mucudnn.errors import PlanningError
from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import MemoryTier, Profile
from mucudnn.ir.sizes import exact_bytes, parse_bytes
from mucudnn.ir.tensor import Role
from mucudnn.passes.liveness import rounded
from mucudnn.passes.planning.place_step import over_fastest, plan_tiered_step
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.torch.lowering.lowered import Lowered
from mucudnn.torch.plan import TorchPlan
from mucudnn.torch.plan_store import PlanStore

_SMALL = 4096
"""Bytes of an input that are not worth a copy, such as those of a learning rate."""


def as_budget(budget: float | str | None) -> float:
    """Bytes; infinity for None.

    Raises:
        ValueError: It is no size, or negative.
        TypeError: It is neither a number nor text.
    """
    if budget is None:
        return math.inf
    if isinstance(budget, str):
        return parse_bytes(budget)
    try:
        number = a_number("budget", budget, 0, finite=False)
    except TypeError:
        raise TypeError(
            f"budget must be bytes, a size such as '8GiB' or None, got {budget!r}"
        ) from None
    return number if math.isinf(number) else parse_bytes(int(budget))


@dataclass(frozen=True)
class Planner:
    """Plans one step under any budget.

    Attributes:
        lowered: The step.
        profile: What it costs.
        given: Inputs that the caller holds: no budget counts them.
        offload: Whether other inputs, parameters and state, may be host-resident.
        tiers: Where to what leaves goes; none means the host's memory, without end.
    """

    lowered: Lowered
    profile: Profile
    given: Collection[str]
    offload: bool = False
    tiers: tuple[MemoryTier, ...] = ()

    @property
    def given_bytes(self) -> int:
        """Bytes of what the caller holds, as the planner counts them."""
        tensors = self.lowered.graph.tensors
        given = {self.lowered.graph.storages[name] for name in self.given}
        return sum(rounded(tensors[name].nbytes) for name in given)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all other inputs."""
        graph = self.lowered.graph
        roots = {graph.storages[name] for name in graph.inputs}
        every = sum(rounded(graph.tensors[name].nbytes) for name in roots)
        return every - self.given_bytes

    def plan(
        self, budget: float = math.inf, plans: PlanStore | None = None
    ) -> TorchPlan:
        """The step within a budget.

        Args:
            budget: Bytes.
            plans: What was planned before; None plans anew.

        Raises:
            PlanningError: It cannot fit; says the least budget that works.
        """
        try:
            store = plans or PlanStore()
            plan = self.decided(self.request(budget), partial(store.plan, self.lowered))
        except PlanningError as e:
            if e.least_bytes is None:
                raise
            least = e.least_bytes - self.given_bytes
            raise PlanningError(
                f"the step does not fit into {exact_bytes(int(budget))}: node "
                f"{e.node!r} needs more; the least budget that works is "
                f"{exact_bytes(least)}",
                node=e.node,
                short_by=least - int(budget),
                least_bytes=least,
            ) from None
        return self.described(plan, budget)

    def decided(
        self,
        request: StepRequest,
        planned: Callable[[StepRequest], StepPlan] = plan_step,
    ) -> StepPlan:
        """A plan of what is asked about the step, with a place for all that leaves.

        Raises:
            PlanningError: It cannot fit, or there is no room for what leaves.
        """
        if not self.tiers:
            return planned(request)
        return plan_tiered_step(request, self.tiers, planned=planned)

    def described(self, plan: StepPlan, budget: float) -> TorchPlan:
        """A plan of the step, in the bytes that its user counts."""
        tensors = self.lowered.graph.tensors
        away = sum(rounded(tensors[name].nbytes) for name in plan.schedule.hosted)
        resident = self.resident_bytes - away
        return TorchPlan(plan, self.given_bytes, budget, resident)

    def least_budget(self) -> int:
        """The least bytes that the step is planned in."""
        return minimum_budget(self.request(0)) - self.given_bytes

    def request(self, budget: float = math.inf) -> StepRequest:
        """What the planner is asked for a budget."""
        graph = self.lowered.graph
        request = StepRequest(
            self._lent() if self.offload else graph,
            self.profile,
            budget=budget + self.given_bytes,
            hosted=None if self.offload else frozenset(),
        )
        return over_fastest(request, self.tiers)

    def _lent(self) -> Graph:
        """The graph with it said which inputs stay: the caller's and small ones."""
        graph = self.lowered.graph
        fixed = {graph.storages[name] for name in self.given}
        fixed |= {graph.storages[name] for name in self.lowered.constants}
        fixed |= {n for n in graph.inputs if graph.tensors[n].nbytes <= _SMALL}
        tensors = {
            name: replace(spec, role=Role.BORROWED)
            if name in graph.inputs and graph.storages[name] in fixed
            else spec
            for name, spec in graph.tensors.items()
        }
        return replace(graph, tensors=MappingProxyType(tensors))
