"""Linear program of `lower_bound`: variables and constraints.

Bytes are scaled such that the budget is 1000; times are in ms.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import Phase
from mucudnn.passes.cbc import cbc, import_pulp
from mucudnn.passes.graph.saved_tensors import saved_tensors
from mucudnn.passes.liveness import rounded
from mucudnn.passes.planning.bound.absences import (
    Absence,
    Chains,
    absences_of,
    bytes_of_operands,
    phases_again,
    windows_of,
)
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import Residency
from mucudnn.passes.scheduling.costs import first_plans

__all__ = ["Relaxation", "fastest_ms"]

_WINDOWS = 16
"""Number of windows. Twice as many tighten the bound by 1 % of a step, and take the
solver four times as long."""

_SMALL = 1e-3
"""Fraction of the budget below which storages are free to be absent."""

_SCALE = 1e3
_HALF = 0.5


def _plans(request: StepRequest) -> dict[str, Sequence[ConvPlan]]:
    fronts = request.profile.fronts
    if request.convolutions == "dynamic":
        return dict(fronts)
    chosen = first_plans(request.profile, request.convolutions, request.plans)
    return {name: (plan,) for name, plan in chosen.items()}


def fastest_ms(request: StepRequest) -> dict[str, float]:
    """Return the least time of each node."""
    found = {n.name: request.profile.node_ms[n.name] for n in request.graph.nodes}
    for name, plans in _plans(request).items():
        found[name] = min(plan.time_ms for plan in plans)
    return found


class _Gap:
    """Variables of one absence, by index of its windows."""

    def __init__(
        self, absence: Absence, resident: Any, prefetched: Any, recomputed: Any
    ) -> None:
        self.absence = absence
        self.resident: Mapping[int, Any] = resident
        self.prefetched: Mapping[int, Any] = prefetched
        self.recomputed: Mapping[int, Any] = recomputed

    def resident_after(self, index: int) -> list[Any]:
        """Return the terms of the fraction resident at the end of a window."""
        return [self.resident[index], *self.restored_in(index)]

    def restored_in(self, index: int) -> list[Any]:
        """Return the terms of the fraction restored in a window."""
        found = (self.prefetched.get(index), self.recomputed.get(index))
        return [variable for variable in found if variable is not None]


class Relaxation:
    """Linear program of a request with a budget; see `lower_bound`.

    Attributes:
        absences: The absences that have variables.
    """

    def __init__(self, request: StepRequest) -> None:
        self._pulp = import_pulp()
        self._request = request
        graph, profile = request.graph, request.profile
        self._ms = fastest_ms(request)
        self._moving = request.persistent if request.hosted is None else request.hosted
        self._moving &= request.persistent
        weights = [self._ms[node.name] for node in graph.nodes]
        for saved in saved_tensors(graph):
            weights[saved.first] += saved.nbytes / profile.out_bytes_per_ms
            weights[saved.again] += saved.nbytes / profile.in_bytes_per_ms
        phases = itertools.pairwise(node.phase for node in graph.nodes)
        borders = [i + 1 for i, (one, two) in enumerate(phases) if one is not two]
        self._windows = windows_of(weights, borders[:1], _WINDOWS)
        self.absences = absences_of(
            graph, self._windows, self._moving, _SMALL * request.budget
        )
        count = len(self._windows)
        self._compute: list[list[tuple[Any, float]]] = [[] for _ in range(count)]
        self._fixed_ms = [0.0] * count
        self._out: list[list[tuple[Any, float]]] = [[] for _ in range(count)]
        self._in: list[list[tuple[Any, float]]] = [[] for _ in range(count)]
        self._names = itertools.count()
        self._outs: dict[str, dict[int, Any]] = {}
        self._drops: dict[str, Any] = {}
        self._gaps: dict[str, list[_Gap]] = {}
        self._runs: dict[str, dict[int, Any]] = {}
        self._chains = Chains(graph)
        sliced = any(Phase.FORWARD in phases_again(a.storage) for a in self.absences)
        self._first = self._windows.of(borders[0]) if borders and not sliced else 0

    def solve(self) -> tuple[float, dict[str, Residency]] | None:
        """Return the optimum in ms and its rounded residencies; None if not solved.

        The optimum is infinite if the program is infeasible.
        """
        self._model = self._pulp.LpProblem("bound", self._pulp.LpMinimize)
        for absence in self.absences:
            self._add(absence)
        self._add_recompute_inputs()
        self._add_memory()
        objective = self._times()
        self._model += objective
        self._model.solve(cbc(1, mip=False))
        if self._model.status == self._pulp.LpStatusInfeasible:
            return math.inf, {}
        if self._model.status != self._pulp.LpStatusOptimal:
            return None
        return float(self._pulp.value(objective)), self._rounded()

    def _variable(self, most: float | None = 1.0) -> Any:
        return self._pulp.LpVariable(f"x{next(self._names)}", 0.0, most)

    def _sum(self, terms: Iterable[tuple[Any, float]]) -> Any:
        return self._pulp.LpAffineExpression(list(terms))

    def _add(self, absence: Absence) -> None:
        """Add the variables and the flow constraints of an absence."""
        windows, nbytes = absence.windows, absence.nbytes
        indices = range(len(windows))
        resident = {t: self._variable() for t in indices}
        prefetched = {} if absence.stuck else {t: self._variable() for t in indices}
        recomputed = {
            t: self._variable() for t in indices if windows[t] in absence.again
        }
        gap = _Gap(absence, resident, prefetched, recomputed)
        self._gaps.setdefault(absence.storage, []).append(gap)
        for t, variable in prefetched.items():
            self._in[windows[t]].append((variable, nbytes))
        for t, variable in recomputed.items():
            self._run_again(absence, windows[t], variable)
        dropped = [self._dropped(absence.storage)] if recomputed else []
        if recomputed:
            total = self._sum([(v, 1.0) for v in recomputed.values()])
            self._model += dropped[0] <= total
        for t in indices:
            copied_out = self._copied_out(absence, t)
            if copied_out is not None:
                away = self._sum(
                    [(v, 1.0) for v in (resident[t], *dropped, *copied_out)]
                )
                self._model += away >= 1
                if t in prefetched:
                    copied = self._sum([(v, 1.0) for v in copied_out])
                    self._model += prefetched[t] <= copied
            following = 1.0 if t + 1 == len(windows) else resident[t + 1]
            self._model += (
                self._sum([(v, 1.0) for v in gap.resident_after(t)]) >= following
            )

    def _dropped(self, storage: str) -> Any:
        """Return the variable for the fraction ever dropped without a copy."""
        if storage not in self._drops:
            self._drops[storage] = self._variable()
        return self._drops[storage]

    def _copied_out(self, absence: Absence, index: int) -> list[Any] | None:
        """Return the terms copied out by the end of a window; None if clean."""
        if absence.clean:
            return None
        if absence.stuck:
            return []
        graph, windows = self._request.graph, self._windows
        outs = self._outs.setdefault(absence.storage, {})
        if absence.before >= windows.count:
            possible = absence.windows[: index + 1]
        else:
            producer = graph.producers.get(absence.storage)
            first = 0 if producer is None else graph.positions[producer.name]
            possible = windows.between(first, windows.starts[absence.windows[index]])
        for window in possible:
            if window not in outs:
                outs[window] = self._variable()
                self._out[window].append((outs[window], absence.nbytes))
        return [outs[window] for window in possible]

    def _run_again(self, absence: Absence, window: int, variable: Any) -> None:
        """Add the time of recomputing a storage in a window.

        Its producer runs every time, and so do nodes of its chain alone. Nodes shared
        with other chains have run at least once by then.
        """
        graph = self._request.graph
        producer = graph.producers[absence.storage].name
        for name in self._chains.chains.get(absence.storage, (producer,)):
            first = graph.positions[name]
            read = {graph.storages[t] for t in graph.nodes[first].inputs}
            changed = (
                at
                for at, storages in graph.overwritten.items()
                if first < at <= absence.before and not read.isdisjoint(storages)
            )
            if name in self._chains.shared:
                if not any(changed):
                    ran = self._runs_until(name, window)
                    self._model += self._sum([(v, 1.0) for v in ran]) >= variable
            elif name == producer or not any(changed):
                self._compute[window].append((variable, self._again_ms(name)))

    def _runs_until(self, node: str, window: int) -> list[Any]:
        """Return the terms of a node's second run by the end of a window."""
        runs = self._runs.setdefault(node, {})
        for w in range(self._first, window + 1):
            if w not in runs:
                runs[w] = self._variable(None)
                self._compute[w].append((runs[w], self._again_ms(node)))
        return [variable for w, variable in runs.items() if w <= window]

    def _again_ms(self, node: str) -> float:
        """Return the least time of recomputing a node."""
        return self._request.profile.once_more_ms.get(node, self._ms[node])

    def _add_recompute_inputs(self) -> None:
        """Require saved inputs of recomputation to be resident."""
        for name, gaps in self._gaps.items():
            for parent in self._chains.parents.get(name, ()):
                for gap, above in itertools.product(gaps, self._gaps.get(parent, ())):
                    windows = above.absence.windows
                    for t, variable in gap.recomputed.items():
                        window = gap.absence.windows[t]
                        if window not in windows[1:]:
                            continue
                        at = windows.index(window)
                        known = [*above.resident_after(at - 1), *above.restored_in(at)]
                        resident = self._sum([(v, 1.0) for v in known])
                        self._model += resident >= variable

    def _add_memory(self) -> None:
        """Require resident bytes and workspaces at every node to fit the budget."""
        request, budget = self._request, self._request.budget
        operands = bytes_of_operands(request.graph, request.profile, self._moving)
        fixed = [float(nbytes) for nbytes in operands]
        rows: list[list[tuple[Any, float]]] = [[] for _ in fixed]
        for gap in itertools.chain(*self._gaps.values()):
            absence = gap.absence
            for position in range(absence.after + 1, absence.before):
                at = self._windows.within(absence, position)
                row = rows[position % len(fixed)]
                row.append((gap.resident[at], float(absence.nbytes)))
        plans = _plans(request)
        unit = max(budget, 1.0) / _SCALE
        known: dict[frozenset[Any], float] = {}
        for position, node in enumerate(request.graph.nodes):
            window = self._windows.of(position)
            front = _hull(plans.get(node.name, ()))
            terms = rows[position]
            chosen = [self._variable() for _ in front[1:]]
            if not front:
                self._fixed_ms[window] += self._ms[node.name]
            else:
                first = front[0]
                self._fixed_ms[window] += first[1]
                fixed[position] += first[0]
                if chosen:
                    self._model += self._sum([(v, 1.0) for v in chosen]) <= 1
                for variable, (nbytes, ms) in zip(chosen, front[1:], strict=True):
                    terms = [*terms, (variable, nbytes - first[0])]
                    self._compute[window].append((variable, ms - first[1]))
            if fixed[position] + sum(nbytes for _, nbytes in terms) <= budget:
                continue
            key = frozenset(variable.name for variable, _ in terms)
            if known.get(key, -1.0) < fixed[position]:
                known[key] = fixed[position]
                row = self._sum([(v, nbytes / unit) for v, nbytes in terms])
                self._model += row <= (budget - fixed[position]) / unit

    def _times(self) -> Any:
        """Return the sum of the windows' times, each bounded by compute and copies."""
        profile = self._request.profile
        total = []
        for window in range(len(self._windows)):
            ms = self._variable(None)
            total.append((ms, 1.0))
            compute = self._sum(self._compute[window])
            self._model += ms - compute >= self._fixed_ms[window]
            for copies, rate in (
                (self._out[window], profile.out_bytes_per_ms),
                (self._in[window], profile.in_bytes_per_ms),
            ):
                if copies and math.isfinite(rate):
                    self._model += ms >= self._sum([(v, n / rate) for v, n in copies])
        return self._sum(total)

    def _rounded(self) -> dict[str, Residency]:
        found = {}
        for saved in saved_tensors(self._request.graph):
            dropped = _value(self._drops.get(saved.name))
            copied = sum(map(_value, self._outs.get(saved.name, {}).values()))
            if dropped > max(_HALF, copied):
                found[saved.name] = Residency.RECOMPUTE
            elif copied > _HALF:
                found[saved.name] = Residency.OFFLOAD
        return found


def _value(variable: Any) -> float:
    return 0.0 if variable is None else float(variable.varValue or 0.0)


def _hull(plans: Sequence[ConvPlan]) -> list[tuple[float, float]]:
    """Return (bytes, ms) of the plans on the lower convex hull."""
    found: list[tuple[float, float]] = []
    points = ((float(rounded(plan.workspace)), plan.time_ms) for plan in plans)
    for x, y in sorted(points):
        if found and (y >= found[-1][1]):
            continue
        while len(found) > 1:
            (x0, y0), (x1, y1) = found[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            found.pop()
        found.append((x, y))
    return found
