"""Lower bound on the step time within a budget, by a linear relaxation."""

import itertools
import logging
import math
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.profile import Profile
from mucudnn.passes.graph.rematerialize import recompute_chain, saved_tensors
from mucudnn.passes.graph.split import of_whole
from mucudnn.passes.linear_program import cbc, import_pulp, solver_errors
from mucudnn.passes.liveness import Use, rounded, uses_of
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import Residency
from mucudnn.passes.scheduling.problem import first_plans


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """Partition of a step's nodes into windows of consecutive nodes.

    Attributes:
        starts: Position of the first node of each window, ascending from 0.
        count: Number of nodes of the step.
    """

    starts: tuple[int, ...]
    count: int

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, position: int) -> int:
        """Return the window of a position, modulo the step."""
        return bisect_right(self.starts, position % max(1, self.count)) - 1

    def within(self, gap: "OffloadGap", position: int) -> int:
        """Return the index among a gap's windows of a position in the gap."""
        window = self.of(position)
        if position < self.count:
            return gap.windows.index(window)
        return len(gap.windows) - 1 - gap.windows[::-1].index(window)

    def between(self, first: int, last: int) -> tuple[int, ...]:
        """Return the windows between two positions, even across the end of a step."""
        begin, end = self.of(first), self.of(last)
        if last < self.count:
            return tuple(range(begin, end + 1))
        return (*range(begin, len(self)), *range(end + 1))


@dataclass(frozen=True, slots=True)
class OffloadGap:
    """A gap between two uses in which a storage may be off the device.

    Attributes:
        storage: Name of the storage, or of one of several equivalent storages.
        nbytes: Bytes of all equivalent storages.
        after: Position of the use before the gap.
        before: Position of the use behind the gap; `count` or more in the next step.
        windows: Windows that the gap crosses, in order.
        clean: Whether the host already has the bytes, so that no offload is needed.
        stuck: Whether the storage cannot be copied.
        again: Windows in which the storage can be recomputed.
    """

    storage: str
    nbytes: int
    after: int
    before: int
    windows: tuple[int, ...]
    clean: bool = False
    stuck: bool = False
    again: frozenset[int] = frozenset()


def group_nodes(
    weights: Sequence[float], borders: Sequence[int], most: int
) -> NodeGroups:
    """Divide nodes into windows of about equal weight."""
    total = sum(weights)
    starts = {0, *(at for at in borders if 0 < at < len(weights))}
    marks = itertools.accumulate(weights)
    quota = 1
    for position, mark in enumerate(marks):
        if total and mark >= quota * total / most and position + 1 < len(weights):
            starts.add(position + 1)
            quota = int(mark * most / total) + 1
    return NodeGroups(tuple(sorted(starts)), len(weights))


def offload_gaps(
    graph: Graph, windows: NodeGroups, moving: frozenset[str], least_bytes: float
) -> list[OffloadGap]:
    """Return all absences; those of equivalent parameters and state are merged."""
    found: list[OffloadGap] = []
    alike: dict[tuple[int, ...], list[OffloadGap]] = {}
    for use in uses_of(graph).values():
        if use.persistent and use.storage in moving:
            for absence in _of_persistent(use, windows):
                key = (*absence.windows, windows.count * absence.clean)
                alike.setdefault(key, []).append(absence)
        elif not use.persistent and use.nbytes >= least_bytes:
            found += _of_activation(graph, use, windows)
    return [*found, *map(_merge, alike.values())]


def _of_activation(graph: Graph, use: Use, windows: NodeGroups) -> Iterator[OffloadGap]:
    producer = graph.producers.get(use.storage)
    stuck = use.storage in graph.immovable
    for after, before in use.gaps():
        if before >= windows.count:
            continue
        crossed = windows.between(after, before)
        again: frozenset[int] = frozenset()
        if producer is not None and producer.remakes(use.storage):
            phases = phases_again(use.storage)
            if graph.nodes[before].phase in phases:
                again = frozenset(w for w in crossed if _any(graph, windows, w, phases))
        if again or not stuck:
            yield OffloadGap(
                use.storage,
                use.nbytes,
                after,
                before,
                crossed,
                stuck=stuck,
                again=again,
            )


def phases_again(storage: str) -> tuple[Phase, ...]:
    """Return the phases in which a storage may be recomputed; see `Residency`."""
    sliced = of_whole(storage) != storage
    return (Phase.FORWARD, Phase.BACKWARD) if sliced else (Phase.BACKWARD,)


def _any(
    graph: Graph, windows: NodeGroups, window: int, phases: tuple[Phase, ...]
) -> bool:
    stop = [*windows.starts, windows.count][window + 1]
    nodes = graph.nodes[windows.starts[window] : stop]
    return any(node.phase in phases for node in nodes)


def _of_persistent(use: Use, windows: NodeGroups) -> Iterator[OffloadGap]:
    for after, before in use.gaps():
        clean = before < windows.count or not use.writes
        crossed = windows.between(after, before)
        yield OffloadGap(use.storage, use.nbytes, after, before, crossed, clean=clean)


def _merge(alike: Sequence[OffloadGap]) -> OffloadGap:
    """Merge absences in the same windows into one that all of them cover."""
    return replace(
        alike[0],
        nbytes=sum(absence.nbytes for absence in alike),
        after=max(absence.after for absence in alike),
        before=min(absence.before for absence in alike),
    )


def bytes_of_operands(
    graph: Graph, profile: Profile, moving: frozenset[str]
) -> list[int]:
    """Return the bytes that must be resident at every node in any plan.

    These are a node's operands (its result in place where possible), its scratch memory
    unless it is a convolution, resident tensors, and results of the step.
    """
    count = len(graph.nodes)
    found = [rounded(profile.workspaces.get(node.name, 0)) for node in graph.nodes]
    for position, node in enumerate(graph.nodes):
        found[position] -= _in_place_bytes(graph, node)
    for use in uses_of(graph).values():
        if use.persistent and use.storage not in moving:
            at: Sequence[int] = range(count)
        elif use.positions and use.positions[-1] == count and not use.persistent:
            last = use.positions[-2] if len(use.positions) > 1 else 0
            at = [*use.positions[:-2], *range(last, count)]
        else:
            at = use.positions
        for position in at:
            if position < count:
                found[position] += use.nbytes
    return found


def _in_place_bytes(graph: Graph, node: Node) -> int:
    """Return the bytes a node saves if its first result is in place."""
    if not node.traits.overwrites or not node.outputs:
        return 0
    result = graph.tensors[node.outputs[0]]
    if result.alias is not None:
        return 0
    fixed = {graph.storages[name] for name in graph.inputs}
    for index in node.traits.overwrites:
        overwritten = graph.storages[node.inputs[index]]
        if (
            overwritten not in fixed
            and graph.tensors[overwritten].nbytes == result.nbytes
        ):
            return rounded(result.nbytes)
    return 0


class RecomputeChains:
    """Recompute chains of the saved tensors of a training graph.

    Attributes:
        chains: Nodes of each saved tensor's chain if all other saved tensors are
            resident.
        parents: Saved tensors that each saved tensor's chain reads.
        shared: Nodes in several chains.
    """

    def __init__(self, graph: Graph) -> None:
        names = dict.fromkeys(saved.name for saved in saved_tensors(graph))
        self.chains: dict[str, tuple[str, ...]] = {}
        self.parents: dict[str, tuple[str, ...]] = {}
        count: Counter[str] = Counter()
        for name in names:
            nodes = recompute_chain(graph, name, names.__contains__)
            self.chains[name] = tuple(node.name for node in nodes)
            read = {graph.storages[t] for node in nodes for t in node.inputs}
            self.parents[name] = tuple(n for n in names if n in read and n != name)
            count.update(self.chains[name])
        self.shared = frozenset(name for name, times in count.items() if times > 1)


# Lower bound of the step time within a budget, over all residencies and schedulers.
#
# The bound is the optimum of a linear program over windows of consecutive nodes. For
# every storage and every gap between two uses, variables are the fraction that is
# resident in each window, the fractions copied out and in, and the fraction recomputed:
#
#     minimize    sum of the windows' times
#     subject to  a window's time >= its nodes and recomputation,
#                                    bytes out / B_out,  bytes in / B_in
#                 at every node: operands + resident fractions + workspace <= budget
#                 an absent fraction was copied out before, or is recomputed
#                 a restored fraction was copied in or recomputed since
#                 recomputation has its saved inputs resident
#
# Every plan gives a feasible solution that takes no longer: let a fraction be the part
# of a storage that is on the device at the worst moment of a window. A plan copies,
# frees and allocates whole storages, so the fractions never exceed what the plan holds.
# The optimum is therefore no more than the time of any plan. Neglected effects (small
# tensors, memory of intermediate recomputation, waiting within a window) only lower the
# bound. Steps whose copies overlap with neighbouring steps are considered in their
# steady state.


MOST_ABSENCES = 700
"""Absences up to which the program is solved as a part of planning, in a second."""


_SLACK = 1e-6
"""Relative error allowed for the solver."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Lower bound of the step time within a budget.

    Attributes:
        step_ms: The bound; infinity if no plan fits.
        residency: The solution rounded to residencies, to start a search from.
        reason: Why the bound is only the compute time, if the program was not solved.
    """

    step_ms: float
    residency: Mapping[str, Residency] = field(default_factory=dict)
    reason: str = ""


def lower_bound(request: StepRequest, most_absences: int = MOST_ABSENCES) -> LowerBound:
    """Return the lower bound of a request, over all policies and schedulers.

    With more than `most_absences` absences it is the compute time.
    """
    compute = sum(fastest_ms(request).values())
    if math.isinf(request.budget):
        return LowerBound(compute)
    least = _SMALL * request.budget
    uses = uses_of(request.graph).values()
    gaps = sum(len(u.gaps()) for u in uses if not u.persistent and u.nbytes >= least)
    if gaps > most_absences:  # found out without the windows and chains of the program
        return LowerBound(compute, reason=f"{gaps} gaps are more than {most_absences}")
    relaxation = Relaxation(request)
    gaps = len(relaxation.absences)
    if gaps > most_absences:
        return LowerBound(compute, reason=f"{gaps} gaps are more than {most_absences}")
    try:
        with warnings.catch_warnings():
            # PuLP 3.3 announces 4.0, which pyproject.toml excludes.
            warnings.simplefilter("ignore", DeprecationWarning)
            found = relaxation.solve()
    except solver_errors() as error:
        _log.warning("the solver cannot be run: %s", error)
        return LowerBound(compute, reason="the solver cannot be run")
    if found is None:
        return LowerBound(compute, reason="the solver found no optimum")
    step_ms, residency = found
    return LowerBound(max(compute, step_ms * (1 - _SLACK)), residency)


# Linear program of `lower_bound`: variables and constraints.
#
# Bytes are scaled such that the budget is 1000; times are in ms.


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
        self, absence: OffloadGap, resident: Any, prefetched: Any, recomputed: Any
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
        self._windows = group_nodes(weights, borders[:1], _WINDOWS)
        self.absences = offload_gaps(
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
        self._chains = RecomputeChains(graph)
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

    def _add(self, absence: OffloadGap) -> None:
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

    def _copied_out(self, absence: OffloadGap, index: int) -> list[Any] | None:
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

    def _run_again(self, absence: OffloadGap, window: int, variable: Any) -> None:
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
        return self._request.profile.recompute_ms.get(node, self._ms[node])

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
            front = lower_hull(plans.get(node.name, ()))
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


def lower_hull(plans: Sequence[ConvPlan]) -> list[tuple[float, float]]:
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
