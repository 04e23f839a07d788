"""Divide mini-batches into micro-batches within a workspace limit.

`workspace_reuse` gives every kernel the whole limit: right when kernels run one after
another and share one arena. `workspace_division` shares one total out among all
kernels: right when each owns its buffer or kernels may overlap. A planner is a
function of the measurements; `minimum_workspace` shows how little a new one takes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from mucudnn.arguments import an_integer, integers
from mucudnn.ir.conv import ConvPlan, ConvProblem, PerfTable
from mucudnn.passes.convolution.pareto import (
    fastest_division,
    fastest_undivided,
    no_plan,
    pareto_plans,
    plan_cost_ms,
    whole_batch,
)
from mucudnn.passes.convolution.workspace_division import divide
from mucudnn.passes.registry import Strategies, name_of

__all__ = [
    "BATCH_POLICIES",
    "PLANNERS",
    "BatchPolicy",
    "Planner",
    "aligned_batches",
    "candidate_batches",
    "divided_by",
    "minimum_workspace",
    "pareto_plans",
    "plan_cost_ms",
    "undivided",
    "workspace_division",
    "workspace_division_exact",
    "workspace_reuse",
]

BatchPolicy = (
    Literal["undivided", "powers_of_two", "all"] | Callable[[int], Sequence[int]]
)
"""A name, or a function from a mini-batch to the micro-batch sizes to consider."""


BATCH_POLICIES: Strategies[Callable[[int], Sequence[int]]] = Strategies("batch policy")
"""Which micro-batch sizes to measure for a mini-batch; more join by `register`."""

BATCH_POLICIES.register(lambda batch: (batch,), name="undivided")
BATCH_POLICIES.register(
    lambda batch: tuple(1 << i for i in range(batch.bit_length())), name="powers_of_two"
)
BATCH_POLICIES.register(lambda batch: tuple(range(1, batch + 1)), name="all")


def candidate_batches(batch: int, policy: BatchPolicy) -> tuple[int, ...]:
    """Micro-batch sizes worth measuring for a mini-batch of `batch`, ascending.

    The whole mini-batch is always among them.

    Raises:
        ValueError: No policy has that name, the mini-batch is empty, or a function
            names a size that is none.
        TypeError: The policy is neither a name nor a function.
    """
    found = BATCH_POLICIES.resolve(policy)
    if (batch := an_integer("the mini-batch", batch)) < 1:
        raise ValueError(f"a mini-batch has at least one sample, got {batch}")
    label = f"what batch policy {name_of(policy)!r} returned for {batch}"
    sizes = integers(label, found(batch), least=1)
    if sizes and max(sizes) > batch:
        raise ValueError(f"{label} is beyond the mini-batch: {max(sizes)}")
    return tuple(sorted({*sizes, batch}))


def aligned_batches(
    problem: ConvProblem, sizes: Sequence[int], alignment: int
) -> tuple[int, ...]:
    """The sizes after which the next micro-batch still starts at an aligned address.

    Micro-batches are slices of both tensors that have a batch axis. The whole
    mini-batch is always among them.
    """
    quantum = 1
    for shape in (problem.x_shape, problem.y_shape):
        sample = math.prod(shape[1:]) * problem.itemsize
        quantum = math.lcm(quantum, alignment // math.gcd(alignment, sample))
    return tuple(b for b in sizes if b % quantum == 0 or b == problem.batch)


class Planner(Protocol):
    """A way to divide mini-batches."""

    def __call__(
        self, tables: Sequence[PerfTable], workspace_limit: int
    ) -> tuple[ConvPlan, ...]:
        """One plan per table, in order, within `workspace_limit` bytes.

        Raises:
            PlanningError: Nothing fits; the message says how much would.
        """
        ...


def undivided(
    tables: Sequence[PerfTable], workspace_limit: int
) -> tuple[ConvPlan, ...]:
    """What plain cuDNN does: one call, the fastest algorithm that fits."""
    plans = []
    for table in tables:
        perf = fastest_undivided(table, workspace_limit)
        if perf is None:
            least = min((p.workspace for p in whole_batch(table)), default=None)
            raise no_plan(table, workspace_limit, least)
        plan = ConvPlan(table.problem, (perf,), workspace_limit=workspace_limit)
        plans.append(plan)
    return tuple(plans)


def workspace_reuse(
    tables: Sequence[PerfTable], workspace_limit: int
) -> tuple[ConvPlan, ...]:
    """Cheapest division of each kernel, every kernel given the whole limit."""
    return tuple(fastest_division(table, workspace_limit) for table in tables)


def minimum_workspace(
    tables: Sequence[PerfTable], workspace_limit: int, slowdown: float = 0.05
) -> tuple[ConvPlan, ...]:
    """Least workspace that costs at most `slowdown` more than the best in the limit."""
    plans = []
    for table in tables:
        best = fastest_division(table, workspace_limit)
        launch = table.launch_overhead_ms
        allowed = (1 + slowdown) * plan_cost_ms(best, launch)
        front = pareto_plans(table, workspace_limit)
        plans.append(next(p for p in front if plan_cost_ms(p, launch) <= allowed))
    return tuple(plans)


def workspace_division(
    tables: Sequence[PerfTable], workspace_limit: int
) -> tuple[ConvPlan, ...]:
    """Cheapest divisions whose workspaces add up to the limit at most, by ILP."""
    return divide(tables, workspace_limit, solver="ilp").plans


def workspace_division_exact(
    tables: Sequence[PerfTable], workspace_limit: int
) -> tuple[ConvPlan, ...]:
    """The same as `workspace_division`, by merging Pareto fronts, with no solver."""
    return divide(tables, workspace_limit, solver="exact").plans


PLANNERS: Strategies[Planner] = Strategies(
    "planner",
    (
        undivided,
        workspace_reuse,
        minimum_workspace,
        workspace_division,
        workspace_division_exact,
    ),
    group="mucudnn.planners",
)
"""How mini-batches are divided; more join by `register` or by an entry point."""


def divided_by(
    planner: str | Planner, tables: Sequence[PerfTable], workspace_limit: int
) -> tuple[ConvPlan, ...]:
    """What a planner decides, checked: it may be somebody's own.

    Raises:
        PlanningError: Nothing fits.
        TypeError: It returned something else than plans.
        ValueError: There is not one plan a table, or one is of another problem.
    """
    found: object = PLANNERS.resolve(planner)(tables, workspace_limit)
    name = name_of(planner)
    plans = tuple(found) if isinstance(found, Sequence) else ()
    if not isinstance(found, Sequence) or not all(
        isinstance(plan, ConvPlan) for plan in plans
    ):
        raise TypeError(
            f"planner {name!r} returned {found!r}; a list of ConvPlan is wanted, one a "
            "table"
        )
    if [plan.problem for plan in plans] != [table.problem for table in tables]:
        raise ValueError(
            f"planner {name!r} returned {len(plans)} plans for {len(tables)} tables, "
            "or not in their order; one a table is wanted, of its problem"
        )
    return plans
