"""Plan one lowered PyTorch graph under any budget.

The planner counts every byte; a user's budget leaves out what the caller holds. So
`Planner` adds `caller_bytes` to every budget, and takes them off every error message.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

from mucudnn.arguments import check_number
from mucudnn.errors import PlanningError
from mucudnn.ir.profile import MemoryTier, Profile
from mucudnn.ir.sizes import exact_bytes, parse_bytes, refuse_fraction
from mucudnn.ir.tensor import Role
from mucudnn.passes.liveness import rounded
from mucudnn.passes.planning.place_step import over_fastest, plan_tiered_step
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step, unbounded
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.torch.lowering.lowered import Lowered
from mucudnn.torch.plan import TorchPlan
from mucudnn.torch.plan_store import PlanStore

_SMALL = 4096
"""Bytes of an input up to which it is not offloaded, such as a learning rate."""


def parse_budget(budget: float | str | None) -> float:
    """Return a budget in bytes, infinity for None.

    Raises:
        ValueError: It is no size, negative, or above zero and below 1 KiB.
        TypeError: It is neither a number nor text.
    """
    if budget is None:
        return math.inf
    if isinstance(budget, str):
        try:
            return parse_bytes(budget)
        except ValueError as e:
            raise ValueError(
                f"budget: {e}; train_step also takes '50%', 'device' and 'auto'"
            ) from None
    try:
        number = check_number("budget", budget, 0, finite=False)
    except TypeError:
        raise TypeError(
            f"budget must be bytes, a size such as '8GiB' or None, got {budget!r}"
        ) from None
    refuse_fraction(number, f"budget={budget!r}")
    return number if math.isinf(number) else parse_bytes(int(budget))


def too_small(
    message: str, budget: float, least: int, node: str | None = None
) -> PlanningError:
    """Return the error of a budget that is too small, given the least that works."""
    short_by = 0 if math.isinf(budget) else least - int(budget)
    return PlanningError(message, node=node, short_by=short_by, least_bytes=least)


@dataclass(frozen=True)
class Planner:
    """A lowered graph with its costs, which is planned under any budget.

    Attributes:
        lowered: The graph, with its updates in place.
        caller_inputs: Inputs that the caller holds: no budget counts them.
        offload_state: Whether the other inputs may be host-resident.
        tiers: Offload targets; none for unlimited host memory.
    """

    lowered: Lowered
    profile: Profile
    caller_inputs: Collection[str]
    offload_state: bool = False
    tiers: tuple[MemoryTier, ...] = ()

    @property
    def caller_bytes(self) -> int:
        """Bytes of the inputs that the caller holds, as the planner counts them."""
        tensors = self.lowered.graph.tensors
        storages = {self.lowered.graph.storages[name] for name in self.caller_inputs}
        return sum(rounded(tensors[name].nbytes) for name in storages)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all other inputs."""
        graph = self.lowered.graph
        storages = {graph.storages[name] for name in graph.inputs}
        every = sum(rounded(graph.tensors[name].nbytes) for name in storages)
        return every - self.caller_bytes

    def plan(
        self, budget: float = math.inf, plans: PlanStore | None = None
    ) -> TorchPlan:
        """Plan the graph within a budget of bytes, which leaves out the caller's.

        Raises:
            PlanningError: It cannot fit; says the least budget that works.
        """
        store = plans or PlanStore()
        try:
            plan = self.plan_request(
                self.request(budget), partial(store.plan, self.lowered)
            )
        except PlanningError as e:
            if e.least_bytes is None:
                raise
            least = e.least_bytes - self.caller_bytes
            raise too_small(
                f"the step does not fit into {exact_bytes(int(budget))}: node "
                f"{e.node!r} needs more; the least budget that works is "
                f"{exact_bytes(least)}",
                *(budget, least, e.node),
            ) from None
        return self.describe(plan, budget)

    def plan_request(
        self,
        request: StepRequest,
        planned: Callable[[StepRequest], StepPlan] = plan_step,
    ) -> StepPlan:
        """Plan a request about the graph; with tiers, place all that is offloaded.

        Raises:
            PlanningError: It does not fit into the budget, or into the tiers.
        """
        if not self.tiers:
            return planned(request)
        return plan_tiered_step(request, self.tiers, planned=planned)

    def describe(self, plan: StepPlan, budget: float) -> TorchPlan:
        """Return a plan of the graph in the bytes that a user counts."""
        tensors = self.lowered.graph.tensors
        offloaded = sum(rounded(tensors[name].nbytes) for name in plan.schedule.hosted)
        resident = self.resident_bytes - offloaded
        most = unbounded(self.lowered.graph, self.profile).peak_bytes
        return TorchPlan(
            plan, self.caller_bytes, budget, resident, unplanned_bytes=most
        )

    def least_budget(self) -> int:
        """Return the least budget in bytes that the graph is planned in."""
        return minimum_budget(self.request(0)) - self.caller_bytes

    def request(self, budget: float = math.inf) -> StepRequest:
        """Return the request to plan the graph within a budget."""
        graph = self.lowered.graph
        if self.offload_state:
            # Inputs of the caller, constants and small inputs stay where they are.
            fixed = {graph.storages[name] for name in self.caller_inputs}
            fixed |= {graph.storages[name] for name in self.lowered.constants}
            fixed |= {n for n in graph.inputs if graph.tensors[n].nbytes <= _SMALL}
            tensors = {
                name: replace(spec, role=Role.BORROWED)
                if name in graph.inputs and graph.storages[name] in fixed
                else spec
                for name, spec in graph.tensors.items()
            }
            graph = replace(graph, tensors=tensors)
        request = StepRequest(
            graph,
            self.profile,
            budget=budget + self.caller_bytes,
            hosted=None if self.offload_state else frozenset(),
        )
        return over_fastest(request, self.tiers)
