"""Tables -> plans: what a tuner asks of a planner."""

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
    """One plan a table, under the limit of each or under one for all of them.

    A plan remembers what it was allowed: under a total, what it uses is its share.

    Raises:
        PlanningError: A problem has no plan within the limit.
    """
    if total_workspace is None:
        plans = divided_by(planner, tables, workspace_limit)
        return tuple(plan.under(workspace_limit) for plan in plans)
    plans = divided_by(planner, tables, total_workspace)
    return tuple(plan.under(plan.workspace) for plan in plans)


def undivided(table: PerfTable, workspace_limit: int) -> ConvPlan | None:
    """The fastest single call within the limit, or None."""
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
    """Why a plan is what it is; see `mucudnn.passes.convolution.explain`.

    `verdict` says what is known of a division and its baseline: `Validator.known`.
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
    """What an undivided plan was preferred to, if the planner wanted to divide."""
    try:
        (plan,) = planner([table], workspace_limit)
    except PlanningError:
        return None
    return plan if plan.divided else None
