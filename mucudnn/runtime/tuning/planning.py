"""Call planners on tables: the step of `Tuner` from measurements to plans."""

from collections.abc import Callable, Sequence

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan, PerfTable
from mucudnn.passes.convolution.explain import Trial, explain
from mucudnn.passes.microbatch import PLANNERS, Planner, divided_by

__all__ = ["explained", "plans_within", "undivided"]


def plans_within(
    planner: Planner,
    tables: Sequence[PerfTable],
    workspace_limit: int,
    total_workspace: int | None,
) -> tuple[ConvPlan, ...]:
    """Plan each table, under the limit per kernel or under a total for all.

    A plan records its limit; under a total, that is the workspace it uses.
    """
    if total_workspace is None:
        plans = divided_by(planner, tables, workspace_limit)
        return tuple(plan.under(workspace_limit) for plan in plans)
    plans = divided_by(planner, tables, total_workspace)
    return tuple(plan.under(plan.workspace) for plan in plans)


def undivided(table: PerfTable, workspace_limit: int) -> ConvPlan | None:
    """Return the fastest single call within the limit, or None."""
    try:
        return PLANNERS.resolve("undivided")([table], workspace_limit)[0]
    except PlanningError:
        return None


def explained(
    planner: Planner,
    table: PerfTable,
    plan: ConvPlan,
    workspace_limit: int,
    verdict: Callable[[ConvPlan, ConvPlan], float | None],
) -> str:
    """Explain a plan in words; see `mucudnn.passes.convolution.explain`.

    `verdict` returns the known ratio of a division to its baseline: `Validator.known`.
    """
    baseline = undivided(table, workspace_limit)
    divided = plan if plan.divided else _division(planner, table, workspace_limit)
    if baseline is None or divided is None:
        return explain(table, plan, workspace_limit)
    trial = Trial(divided, verdict(divided, baseline))
    return explain(table, plan, workspace_limit, trial)


def _division(
    planner: Planner, table: PerfTable, workspace_limit: int
) -> ConvPlan | None:
    """Return the planner's division that an undivided plan was preferred to."""
    try:
        (plan,) = planner([table], workspace_limit)
    except PlanningError:
        return None
    return plan if plan.divided else None
