"""Residencies and convolution plans together, as a mixed-integer linear program.

    minimise    T_forward + T_backward
    subject to  T_forward  >= compute of the forward pass,  offloaded bytes / B_out
                T_backward >= compute of the backward pass and of what is computed
                              again,  offloaded bytes / B_in
                at every node: bytes of what is there <= budget

Every saved tensor is kept, offloaded or computed again, every convolution runs by one
plan of its Pareto front. A tensor that others are computed again from has to be back
before them: `need` says by when, and follows from the residencies alone, so that only
these and the plans are integers. Copies are assumed to be hidden but for the two bounds
on the phases, and to leave and return in no time; a scheduler has the last word.
"""

import itertools
import logging
import math
import warnings
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mucudnn.ir.graph import Phase
from mucudnn.passes.cbc import cbc, import_pulp, solver_errors
from mucudnn.passes.liveness import rounded
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import Residency
from mucudnn.passes.residency.candidates import candidates_of

__all__ = ["MOST_SAVED", "Exact", "exact"]

MOST_SAVED = 80
"""Saved tensors of graphs that are small enough."""

_ROUNDS = 6
_SCALE = 1e4
_MOST_NODES = 200
_GAP = 0.005
"""Better is not worth the effort: what a schedule makes of it differs by more."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Exact:
    """A solution of the program.

    Attributes:
        residency: Of saved tensors; what is left out is kept.
        step_ms: What the program says a step takes.
        gap: How far at most `step_ms` is above the best possible, as a fraction of it.
    """

    residency: Mapping[str, Residency]
    step_ms: float
    gap: float


def exact(request: StepRequest, *, most_nodes: int = _MOST_NODES) -> Exact | None:
    """The best residencies by the program, which fit.

    Where rewriting takes more bytes than the program knew of, it is solved again with
    as many bytes less at those nodes.

    Args:
        request: What to plan.
        most_nodes: Of the solver's tree, each time. No clock is looked at: plans must
            not depend on what else a machine does.

    Returns:
        The solution, or None (and the reason in the log) if there is none, none was
        found in so many nodes, or no solver can be run.
    """
    extra: dict[str, float] = {}
    try:
        with warnings.catch_warnings():
            # PuLP 3.3 announces 4.0, which pyproject.toml excludes.
            warnings.simplefilter("ignore", DeprecationWarning)
            for _ in range(_ROUNDS):
                found = _Program(request, extra).solve(most_nodes)
                excess = found and _excess(request, found.residency)
                if not excess:
                    return found
                for name, nbytes in excess.items():
                    extra[name] = extra.get(name, 0.0) + nbytes
    except solver_errors() as error:
        _log.warning("the solver cannot be run: %s", error)
    return None


def _excess(
    request: StepRequest, residency: Mapping[str, Residency]
) -> dict[str, float]:
    """Bytes beyond the budget, at nodes of the step as it was before rewriting."""
    ready = request.rewritten(residency)
    occupancy = ready.least()
    found: dict[str, float] = {}
    most = 0.0
    for position, node in enumerate(ready.graph.nodes):
        most = max(most, occupancy[position] - request.budget)
        if node.name in request.graph.positions:  # what came before it, came for it
            if most > 0:
                found[node.name] = most
            most = 0.0
    return found


class _Program:
    """The program of a step, `extra` bytes more in use at some nodes."""

    def __init__(self, request: StepRequest, extra: Mapping[str, float]) -> None:
        self._pulp = pulp = import_pulp()
        self._request, self._extra = request, extra
        self._model = pulp.LpProblem("residency", pulp.LpMinimize)
        self._candidates = {c.saved.name: c for c in candidates_of(request)}
        self._offload, self._again = (
            {
                name: pulp.LpVariable(f"{kind}_{i}", cat=pulp.LpBinary)
                for i, name in enumerate(self._candidates)
            }
            for kind in "or"
        )
        self._plans: dict[str, list[Any]] = {}
        self._objective = self._times()
        self._model += self._objective
        for name, candidate in self._candidates.items():
            self._model += self._offload[name] + self._again[name] <= 1
            if math.isinf(candidate.again_ms):
                self._model += self._again[name] == 0
            if name in request.graph.immovable:
                self._model += self._offload[name] == 0
        self._add_memory(self._there())

    def solve(self, most_nodes: int) -> Exact | None:
        """Run the solver."""
        pulp, model = self._pulp, self._model
        model.solve(cbc(most_nodes, gap=_GAP))
        optimal = model.sol_status == pulp.LpSolutionOptimal
        if not optimal and model.sol_status != pulp.LpSolutionIntegerFeasible:
            _log.info("no residencies found: %s", pulp.LpStatus[model.status])
            return None
        residency = {
            name: choice
            for choice, variables in (
                (Residency.OFFLOAD, self._offload),
                (Residency.RECOMPUTE, self._again),
            )
            for name, variable in variables.items()
            if (variable.varValue or 0.0) > 0.5
        }
        step_ms = float(pulp.value(self._objective))
        gap = _GAP  # where it stops, and calls that optimal
        if not optimal:
            model.solve(cbc(most_nodes, mip=False))
            bound = float(pulp.value(self._objective))
            gap = (step_ms - bound) / max(bound, 1e-9)
        _log.debug("residencies: %.3f ms, gap %.1f %%", step_ms, 100 * gap)
        return Exact(residency, step_ms, gap)

    def _times(self) -> Any:
        """The sum of both phases, each above its compute and its copies."""
        pulp, profile = self._pulp, self._request.profile
        forward, backward = pulp.LpAffineExpression(), pulp.LpAffineExpression()
        for i, node in enumerate(self._request.graph.nodes):
            phase = forward if node.phase is Phase.FORWARD else backward
            front = profile.fronts.get(node.name, ())
            chosen = self._plans[node.name] = [
                pulp.LpVariable(f"p_{i}_{j}", cat=pulp.LpBinary)
                for j in range(len(front))
            ]
            if front:
                self._model += pulp.lpSum(chosen) == 1
            else:
                phase += profile.node_ms[node.name]
            for plan, variable in zip(front, chosen, strict=True):
                phase += plan.time_ms * variable
        for name, candidate in self._candidates.items():
            if math.isfinite(candidate.again_ms):
                backward += candidate.again_ms * self._again[name]
        total = pulp.LpAffineExpression()
        for label, compute, rate in (
            ("forward", forward, profile.out_bytes_per_ms),
            ("backward", backward, profile.in_bytes_per_ms),
        ):
            ms = pulp.LpVariable(f"t_{label}", lowBound=0.0)
            self._model += ms >= compute
            self._model += ms >= pulp.lpSum(
                rounded(candidate.saved.nbytes) / rate * self._offload[name]
                for name, candidate in self._candidates.items()
            )
            total += ms
        return total

    def _there(self) -> Mapping[str, Mapping[int, Any]]:
        """Tensor -> from which node on -> whether it is there until its next use.

        Once swapped in it is kept. By when that has to be for what is computed again
        from it follows from when that is needed, and so on.
        """
        saved = {name: c.saved for name, c in self._candidates.items()}
        latest = sorted(self._candidates.values(), key=lambda c: -c.saved.first)
        pairs = [(c.saved.name, parent) for c in latest for parent in c.parents]
        since = {name: {s.last + 1} for name, s in saved.items()}
        wanted = {name: {s.again} for name, s in saved.items()}
        for name, parent in pairs:
            earlier = {at for at in wanted[name] if at < saved[parent].again}
            since[parent] |= earlier
            wanted[parent] |= earlier
        there = {
            name: {
                at: self._pulp.LpVariable(f"a_{i}_{at}", 0.0, 1.0)
                for at in sorted(found)
            }
            for i, (name, found) in enumerate(since.items())
        }
        for name, found in there.items():
            kept = 1.0 - self._offload[name] - self._again[name]
            for earlier, later in itertools.pairwise((kept, *found.values())):
                self._model += later >= earlier
        for name, parent in pairs:
            for at in wanted[name] & there[parent].keys():
                mine = 1.0 if at == saved[name].again else there[name][at]
                self._model += there[parent][at] >= self._again[name] + mine - 1.0
        return there

    def _add_memory(self, there: Mapping[str, Mapping[int, Any]]) -> None:
        """What is there at every node fits."""
        request, budget = self._request, self._request.budget
        always = request.rewritten({}).least()
        absent: list[list[tuple[Any, float]]] = [[] for _ in request.graph.nodes]
        for name, candidate in self._candidates.items():
            saved, since = candidate.saved, list(there[name])
            nbytes = rounded(saved.nbytes)
            always.add(saved.last + 1, saved.again - 1, -nbytes)
            for position in range(saved.last + 1, saved.again):
                at = since[bisect_right(since, position) - 1]
                absent[position].append((there[name][at], nbytes))
        unit = max(budget, 1.0) / _SCALE
        for position, node in enumerate(request.graph.nodes):
            front = request.profile.fronts.get(node.name, ())
            sizes = [rounded(plan.workspace) for plan in front]
            terms = [
                *absent[position],
                *zip(self._plans[node.name], sizes, strict=True),
            ]
            fixed = always[position] + self._extra.get(node.name, 0.0) - sum(sizes[:1])
            if fixed + sum(nbytes for _, nbytes in terms) > budget:
                scaled = self._pulp.LpAffineExpression(
                    [(v, b / unit) for v, b in terms]
                )
                self._model += scaled <= (budget - fixed) / unit
