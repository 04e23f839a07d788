"""Choose residencies and convolution plans together by a mixed-integer linear program.

    minimize    T_forward + T_backward
    subject to  T_forward  >= compute of the forward pass,  offloaded bytes / B_out
                T_backward >= compute of the backward pass and recomputation,
                              offloaded bytes / B_in
                at every node: resident bytes <= budget

Every saved tensor is kept, offloaded or recomputed, and every convolution runs by one
plan of its Pareto front. An input of recomputation has to be resident before it is
needed; when follows from the residencies alone, so only residencies and plans are
integer variables. Copies are assumed to be instantaneous and hidden except for the two
bounds on the phases; a scheduler decides about their actual times.
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
from mucudnn.passes.linear_program import cbc, import_pulp, solver_errors
from mucudnn.passes.liveness import rounded
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import Residency
from mucudnn.passes.residency.candidates import candidates_of

MOST_SAVED = 80
"""Limit of saved tensors for graphs that are solved."""

_ROUNDS = 6
_SCALE = 1e4
_MOST_NODES = 200
_GAP = 0.005
"""Relative gap at which the solver stops; scheduling changes times by more."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Exact:
    """A solution of the program.

    Attributes:
        residency: Residencies of saved tensors; missing tensors are kept.
        step_ms: Objective: time of a step.
        gap: Relative optimality gap of `step_ms`.
    """

    residency: Mapping[str, Residency]
    step_ms: float
    gap: float


def exact(request: StepRequest, *, most_nodes: int = _MOST_NODES) -> Exact | None:
    """Solve for the best residencies that fit.

    If the rewritten graph needs more bytes than the program assumed, it is solved
    again with as many bytes less at those nodes.

    Returns:
        The solution, or None (and the reason in the log) if there is none, none was
        found within the limit, or no solver can be run.
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
    """Return bytes above the budget at nodes of the original step."""
    ready = request.rewritten(residency)
    occupancy = ready.least()
    found: dict[str, float] = {}
    most = 0.0
    for position, node in enumerate(ready.graph.nodes):
        most = max(most, occupancy[position] - request.budget)
        if (
            node.name in request.graph.positions
        ):  # recomputation counts for the node behind it
            if most > 0:
                found[node.name] = most
            most = 0.0
    return found


class _Program:
    """Program of a step with `extra` bytes in use at some nodes."""

    def __init__(self, request: StepRequest, extra: Mapping[str, float]) -> None:
        self._pulp = pulp = import_pulp()
        self._request, self._extra = request, extra
        self._model = pulp.LpProblem("residency", pulp.LpMinimize)
        self._candidates = {c.saved.name: c for c in candidates_of(request)}
        self._offload, self._recompute = (
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
            self._model += self._offload[name] + self._recompute[name] <= 1
            if math.isinf(candidate.recompute_ms):
                self._model += self._recompute[name] == 0
            if name in request.graph.immovable:
                self._model += self._offload[name] == 0
        self._add_memory(self._residency_variables())

    def solve(self, most_nodes: int) -> Exact | None:
        """Run the solver; return None if it found nothing."""
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
                (Residency.RECOMPUTE, self._recompute),
            )
            for name, variable in variables.items()
            if (variable.varValue or 0.0) > 0.5
        }
        step_ms = float(pulp.value(self._objective))
        gap = _GAP  # CBC stops at this gap and reports an optimal solution
        if not optimal:
            model.solve(cbc(most_nodes, mip=False))
            bound = float(pulp.value(self._objective))
            gap = (step_ms - bound) / max(bound, 1e-9)
        _log.debug("residencies: %.3f ms, gap %.1f %%", step_ms, 100 * gap)
        return Exact(residency, step_ms, gap)

    def _times(self) -> Any:
        """Return the sum of both phases' times, each bounded by compute and copies."""
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
            if math.isfinite(candidate.recompute_ms):
                backward += candidate.recompute_ms * self._recompute[name]
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

    def _residency_variables(self) -> Mapping[str, Mapping[int, Any]]:
        """Return variables of residency from given nodes on, until the first use.

        Once prefetched, a tensor stays resident. The nodes by which a tensor may be
        needed follow from those of the tensors recomputed from it, and so on.
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
        resident = {
            name: {
                at: self._pulp.LpVariable(f"a_{i}_{at}", 0.0, 1.0)
                for at in sorted(found)
            }
            for i, (name, found) in enumerate(since.items())
        }
        for name, found in resident.items():
            kept = 1.0 - self._offload[name] - self._recompute[name]
            for earlier, later in itertools.pairwise((kept, *found.values())):
                self._model += later >= earlier
        for name, parent in pairs:
            for at in wanted[name] & resident[parent].keys():
                own = 1.0 if at == saved[name].again else resident[name][at]
                self._model += resident[parent][at] >= self._recompute[name] + own - 1.0
        return resident

    def _add_memory(self, resident: Mapping[str, Mapping[int, Any]]) -> None:
        """Require the resident bytes at every node to fit the budget."""
        request, budget = self._request, self._request.budget
        always = request.rewritten({}).least()
        absent: list[list[tuple[Any, float]]] = [[] for _ in request.graph.nodes]
        for name, candidate in self._candidates.items():
            saved, since = candidate.saved, list(resident[name])
            nbytes = rounded(saved.nbytes)
            always.add(saved.last + 1, saved.again - 1, -nbytes)
            for position in range(saved.last + 1, saved.again):
                at = since[bisect_right(since, position) - 1]
                absent[position].append((resident[name][at], nbytes))
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
