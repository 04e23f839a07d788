"""Training steps under a budget in bytes: measured, planned, placed, bound to tiers.

The budget is of device memory: parameters, state, activations, workspaces. What leaves
goes to host memory, or to a file where a folder is named.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from mucudnn.backends.base import Device
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import Graph, Phase
from mucudnn.ir.profile import Profile
from mucudnn.passes.inplace import in_place
from mucudnn.passes.layout import host_blocks
from mucudnn.passes.order import ORDERS, Order
from mucudnn.passes.packing import pack
from mucudnn.passes.placed import PlacedStep, place_step
from mucudnn.passes.planned import PLANNED
from mucudnn.passes.step_plan import state_bytes
from mucudnn.runtime.plan_texts import restore_plans
from mucudnn.runtime.prepare import Plans, Prepared, plan_convolutions
from mucudnn.runtime.profiler import profile, refine
from mucudnn.runtime.tiers import DiskTier, HostTier, Tiers
from mucudnn.runtime.tuner import Tuner

__all__ = ["MemoryBudget", "prepare_within", "tiers_for"]


_ROUNDS = 4
"""How often a step is planned, each time with the plans it chose before measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """How much device memory a step may take, and who decides how.

    Attributes:
        nbytes: Bytes for everything.
        policy: What leaves and what is computed again: `planned`, or another of
            `policy_names`.
        scheduler: When copies run; None is the policy's own.
        convolutions: How convolutions get their workspace: `dynamic` (what is free at
            each), `fixed` (as planned under the workspace limit: then results are bit
            for bit those of a step without a budget), `fastest` or `least`.
        disk: Folder for what leaves; host memory if None.
        measured: A profile of the step, if there is one already.
    """

    nbytes: int
    policy: str = PLANNED
    scheduler: str | None = None
    convolutions: str = "dynamic"
    disk: Path | None = None
    measured: Profile | None = field(default=None, repr=False)


def prepare_within(
    tuner: Tuner,
    graph: Graph,
    budget: MemoryBudget,
    *,
    arena_bytes: int,
    order: str | Order = "builder",
    plans: Plans | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Prepared, PlacedStep]:
    """Measure, plan and place a graph within a budget.

    Args:
        tuner: Measures and plans convolutions; its memory limit holds meanwhile.
        graph: What is run; nothing has made it in-place yet.
        budget: How.
        arena_bytes: What it may take beside parameters and state.
        order: In which order.
        plans: Convolution plans made before, for `fixed`.
        progress: Called while nodes are measured.

    Raises:
        PlanningError: It cannot fit; says how many bytes short.
    """
    ordered = ORDERS.resolve(order)(graph, {})
    measured = budget.measured
    if measured is None or not {n.name for n in ordered.nodes} <= set(measured.node_ms):
        measured = profile(tuner, in_place(ordered), progress=progress)
    fixed: dict[str, ConvPlan] | None = None
    if budget.convolutions == "fixed":
        known = plan_convolutions(tuner, (ordered,), plans)
        fixed = {
            node.name: known[node.attrs["problem"]]
            for node in ordered.nodes
            if node.op == "conv"
        }
    trains = any(node.phase is Phase.BACKWARD for node in ordered.nodes)
    times: dict[ConvPlan, float] = {}
    for _ in range(_ROUNDS):
        placed = place_step(
            ordered,
            measured,
            budget=arena_bytes + state_bytes(ordered),
            policy=budget.policy if trains else "paging",
            scheduler=budget.scheduler if trains else None,
            convolutions=budget.convolutions,
            plans=fixed,
        )
        chosen = placed.plan.plans.values()
        if fixed is not None or all(plan in times for plan in chosen):
            break
        measured = refine(tuner, measured, chosen, times)
    for plan in dict.fromkeys(placed.plan.plans.values()):
        restore_plans(tuner.backend, tuner.cache, plan)
    prepared = Prepared(
        placed.plan.schedule, placed.layout, MappingProxyType(dict(placed.plan.plans))
    )
    return prepared, placed


def tiers_for(device: Device, prepared: Prepared, budget: MemoryBudget) -> Tiers | None:
    """Where what leaves goes; None if nothing does.

    Raises:
        OutOfMemoryError: The host, or the disk, has no room for it.
    """
    blocks = host_blocks(prepared.schedule)
    if not blocks:
        return None
    nbytes = pack(blocks).nbytes
    if budget.disk is not None:
        return Tiers([DiskTier(nbytes, budget.disk)])
    return Tiers([HostTier(device, nbytes)])
