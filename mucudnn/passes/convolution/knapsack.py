"""Multiple-choice knapsack, and the division of one workspace among kernels.

In workspace division a group is a kernel and an item is a point of the kernel's Pareto
front. The linear relaxation is solved greedily over the groups' lower convex hulls and
yields a price per byte. At that price the cheapest items give a lower bound, and every
other item raises the bound by its reduced cost. Items that raise the bound above the
incumbent are in no better solution (Sinha and Zoltners, "The Multiple-Choice Knapsack
Problem", Operations Research 27, 1979). The remaining core, usually a handful of items,
is solved by `exact` or an ILP solver.

`exact` is a dynamic program: it adds one group after another to the Pareto front
of (workspace, cost) states and drops states that are dominated or exceed a bound.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan, PerfTable
from mucudnn.passes.convolution.pareto import least_workspace, no_plan, pareto_front
from mucudnn.passes.linear_program import cbc, import_pulp, solver_errors
from mucudnn.passes.registry import name_of

_EFFORT = (20_000, 100_000)
"""State extensions allowed in each pass that looks for a good incumbent."""

_MOST_EFFORT = 8_000_000
"""State extensions after which `exact` stops being exact: a few seconds."""

_CLOSED = 1e-9
"""Relative gap to the lower bound at which a selection counts as optimal."""

_AROUND = (0.8, 1.25)
"""Further prices for bounding states, relative to the relaxation's price. Any price
gives a valid bound; these are tighter for states that used little or much capacity."""

_SLACK = 1e-12
"""Relative slack when bounds are compared: above the rounding of hundreds of sums."""


class Item(NamedTuple):
    """One way to run a kernel: workspace in bytes and cost in milliseconds."""

    workspace: int
    cost: float


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice of one item in every group.

    Attributes:
        picks: Index of the chosen item in each group.
        optimal: Whether the selection is proven optimal.
    """

    picks: tuple[int, ...]
    optimal: bool


@dataclass(frozen=True, slots=True)
class Core:
    """A knapsack reduced by its linear relaxation.

    Attributes:
        groups: All items; workspaces are relative to the group's smallest, so that
            the price times the capacity is no larger than the costs.
        capacity: Limit of the sum of relative workspaces, in bytes.
        price: Cost per byte, from the relaxation.
        bound: Lower bound of the cost of any selection.
        incumbent: Picks of the best known selection.
        open: Items of each group that may be in a better selection, and the
            incumbent's.
    """

    groups: tuple[tuple[Item, ...], ...]
    capacity: int
    price: float
    bound: float
    incumbent: tuple[int, ...]
    open: tuple[tuple[int, ...], ...]

    def cost(self, picks: Sequence[int]) -> float:
        """Return the sum of the chosen items' costs."""
        return sum(g[i].cost for g, i in zip(self.groups, picks, strict=True))

    def workspace(self, picks: Sequence[int]) -> int:
        """Return the sum of the chosen items' workspaces."""
        return sum(g[i].workspace for g, i in zip(self.groups, picks, strict=True))

    @property
    def closed(self) -> bool:
        """True if every group has one open item: the incumbent is optimal."""
        return all(len(items) == 1 for items in self.open)

    def improved(self, picks: tuple[int, ...]) -> "Core":
        """Return the core with a better incumbent, less items that cannot beat it."""
        picks = self._filled(picks)
        core = replace(self, incumbent=picks)
        best = core.cost(picks)
        if best - self.bound <= _CLOSED * abs(best):
            return replace(core, open=tuple((i,) for i in picks))
        gap = core.threshold - self.bound
        kept = []
        for group, items, chosen in zip(self.groups, self.open, picks, strict=True):
            priced = _priced(group, self.price)
            most = min(priced) + gap
            kept.append(tuple(i for i in items if priced[i] <= most or i == chosen))
        return replace(core, open=tuple(kept))

    def _filled(self, picks: tuple[int, ...]) -> tuple[int, ...]:
        """Spend unused capacity on the largest saving that fits, repeatedly."""
        filled = list(picks)
        room = self.capacity - self.workspace(filled)
        while True:
            moves = [
                (group[old].cost - group[new].cost, g, new)
                for g, (group, items, old) in enumerate(
                    zip(self.groups, self.open, filled, strict=True)
                )
                for new in items
                if new > old and group[new].workspace - group[old].workspace <= room
            ]
            if not moves:
                return tuple(filled)
            _, g, new = max(moves)
            room -= self.groups[g][new].workspace - self.groups[g][filled[g]].workspace
            filled[g] = new

    @property
    def threshold(self) -> float:
        """Cost above which a bound excludes a better selection despite rounding."""
        largest = sum(abs(group[0].cost) for group in self.groups)
        return self.cost(self.incumbent) + _SLACK * largest


def reduce_to_core(groups: Sequence[Sequence[Item]], capacity: int) -> Core:
    """Solve the relaxation, find a good incumbent, and drop items that cannot beat it.

    Args:
        groups: Items with workspaces ascending and costs descending; no group is empty,
            and the smallest items fit together.
        capacity: Limit of the sum of workspaces, in bytes.
    """
    frozen = tuple(
        tuple(Item(nbytes - group[0].workspace, cost) for nbytes, cost in group)
        for group in groups
    )
    capacity -= sum(group[0].workspace for group in groups)
    price, greedy = _relax(frozen, capacity)
    bound = sum(min(_priced(group, price)) for group in frozen) - price * capacity
    everything = tuple(tuple(range(len(group))) for group in frozen)
    core = Core(frozen, capacity, price, bound, greedy, everything).improved(greedy)
    for effort in _EFFORT:
        core = core.improved(_merge(core, effort).picks)
    return core


def exact(
    core: Core, *, effort: int = _EFFORT[-1], most_effort: int = _MOST_EFFORT
) -> Selection:
    """Return the cheapest selection by merging the groups' fronts one after another."""
    # Each pass truncates fronts to the states with the best bounds, at first narrowly;
    # a better incumbent leaves fewer items to the next, wider pass. A pass that
    # truncated nothing is exact; otherwise the best selection found is returned.
    selection = Selection(core.incumbent, core.closed)
    while not selection.optimal and effort < most_effort:
        effort = min(effort * 8, most_effort)
        selection = _merge(core, effort)
        core = core.improved(selection.picks)
        selection = Selection(core.incumbent, selection.optimal or core.closed)
    return selection


def _merge(core: Core, effort: int) -> Selection:
    most_states = 1 + effort // sum(len(items) for items in core.open)
    price = core.price
    # Groups with a single open item come first, as they do not multiply the states.
    order = sorted(
        range(len(core.groups)),
        key=lambda g: (len(core.open[g]) > 1, -len(core.open[g])),
    )
    open_items = [[(*core.groups[g][i], i) for i in core.open[g]] for g in order]
    # Lower bounds on the workspace and the priced cost of the remaining groups.
    least = _suffix_sums(min(w for w, _, _ in items) for items in open_items)
    allowed = _allowed(core, open_items, price)
    around = [(f * price, _allowed(core, open_items, f * price)) for f in _AROUND]
    optimal = True
    states = [(0, 0.0, -1, -1)]
    stages = []
    for n, items in enumerate(open_items):
        room, most = core.capacity - least[n + 1], allowed[n]
        states = _undominated(
            (workspace, cost, parent, i)
            for nbytes, more, i in items
            for parent, (used, spent, _, _) in enumerate(states)
            if (workspace := used + nbytes) <= room
            and (cost := spent + more) + price * workspace <= most
        )
        for other, limits in around:
            states = [s for s in states if s[1] + other * s[0] <= limits[n]]
        if len(states) > most_states:
            optimal = False
            states.sort(key=lambda state: state[1] + price * state[0])
            states = sorted(states[:most_states])
        stages.append(states)
    picks = list(core.incumbent)
    # Follow parents back from the cheapest state; a truncated front may have lost it.
    at = len(states) - 1
    for g, stage in zip(reversed(order), reversed(stages), strict=True):
        if not stage:
            return Selection(core.incumbent, optimal)
        _, _, at, picks[g] = stage[at]
    if core.cost(picks) >= core.cost(core.incumbent):
        return Selection(core.incumbent, optimal)
    return Selection(tuple(picks), optimal)


def _allowed(
    core: Core, open_items: Sequence[Sequence[tuple[int, float, int]]], price: float
) -> list[float]:
    """Return the limit of a state's priced cost after each group."""
    # A state above its limit ends above the incumbent, as the remaining groups cost no
    # less than their cheapest items at that price.
    cheapest = _suffix_sums(
        min(c + price * w for w, c, _ in items) for items in open_items
    )
    most = core.threshold + price * core.capacity
    return [most - rest for rest in cheapest[1:]]


def _undominated(
    states: Iterable[tuple[int, float, int, int]],
) -> list[tuple[int, float, int, int]]:
    front: list[tuple[int, float, int, int]] = []
    best = float("inf")
    for state in sorted(states):
        if state[1] < best:
            front.append(state)
            best = state[1]
    return front


def _relax(
    groups: Sequence[Sequence[Item]], capacity: int
) -> tuple[float, tuple[int, ...]]:
    """Return the relaxation's price per byte, and its solution rounded down."""
    room = capacity
    steps = []
    for g, group in enumerate(groups):
        for before, after in pairwise(_convex_hull(group)):
            nbytes = group[after].workspace - group[before].workspace
            saved = group[before].cost - group[after].cost
            steps.append((-saved / nbytes, g, before, after, nbytes))
    steps.sort()
    picks = [0] * len(groups)
    price = 0.0
    for slope, g, before, after, nbytes in steps:
        if nbytes > room:
            price = price or -slope
        # A group whose last step did not fit stays where it is.
        elif picks[g] == before:
            picks[g] = after
            room -= nbytes
    return price, tuple(picks)


def _convex_hull(group: Sequence[Item]) -> list[int]:
    """Return indices of the items on the lower left convex hull, ascending."""
    hull: list[int] = []
    for i, item in enumerate(group):
        while len(hull) > 1:
            first, last = group[hull[-2]], group[hull[-1]]
            across = (first.cost - last.cost) * (item.workspace - last.workspace)
            along = (last.cost - item.cost) * (last.workspace - first.workspace)
            if across > along:
                break
            hull.pop()
        hull.append(i)
    return hull


def _priced(items: Sequence[Item], price: float) -> list[float]:
    return [item.cost + price * item.workspace for item in items]


def _suffix_sums(values: Iterable[float]) -> list[float]:
    return list(accumulate(reversed(list(values)), initial=0))[::-1]


# Divide one total workspace among kernels that each own their buffer.
#
# One point of the Pareto front of (workspace, cost) is chosen for every kernel. The
# knapsack is reduced to its core first, which leaves the solver a handful of variables.
# Every solver's answer is checked in bytes; if a solver fails, the fronts are merged
# exactly instead.
#
# The core is a 0-1 integer linear program ("Workspace Division" in Oyama et al.,
# CLUSTER 2018):
#
#     minimize    sum of cost[k, c] x[k, c]
#     subject to  sum over c of x[k, c] = 1 for every kernel k
#                 sum of workspace[k, c] x[k, c] <= total
#
# Bytes and milliseconds are some twelve orders of magnitude apart, too much for a
# floating-point solver. Both rows are therefore relative to the kernel's smallest item
# and scaled so that the total is 1e4 and the most expensive item 1e6.


Solver = Callable[[Core], Selection | None]
"""A solver returns a selection from a core, or None if it found none."""

_CAPACITY = 1e4

_DEAREST = 1e6

_MOST_NODES = 20_000

_log = logging.getLogger(__name__)


def ilp(core: Core, *, most_nodes: int = _MOST_NODES) -> Selection | None:
    """Solve the knapsack with CBC, as PuLP ships it; None if that finds nothing."""
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
    # Groups with one item left are decided: the program has a variable for each item of
    # the others, if it fits beside the smallest items of all groups.
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
    # Costs and workspaces are scaled to fixed ranges, as CBC's tolerances are absolute.
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


def divide(
    tables: Sequence[PerfTable], total: int, solve: Solver
) -> tuple[ConvPlan, ...]:
    """Choose the cheapest divisions whose workspaces add up to at most `total` bytes.

    Args:
        tables: Measurements, one table per kernel; equal tables are examined once.
        total: Bytes of workspace for all kernels together.
        solve: `ilp` (CBC through PuLP), `exact` (front merging) or another function.

    Returns:
        One plan per kernel, in order.

    Raises:
        PlanningError: The total is too small; the message has the shortfall.
    """
    if not tables:
        return ()
    numbers: dict[PerfTable, int] = {}  # hash every table once, as it takes long
    which = [numbers.setdefault(table, len(numbers)) for table in tables]
    shared = [pareto_front(table, total) for table in numbers]
    fronts = [shared[number] for number in which]
    needed = 0
    for table, front in zip(tables, fronts, strict=True):
        least = front[0].workspace if front else least_workspace(table)
        if least is None:
            raise no_plan(table, total, least)
        needed += least
    if needed > total:
        raise PlanningError(
            f"{len(tables)} kernels do not fit into {total} bytes of workspace in "
            f"total: the smallest plans need {needed} bytes, {needed - total} more"
        )
    items = [[Item(d.workspace, d.cost_ms) for d in front] for front in shared]
    # Often the bounds leave nothing to solve.
    core = reduce_to_core([items[number] for number in which], total)
    picks = core.incumbent if core.closed else _solve(core, solve)
    return tuple(
        ConvPlan(table.problem, front[i].steps, workspace_limit=total)
        for table, front, i in zip(tables, fronts, picks, strict=True)
    )


def _solve(core: Core, solve: Solver) -> tuple[int, ...]:
    name = name_of(solve)
    selection = solve(core)
    if selection is not None:
        excess = core.workspace(selection.picks) - core.capacity
        if excess > 0:
            _log.warning("solver %s exceeds the total by %d bytes", name, excess)
            selection = None
    if selection is None:
        _log.warning("solver %s gave no division; merging fronts instead", name)
        selection = exact(core)
    # A solver that stopped early or has a tolerance may be worse than the incumbent.
    return min(selection.picks, core.incumbent, key=core.cost)
