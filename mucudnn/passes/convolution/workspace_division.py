"""Divide one total workspace among kernels that each own their buffer.

One point of the Pareto front of (workspace, cost) is chosen for every kernel. The
knapsack is reduced to its core first, which leaves the solver a handful of variables.
Every solver's answer is checked in bytes; if a solver fails, the fronts are merged
exactly instead.

The core is a 0-1 integer linear program ("Workspace Division" in Oyama et al.,
CLUSTER 2018):

    minimise    sum of cost[k, c] x[k, c]
    subject to  sum over c of x[k, c] = 1 for every kernel k
                sum of workspace[k, c] x[k, c] <= total

Bytes and milliseconds are some twelve orders of magnitude apart, too much for a
floating-point solver. Both rows are therefore relative to the kernel's smallest item
and scaled so that the total is 1e4 and the most expensive item 1e6.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan, PerfTable
from mucudnn.passes.cbc import cbc, import_pulp, solver_errors
from mucudnn.passes.convolution.knapsack import (
    Core,
    Item,
    Selection,
    merge,
    reduce_to_core,
)
from mucudnn.passes.convolution.pareto import (
    Divided,
    least_workspace,
    no_plan,
    pareto_front,
)
from mucudnn.passes.registry import Strategies, name_of

__all__ = ["SOLVERS", "Division", "Solver", "divide", "ilp"]

Solver = Callable[[Core], Selection | None]
"""A solver returns a selection from a core, or None if it found none."""

_CAPACITY = 1e4
_DEAREST = 1e6
_MOST_NODES = 20_000

_log = logging.getLogger(__name__)


def ilp(core: Core, *, most_nodes: int = _MOST_NODES) -> Selection | None:
    """Solve the knapsack with CBC, as PuLP ships it.

    Returns:
        The selection, or None (and the reason in the log) if CBC cannot be run or
        found nothing within the limit.
    """
    try:
        with warnings.catch_warnings():
            # PuLP 3.3 announces 4.0, which pyproject.toml excludes.
            warnings.simplefilter("ignore", DeprecationWarning)
            return _by_cbc(core, cbc(most_nodes))
    except solver_errors() as error:
        _log.warning("the ILP solver cannot be run: %s", error)
        return None


def _by_cbc(core: Core, solver: Any) -> Selection | None:
    pulp = import_pulp()
    model = pulp.LpProblem("workspace_division", pulp.LpMinimize)
    undecided = [g for g, items in enumerate(core.open) if len(items) > 1]
    smallest = {g: core.groups[g][core.open[g][0]] for g in undecided}
    cheapest = {g: core.groups[g][core.open[g][-1]] for g in undecided}
    room = core.capacity - sum(
        core.groups[g][items[0]].workspace for g, items in enumerate(core.open)
    )
    dearest = max(smallest[g].cost - cheapest[g].cost for g in undecided)
    chosen = {
        (g, i): pulp.LpVariable(f"x_{g}_{i}", cat=pulp.LpBinary)
        for g in undecided
        for i in core.open[g]
        if core.groups[g][i].workspace - smallest[g].workspace <= room
    }
    model += pulp.LpAffineExpression(
        (x, (core.groups[g][i].cost - cheapest[g].cost) * (_DEAREST / dearest))
        for (g, i), x in chosen.items()
    )
    for g in undecided:
        ones = [(chosen[g, i], 1) for i in core.open[g] if (g, i) in chosen]
        model += pulp.LpAffineExpression(ones) == 1
    taken = [
        (x, (core.groups[g][i].workspace - smallest[g].workspace) / room * _CAPACITY)
        for (g, i), x in chosen.items()
        if core.groups[g][i].workspace > smallest[g].workspace
    ]
    if taken:
        model += pulp.LpAffineExpression(taken) <= _CAPACITY
    model.solve(solver)
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        _log.warning("CBC found no solution: %s", pulp.LpStatus[model.status])
        return None
    picks = [items[0] for items in core.open]
    for (g, i), x in chosen.items():
        if x.varValue is not None and x.varValue > 0.5:
            picks[g] = i
    return Selection(tuple(picks), model.sol_status == pulp.LpSolutionOptimal)


def exact(core: Core) -> Selection:
    """Merge the kernels' fronts, limited by a number of states, not by time."""
    return merge(core)


SOLVERS: Strategies[Solver] = Strategies("solver", (ilp, exact))


@dataclass(frozen=True, slots=True)
class Division:
    """Plans that share one total workspace, with a proven bound of their cost.

    Attributes:
        plans: One plan per kernel, in order.
        cost_ms: Sum of the plans' times, noise and launches: the objective.
        lower_bound_ms: Lower bound of the cost of any division within the total.
        solver: Name of the solver, or `relaxation` if the linear relaxation left
            nothing to choose.
        status: `optimal`, or `feasible` if the solver stopped early.
    """

    plans: tuple[ConvPlan, ...]
    cost_ms: float
    lower_bound_ms: float
    solver: str
    status: Literal["optimal", "feasible"]

    @property
    def time_ms(self) -> float:
        """Sum of the plans' times in milliseconds."""
        return sum(plan.time_ms for plan in self.plans)

    @property
    def workspace(self) -> int:
        """Total workspace of all kernels in bytes."""
        return sum(plan.workspace for plan in self.plans)

    @property
    def gap(self) -> float:
        """Relative optimality gap of the cost."""
        excess = self.cost_ms - self.lower_bound_ms
        return max(0.0, excess / self.cost_ms) if self.cost_ms else 0.0


def divide(
    tables: Sequence[PerfTable], total: int, *, solver: str | Solver = "ilp"
) -> Division:
    """Choose the cheapest divisions whose workspaces add up to at most `total` bytes.

    Args:
        tables: Measurements, one table per kernel; equal tables are examined once.
        total: Bytes of workspace for all kernels together.
        solver: `ilp` (CBC through PuLP), `exact` (front merging) or a function.

    Raises:
        PlanningError: The total is too small; the message has the shortfall.
        ValueError: The solver is unknown.
    """
    solve = SOLVERS.resolve(solver)
    if not tables:
        return Division((), 0.0, 0.0, "relaxation", "optimal")
    numbers: dict[PerfTable, int] = {}  # hash every table once, as it takes long
    which = [numbers.setdefault(table, len(numbers)) for table in tables]
    shared = [pareto_front(table, total) for table in numbers]
    fronts = [shared[number] for number in which]
    _check_total(tables, total, fronts)
    items = [[Item(d.workspace, d.cost_ms) for d in front] for front in shared]
    core = reduce_to_core([items[number] for number in which], total)
    if core.closed:
        selection, name = Selection(core.incumbent, optimal=True), "relaxation"
    else:
        selection, name = _solve(core, solve)
    cost = core.cost(selection.picks)
    return Division(
        plans=tuple(
            ConvPlan(table.problem, front[i].steps, workspace_limit=total)
            for table, front, i in zip(tables, fronts, selection.picks, strict=True)
        ),
        cost_ms=cost,
        lower_bound_ms=cost if selection.optimal else min(core.bound, cost),
        solver=name,
        status="optimal" if selection.optimal else "feasible",
    )


def _solve(core: Core, solve: Solver) -> tuple[Selection, str]:
    name = name_of(solve)
    selection = solve(core)
    if selection is not None:
        excess = core.workspace(selection.picks) - core.capacity
        if excess > 0:
            _log.warning("solver %s exceeds the total by %d bytes", name, excess)
            selection = None
    if selection is None:
        _log.warning("solver %s gave no division; merging fronts instead", name)
        selection, name = merge(core), "exact"
    # A solver that stopped early or has a tolerance may be worse than the incumbent.
    if core.cost(core.incumbent) < core.cost(selection.picks):
        selection = Selection(core.incumbent, selection.optimal)
    return selection, name


def _check_total(
    tables: Sequence[PerfTable], total: int, fronts: Sequence[Sequence[Divided]]
) -> None:
    needed = 0
    for table, front in zip(tables, fronts, strict=True):
        least = front[0].workspace if front else least_workspace(table)
        if least is None:
            raise no_plan(table, total, least)
        needed += least
    if needed > total:
        raise PlanningError(
            f"{len(tables)} kernels do not fit in {total} bytes of workspace together: "
            f"the smallest plans need {needed} bytes, {needed - total} more"
        )
