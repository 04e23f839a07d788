"""Divide mini-batches into micro-batches within a workspace limit.

`workspace_reuse` gives every kernel the whole limit, for kernels that run one after
another in a shared workspace. `workspace_division` divides one total among all kernels,
for kernels that own their buffers or may overlap. A planner is a function of the
measurements; see `minimum_workspace` for a short example.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from mucudnn.arguments import check_integer, check_integers
from mucudnn.ir.conv import ConvPlan, ConvProblem, PerfTable
from mucudnn.passes.convolution.knapsack import divide, exact, ilp
from mucudnn.passes.convolution.pareto import (
    division_cost_ms,
    fastest_division,
    fastest_undivided,
    no_plan,
    pareto_plans as pareto_plans,
    whole_batch,
)
from mucudnn.passes.registry import Strategies, name_of

BatchPolicy = (
    Literal["undivided", "powers_of_two", "all"] | Callable[[int], Sequence[int]]
)
"""A name, or a function from a mini-batch to the micro-batch sizes to consider."""


BATCH_POLICIES: Strategies[Callable[[int], Sequence[int]]] = Strategies("batch policy")
"""Policies for the micro-batch sizes to measure; `register` adds more."""

BATCH_POLICIES.register(lambda batch: (batch,), name="undivided")
BATCH_POLICIES.register(
    lambda batch: tuple(1 << i for i in range(batch.bit_length())), name="powers_of_two"
)
BATCH_POLICIES.register(lambda batch: tuple(range(1, batch + 1)), name="all")


def candidate_batches(batch: int, policy: BatchPolicy) -> tuple[int, ...]:
    """Return the micro-batch sizes to measure, ascending, the mini-batch included.

    Raises:
        ValueError: The policy is unknown, the mini-batch is empty, or a function
            returns an invalid size.
        TypeError: The policy is neither a name nor a function.
    """
    found = BATCH_POLICIES.resolve(policy)
    batch = check_integer("the mini-batch", batch, least=1)
    label = f"what batch policy {name_of(policy)!r} returned for {batch}"
    sizes = check_integers(label, found(batch), least=1)
    if sizes and max(sizes) > batch:
        raise ValueError(f"{label} is beyond the mini-batch: {max(sizes)}")
    return tuple(sorted({*sizes, batch}))


def aligned_batches(
    problem: ConvProblem, sizes: Sequence[int], alignment: int
) -> tuple[int, ...]:
    """Return the sizes after which the next micro-batch starts at an aligned address.

    Micro-batches are slices of the two tensors with a batch axis. The whole mini-batch
    is always included.
    """
    quantum = 1
    for shape in (problem.x_shape, problem.y_shape):
        sample = math.prod(shape[1:]) * problem.itemsize
        quantum = math.lcm(quantum, alignment // math.gcd(alignment, sample))
    return tuple(b for b in sizes if b % quantum == 0 or b == problem.batch)


Planner = Callable[[Sequence[PerfTable], int], tuple[ConvPlan, ...]]
"""(tables, workspace limit in bytes) -> one plan per table, in order.

If nothing fits, it raises a `PlanningError` with the smallest feasible limit.
"""


def undivided(
    tables: Sequence[PerfTable], workspace_limit: int
) -> tuple[ConvPlan, ...]:
    """Run each kernel in one call by the fastest algorithm that fits, like cuDNN."""
    plans = []
    for table in tables:
        perf = fastest_undivided(table, workspace_limit)
        if perf is None:
            least = min((p.workspace for p in whole_batch(table)), default=None)
            raise no_plan(table, workspace_limit, least)
        plans.append(ConvPlan(table.problem, (perf,), workspace_limit=workspace_limit))
    return tuple(plans)


def workspace_reuse(
    tables: Sequence[PerfTable], workspace_limit: int
) -> tuple[ConvPlan, ...]:
    """Divide each kernel at the least cost, with the whole limit for every kernel."""
    return tuple(fastest_division(table, workspace_limit) for table in tables)


def minimum_workspace(
    tables: Sequence[PerfTable], workspace_limit: int, slowdown: float = 0.05
) -> tuple[ConvPlan, ...]:
    """Minimise workspace at a slowdown of at most `slowdown` over the best plan."""
    plans = []
    for table in tables:
        best = fastest_division(table, workspace_limit)
        launch = table.launch_overhead_ms
        allowed = (1 + slowdown) * division_cost_ms(best.steps, launch)
        front = pareto_plans(table, workspace_limit)
        costs = ((division_cost_ms(plan.steps, launch), plan) for plan in front)
        plans.append(next(plan for cost, plan in costs if cost <= allowed))
    return tuple(plans)


def workspace_division(
    tables: Sequence[PerfTable], workspace_limit: int
) -> tuple[ConvPlan, ...]:
    """Divide one total workspace among all kernels at the least cost, by an ILP."""
    return divide(tables, workspace_limit, ilp)


def workspace_division_exact(
    tables: Sequence[PerfTable], workspace_limit: int
) -> tuple[ConvPlan, ...]:
    """Divide like `workspace_division`, by merging Pareto fronts without a solver."""
    return divide(tables, workspace_limit, exact)


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
"""Planners by name; `register` or an entry point adds more."""


def divided_by(
    planner: str | Planner, tables: Sequence[PerfTable], workspace_limit: int
) -> tuple[ConvPlan, ...]:
    """Run a planner, possibly a user's, and check its plans.

    Raises:
        PlanningError: Nothing fits.
        TypeError: The planner did not return plans.
        ValueError: The plans do not match the tables.
    """
    found: object = PLANNERS.resolve(planner)(tables, workspace_limit)
    name = name_of(planner)
    plans = tuple(found) if isinstance(found, Sequence) else ()
    if not isinstance(found, Sequence) or not all(
        isinstance(plan, ConvPlan) for plan in plans
    ):
        raise TypeError(
            f"planner {name!r} returned {found!r}; it must return a list of ConvPlan, "
            "one per table"
        )
    if [plan.problem for plan in plans] != [table.problem for table in tables]:
        raise ValueError(
            f"planner {name!r} returned {len(plans)} plans for {len(tables)} tables, "
            "or in another order; it must return one per table, of the same problem"
        )
    return plans
