"""Training steps under a budget in bytes: measured, planned, placed, bound to tiers.

The budget is of device memory: parameters, state, activations, workspaces. What leaves
goes to host memory, or to a file where a folder is named. Graphs that share parameters
and state must agree about which of them never leave: the first to be planned decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from mucudnn.arguments import a_path, of_type, one_of
from mucudnn.backends.base import Device
from mucudnn.errors import OutOfMemoryError, PlanningError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT, Graph, Phase
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import exact_bytes, parse_bytes
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.liveness import rounded
from mucudnn.passes.ordering import Order, ordered as reordered
from mucudnn.passes.placement.layout import host_blocks
from mucudnn.passes.placement.packing import pack
from mucudnn.passes.planning.evaluate import CONVOLUTIONS
from mucudnn.passes.planning.place_step import PlacedStep, place_step
from mucudnn.passes.planning.plan_step import PLANNED, check_policy
from mucudnn.passes.residency import ResidencyPolicy
from mucudnn.passes.scheduling import SCHEDULERS, Scheduler
from mucudnn.runtime.executor.host_memory import DiskTier, HostTier, Tiers
from mucudnn.runtime.training.profiler import measuring_bytes, profile, refine
from mucudnn.runtime.training.sketch import sketch
from mucudnn.runtime.training.step_graphs import Plans, Prepared, plan_convolutions
from mucudnn.runtime.tuning.plan_texts import restore_plans
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["MemoryBudget", "prepare_together", "prepare_within", "tiers_for"]


_ROUNDS = 4
"""How often a step is planned, each time with the plans it chose before measured."""


@dataclass(frozen=True, slots=True, init=False)
class MemoryBudget:
    """How much device memory a step may take, and who decides how.

    Attributes:
        nbytes: Bytes for everything; may be given as "1.5GiB".
        policy: What leaves and what is computed again: `planned`, another of
            `policy_names`, or a function.
        scheduler: When copies run, a name or a function; None is the policy's own.
        convolutions: How convolutions get their workspace: `dynamic` (what is free at
            each), `fixed` (as planned under the workspace limit: then results are bit
            for bit those of a step without a budget), `fastest` or `least`.
        disk: Folder for what leaves; host memory if None.
        measured: A profile of the step, if there is one already.
    """

    nbytes: int
    policy: str | ResidencyPolicy
    scheduler: str | Scheduler | None
    convolutions: str
    disk: Path | None
    measured: Profile | None = field(repr=False)

    def __init__(
        self,
        *,
        nbytes: int | str,
        policy: str | ResidencyPolicy = PLANNED,
        scheduler: str | Scheduler | None = None,
        convolutions: str = "dynamic",
        disk: Path | str | None = None,
        measured: Profile | None = None,
    ) -> None:
        """Check every field.

        Raises:
            ValueError: A size or a name is not valid; the message says what is.
            TypeError: A field is of another type.
        """
        check_policy(policy)
        if scheduler is not None:
            SCHEDULERS.resolve(scheduler)
        if measured is not None:
            of_type("measured", measured, Profile, "a Profile of the step")
        values: dict[str, object] = {
            "nbytes": parse_bytes(nbytes),
            "policy": policy,
            "scheduler": scheduler,
            "convolutions": one_of("convolutions", convolutions, CONVOLUTIONS),
            "disk": None if disk is None else a_path("disk", disk),
            "measured": measured,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, budget: "MemoryBudget | int | str") -> "MemoryBudget":
        """A budget, from itself or from a size such as "1.5GiB".

        Raises:
            ValueError: The size is none.
            TypeError: It is something else.
        """
        if isinstance(budget, MemoryBudget):
            return budget
        try:
            return cls(nbytes=budget)
        except TypeError:
            raise TypeError(
                "budget must be a MemoryBudget, or a size in bytes or as text such as "
                f"'1.5GiB', got {budget!r}"
            ) from None


def prepare_within(
    tuner: Tuner,
    graph: Graph,
    budget: MemoryBudget,
    *,
    beside: int = 0,
    hosted: frozenset[str] | None = None,
    order: str | Order = "builder",
    plans: Plans | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Prepared, PlacedStep]:
    """Measure, plan and place a graph within a budget.

    Args:
        tuner: Measures and plans convolutions; its memory limit holds as well.
        graph: What is run; nothing has made it in-place yet.
        budget: How.
        beside: Bytes of the budget that others take meanwhile.
        hosted: Parameters and state that are at home on the host, if that is decided.
        order: In which order.
        plans: Convolution plans made before, for `fixed`.
        progress: Called while nodes are measured.

    Raises:
        PlanningError: It cannot fit; says how many bytes short, and what will do.
        OutOfMemoryError: It cannot be measured; says what will do for all of it.
    """
    ordered = reordered(order, graph, {})
    nbytes = budget.nbytes - beside
    fixed: dict[str, ConvPlan] | None = None
    if budget.convolutions == "fixed":
        known = plan_convolutions(tuner, (ordered,), plans)
        fixed = {
            node.name: known[node.attrs["problem"]]
            for node in ordered.nodes
            if node.op == "conv"
        }
    trains = any(node.phase is Phase.BACKWARD for node in ordered.nodes)

    def place(measured: Profile, within: int) -> PlacedStep:
        return place_step(
            ordered,
            measured,
            budget=within,
            policy=budget.policy if trains else "paging",
            scheduler=budget.scheduler if trains else None,
            convolutions=budget.convolutions,
            plans=fixed,
            hosted=hosted,
        )

    def unmeasured() -> int:
        """Bytes that will do whatever is measured, as far as sizes say."""
        try:
            place(sketch(tuner, final), 0)
        except PlanningError as e:
            return e.least_bytes or 0
        return 0

    final = in_place(ordered)
    least = measuring_bytes(tuner.backend, final)
    measured = budget.measured
    if measured is None or not {n.name for n in ordered.nodes} <= set(measured.node_ms):
        try:
            measured = profile(tuner, final, memory=nbytes, progress=progress)
        except (OutOfMemoryError, PlanningError) as e:
            least = max(least, unmeasured()) + beside
            raise type(e)(f"{e}; for all of the step {_will_do(least)}") from e
    try:
        placed = _refined(tuner, measured, place, nbytes, once=fixed is not None)
    except PlanningError as e:
        if budget.convolutions == "fastest":  # in more memory others may be
            least = max(least, unmeasured())
        if e.least_bytes is None or (e.least_bytes >= least and not beside):
            raise
        least = max(least, e.least_bytes) + beside
        short = least - budget.nbytes
        raise PlanningError(
            f"{exact_bytes(short)} short: the budget is {exact_bytes(budget.nbytes)}, "
            f"node {e.node!r} needs most; with what measuring takes, and others "
            f"meanwhile, {_will_do(least)}",
            node=e.node,
            short_by=short,
            least_bytes=least,
        ) from e
    for plan in dict.fromkeys(placed.plan.plans.values()):
        restore_plans(tuner.backend, tuner.cache, plan)
    prepared = Prepared(
        placed.plan.schedule, placed.layout, MappingProxyType(dict(placed.plan.plans))
    )
    return prepared, placed


def _refined(
    tuner: Tuner,
    measured: Profile,
    place: Callable[[Profile, int], PlacedStep],
    nbytes: int,
    *,
    once: bool,
) -> PlacedStep:
    """A placed step, planned again with the plans it chose measured in between.

    Raises:
        PlanningError: It cannot fit.
    """
    placed = place(measured, nbytes)
    times: dict[ConvPlan, float] = {}
    for _ in range(0 if once else _ROUNDS - 1):
        chosen = placed.plan.plans.values()
        if all(plan in times for plan in chosen):
            break
        measured = refine(tuner, measured, chosen, times, memory=nbytes)
        try:
            placed = place(measured, nbytes)
        except PlanningError:  # other times, other residencies: what fits is kept
            break
    return placed


def _will_do(nbytes: int) -> str:
    return f"{exact_bytes(nbytes)} will do"


def prepare_together(
    tuner: Tuner,
    graphs: Sequence[Graph],
    budget: MemoryBudget,
    *,
    first: Graph,
    order: str | Order = "builder",
    plans: Plans | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[list[Prepared], PlacedStep]:
    """Measure, plan and place graphs that share a budget, parameters and state.

    Args:
        tuner: See `prepare_within`.
        graphs: They take turns.
        budget: How.
        first: One of them, which decides what of the state is at home on the host.
        order: See `prepare_within`.
        plans: See `prepare_within`.
        progress: See `prepare_within`.

    Returns:
        The graphs in their order, and how the first one is placed.

    Raises:
        PlanningError: One cannot fit; says how many bytes short.
    """
    sizes = {
        s.name: rounded(s.nbytes) for g in graphs for s in g.with_role(*PERSISTENT)
    }

    def within(
        graph: Graph, hosted: frozenset[str] | None
    ) -> tuple[Prepared, PlacedStep]:
        mine = {spec.name for spec in graph.with_role(*PERSISTENT)} | (hosted or set())
        return prepare_within(
            tuner,
            graph,
            budget,
            beside=sum(n for name, n in sizes.items() if name not in mine),
            hosted=hosted,
            order=order,
            plans=plans,
            progress=progress,
        )

    ready, placed = within(first, None)
    hosted = frozenset(placed.plan.schedule.hosted)
    return [ready if g is first else within(g, hosted)[0] for g in graphs], placed


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
