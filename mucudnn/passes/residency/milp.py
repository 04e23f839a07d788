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

import logging
import math
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mucudnn.ir.graph import Phase
from mucudnn.passes.convolution.ilp import cbc, solver_errors
from mucudnn.passes.graph.recompute_chains import chain
from mucudnn.passes.liveness import rounded
from mucudnn.passes.planning.costs import first_plans
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.rewrite import Rewritten
from mucudnn.passes.residency import Residency, Saved, saved_tensors

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


def exact(step: StepRequest, *, most_nodes: int = _MOST_NODES) -> Exact | None:
    """The best residencies by the program, which fit.

    Where rewriting takes more bytes than the program knew of, it is solved again with
    as many bytes less at those nodes.

    Args:
        step: What to plan.
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
                found = _Program(step, extra).solve(most_nodes)
                if found is None:
                    return None
                excess = _excess(step, step.rewritten(found.residency))
                if not excess:
                    return found
                for name, nbytes in excess.items():
                    extra[name] = extra.get(name, 0.0) + nbytes
    except solver_errors() as error:
        _log.warning("the solver cannot be run: %s", error)
    return None


def _excess(step: StepRequest, ready: Rewritten) -> dict[str, float]:
    """Bytes beyond the budget, at nodes of the step as it was before rewriting."""
    plans = first_plans(ready.profile, "least")
    _, occupancy = ready.problem(plans, math.inf).least()
    found: dict[str, float] = {}
    most = 0.0
    for position, node in enumerate(ready.graph.nodes):
        most = max(most, occupancy[position] - step.budget)
        if node.name in step.graph.positions:  # what came before it, came for it
            if most > 0:
                found[node.name] = most
            most = 0.0
    return found


@dataclass(frozen=True, slots=True)
class _Source:
    """A saved tensor, and what it takes to compute it again."""

    saved: Saved
    nbytes: int
    again_ms: float
    parents: frozenset[str]


class _Program:
    def __init__(self, step: StepRequest, extra: Mapping[str, float]) -> None:
        # Imported here: it takes longer than planning does, and few plans need it.
        import pulp

        self._pulp = pulp
        self._step = step
        self._ready = step.rewritten({})
        self._budget = step.budget
        self._extra = extra
        self._model = pulp.LpProblem("residency", pulp.LpMinimize)
        self._sources = _sources(step)
        self._offload = self._binaries("o")
        self._again = self._binaries("r")
        self._need: dict[tuple[str, int], Any] = {}
        self._plans: dict[str, list[Any]] = {}

    def solve(self, most_nodes: int) -> Exact | None:
        """Build the program and run the solver."""
        pulp, model = self._pulp, self._model
        objective = self._objective()
        model += objective
        for name in self._sources:
            model += self._offload[name] + self._again[name] <= 1
        self._needs()
        self._memory()
        model.solve(cbc(most_nodes, gap=_GAP))
        if model.sol_status not in (
            pulp.LpSolutionOptimal,
            pulp.LpSolutionIntegerFeasible,
        ):
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
        step_ms = float(pulp.value(objective))
        gap = _GAP  # where it stops, and calls that optimal
        if model.sol_status != pulp.LpSolutionOptimal:
            model.solve(cbc(most_nodes, mip=False))
            bound = float(pulp.value(objective))
            gap = (step_ms - bound) / max(bound, 1e-9)
        _log.debug("residencies: %.3f ms, gap %.1f %%", step_ms, 100 * gap)
        return Exact(residency, step_ms, gap)

    def _binaries(self, kind: str) -> dict[str, Any]:
        pulp = self._pulp
        return {
            name: pulp.LpVariable(f"{kind}_{i}", cat=pulp.LpBinary)
            for i, name in enumerate(self._sources)
        }

    def _objective(self) -> Any:
        """The sum of both phases, each above its compute and its copies."""
        pulp, model, step = self._pulp, self._model, self._step
        profile = step.profile
        forward, backward = pulp.LpAffineExpression(), pulp.LpAffineExpression()
        for i, node in enumerate(step.graph.nodes):
            phase = forward if node.phase is Phase.FORWARD else backward
            front = profile.fronts.get(node.name)
            if front is None:
                phase += profile.node_ms[node.name]
                continue
            chosen = [
                pulp.LpVariable(f"p_{i}_{j}", cat=pulp.LpBinary)
                for j in range(len(front))
            ]
            self._plans[node.name] = chosen
            model += pulp.lpSum(chosen) == 1
            for plan, variable in zip(front, chosen, strict=True):
                phase += plan.time_ms * variable
        for name, source in self._sources.items():
            backward += source.again_ms * self._again[name]
        total = pulp.LpAffineExpression()
        for label, compute, rate in (
            ("forward", forward, profile.out_bytes_per_ms),
            ("backward", backward, profile.in_bytes_per_ms),
        ):
            ms = pulp.LpVariable(f"t_{label}", lowBound=0.0)
            model += ms >= compute
            model += ms >= pulp.lpSum(
                source.nbytes / rate * self._offload[name]
                for name, source in self._sources.items()
            )
            total += ms
        return total

    def _needs(self) -> None:
        """By when a tensor has to be back for what is computed again from it."""
        pulp = self._pulp
        events: dict[str, set[int]] = {name: set() for name in self._sources}
        latest_first = sorted(self._sources.values(), key=lambda s: -s.saved.first)
        for source in latest_first:
            name, again = source.saved.name, source.saved.again
            for parent in source.parents:
                until = self._sources[parent].saved.again
                events[parent] |= {e for e in (*events[name], again) if e < until}
        for i, (name, found) in enumerate(events.items()):
            earlier = None
            for event in sorted(found):
                need = pulp.LpVariable(f"n_{i}_{event}", 0.0, 1.0)
                self._need[name, event] = need
                if earlier is not None:
                    self._model += need >= earlier
                earlier = need
        for source in latest_first:
            name, again = source.saved.name, source.saved.again
            for parent in source.parents:
                for event in (*events[name], again):
                    if (parent, event) in self._need:
                        mine = self._need.get((name, event), 1.0)
                        self._model += self._need[parent, event] >= (
                            self._again[name] + mine - 1.0
                        )

    def _memory(self) -> None:
        """What is there at every node fits; only rows that say something new."""
        pulp, unit = self._pulp, max(self._budget, 1.0) / _SCALE
        largest: dict[tuple[str, ...], tuple[float, list[tuple[Any, float]]]] = {}
        fixed, absences = self._fixed(), self._absences()
        for position, node in enumerate(self._step.graph.nodes):
            terms = absences[position]
            fixed_here = fixed[position] + self._extra.get(node.name, 0.0)
            key = tuple(variable.name for variable, _ in terms)
            plans = self._plans.get(node.name, ())
            if len(plans) > 1:
                key = (*key, node.name)
                front = self._step.profile.fronts[node.name]
                terms = [
                    *terms,
                    *(
                        (v, rounded(p.workspace))
                        for v, p in zip(plans, front, strict=True)
                    ),
                ]
                fixed_here -= rounded(front[0].workspace)
            if key not in largest or fixed_here > largest[key][0]:
                largest[key] = (fixed_here, terms)
        for fixed_here, terms in largest.values():
            if fixed_here + sum(nbytes for _, nbytes in terms) > self._budget:
                self._model += (
                    pulp.LpAffineExpression([(v, b / unit) for v, b in terms])
                    <= (self._budget - fixed_here) / unit
                )

    def _fixed(self) -> list[float]:
        """Bytes at every node whatever is decided."""
        problem = self._ready.problem(
            first_plans(self._ready.profile, "least"), math.inf
        )
        _, occupancy = problem.least()
        for source in self._sources.values():
            saved = source.saved
            occupancy.add(saved.last + 1, saved.again - 1, -source.nbytes)
        return [occupancy[i] for i in range(len(occupancy))]

    def _absences(self) -> list[list[tuple[Any, float]]]:
        """At every node the variables that say what is there between its uses."""
        pulp = self._pulp
        found: list[list[tuple[Any, float]]] = [[] for _ in self._step.graph.nodes]
        for i, (name, source) in enumerate(self._sources.items()):
            saved = source.saved
            events = sorted(e for n, e in self._need if n == name)
            there = {
                k: pulp.LpVariable(f"a_{i}_{k}", 0.0, 1.0)
                for k in range(len(events) + 1)
            }
            for k, variable in there.items():
                kept = 1.0 - self._offload[name] - self._again[name]
                self._model += variable >= kept
                if k:
                    self._model += variable >= self._need[name, events[k - 1]]
            for position in range(saved.last + 1, saved.again):
                k = bisect_right(events, position)
                found[position].append((there[k], source.nbytes))
        return found


def _sources(step: StepRequest) -> dict[str, _Source]:
    return {source.saved.name: source for source in _each_source(step)}


def _each_source(step: StepRequest) -> Iterator[_Source]:
    graph = step.graph
    tensors = saved_tensors(graph)
    names = {saved.name for saved in tensors}
    for saved in tensors:
        nodes = chain(graph, saved.name, names.__contains__)
        read = {graph.storages[t] for node in nodes for t in node.inputs}
        yield _Source(
            saved,
            rounded(saved.nbytes),
            sum(step.profile.node_ms[node.name] for node in nodes),
            frozenset((read & names) - {saved.name}),
        )
