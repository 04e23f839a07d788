"""The core of a workspace division as a 0-1 integer linear program, through PuLP.

    minimise    sum of cost[k, c] x[k, c]
    subject to  sum over c of x[k, c] = 1 for every kernel k
                sum of workspace[k, c] x[k, c] <= total

("Workspace Division" in Oyama et al., CLUSTER 2018.) Bytes and milliseconds are some
twelve orders of magnitude apart, which a floating-point solver takes badly. So both
rows are written as what an item takes beyond its kernel's smallest item, on scales
where the total is 1e4 and the dearest item 1e6, and the caller checks the answer in
bytes.
"""

import logging
import warnings
from math import inf, isfinite
from typing import Any

from mucudnn.passes.convolution.knapsack import Core, Selection

__all__ = ["cbc", "ilp", "solver_errors"]

_CAPACITY = 1e4
_DEAREST = 1e6
_MOST_NODES = 20_000

_log = logging.getLogger(__name__)


def ilp(core: Core, time_limit_s: float) -> Selection | None:
    """Solve with CBC as PuLP ships it.

    Args:
        core: What to choose from.
        time_limit_s: Seconds after which CBC returns the best it has; what that is
            depends on the machine. Infinity leaves it to the number of nodes.

    Returns:
        The selection, or None (and the reason in the log) if no solver can be run or it
        found nothing in so many nodes.
    """
    try:
        with warnings.catch_warnings():
            # PuLP 3.3 announces 4.0, which pyproject.toml excludes.
            warnings.simplefilter("ignore", DeprecationWarning)
            return _solve(core, time_limit_s)
    except solver_errors() as error:
        _log.warning("the ILP solver cannot be run: %s", error)
        return None


def cbc(
    most_nodes: int, time_limit_s: float = inf, *, gap: float = 0.0, mip: bool = True
) -> Any:
    """CBC, bounded by its nodes: the same program has the same answer everywhere.

    Args:
        most_nodes: Of its tree; then it returns the best it has.
        time_limit_s: Seconds as well, for who asks for it and knows what it costs.
        gap: How far from the best possible is good enough, as a fraction.
        mip: Whether to keep integers whole.
    """
    import pulp

    return pulp.PULP_CBC_CMD(
        msg=False,
        mip=mip,
        threads=1,
        maxNodes=most_nodes,
        gapRel=gap or None,
        timeLimit=time_limit_s if isfinite(time_limit_s) else None,
        options=["randomSeed 1", "randomCbcSeed 1"],
    )


def solver_errors() -> tuple[type[Exception], ...]:
    """What is raised where CBC cannot be run."""
    try:
        from pulp import PulpError
    except ImportError:
        return (ImportError, OSError)
    return (PulpError, OSError)


def _solve(core: Core, time_limit_s: float) -> Selection | None:
    # Imported here: it takes longer than planning does, and few plans need it.
    import pulp

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
    model.solve(cbc(_MOST_NODES, time_limit_s))
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        _log.warning("CBC found no solution: %s", pulp.LpStatus[model.status])
        return None
    picks = [items[0] for items in core.open]
    for (g, i), x in chosen.items():
        if x.varValue is not None and x.varValue > 0.5:
            picks[g] = i
    return Selection(tuple(picks), model.sol_status == pulp.LpSolutionOptimal)
