"""Lower bound of the step time within a budget, over all residencies and schedulers.

The bound is the optimum of a linear program over windows of consecutive nodes. For
every storage and every gap between two uses, variables are the fraction that is
resident in each window, the fractions copied out and in, and the fraction recomputed:

    minimize    sum of the windows' times
    subject to  a window's time >= its nodes and recomputation,
                                   bytes out / B_out,  bytes in / B_in
                at every node: operands + resident fractions + workspace <= budget
                an absent fraction was copied out before, or is recomputed
                a restored fraction was copied in or recomputed since
                recomputation has its saved and narrow inputs resident

Every plan gives a feasible solution that takes no longer: let a fraction be the part of
a storage that is on the device at the worst moment of a window. A plan copies, frees
and allocates whole storages, so the fractions never exceed what the plan holds. The
optimum is therefore no more than the time of any plan. Neglected effects (small
tensors, memory of intermediate recomputation, waiting within a window) only lower the
bound. Steps whose copies overlap with neighbouring steps are considered in their steady
state.

A program of fractions could use one part of a storage several times, for example
recompute one part of a result after another from the same part of an input. These
constraints, which hold for whole storages, prevent that. Within a gap:

* A storage is dropped without a copy, or copied out before; not both. A recomputed
  storage may be copied out as well, by variables of its own.
* A dropped storage is recomputed for a first time, and only then again.
* By the first recomputation of a result, each input has never left since its own gap
  began, or was copied out and in again, or was itself recomputed.

The program of `planning/program.py` is another one: its optimum is closer to the plans
it finds, but no bound, as it counts arriving bytes twice and knows fewer residencies.
"""

import itertools
import logging
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.passes.graph.rematerialize import recompute_chains
from mucudnn.passes.graph.split import of_whole
from mucudnn.passes.linear_program import LinearProgram, solver_errors
from mucudnn.passes.liveness import Use, rounded, uses_of
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.scheduling.problem import first_plans

MOST_GAPS = 1500
"""Gaps up to which the program is solved as a part of planning, in two seconds."""

_WINDOWS, _FEW_WINDOWS = 16, 4
"""Number of windows of a small step, and of a large one. Many windows take longer, and
tighten the bound only if most of a short step is recomputed."""

_MANY_GAPS = 200
"""Gaps above which a step is large."""

_SMALL = 3e-4
"""Fraction of the budget below which storages are free to be absent."""

_SHARES = 64
"""Number of classes of storages by the share of their bytes that copies transfer."""

_SCALE = 1e3
"""Unit of bytes in the program, as parts of the budget; times are in ms."""

_SLACK = 1e-6
"""Relative error allowed for the solver."""

_log = logging.getLogger(__name__)

Terms = list[tuple[int, float]]
"""Variables of the program and their factors."""


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Lower bound of the step time within a budget.

    Attributes:
        step_ms: The bound; infinity if no plan fits.
        reason: Why the bound is only the compute time, if the program was not solved.
    """

    step_ms: float
    reason: str = ""


def lower_bound(request: StepRequest, most_gaps: int = MOST_GAPS) -> LowerBound:
    """Return the lower bound of a request, over all policies and schedulers.

    If activations have more than `most_gaps` gaps, it is the compute time.
    """
    compute = sum(_fastest_ms(request).values())
    if math.isinf(request.budget):
        return LowerBound(compute)
    least = _SMALL * request.budget
    uses = uses_of(request.graph).values()
    gaps = sum(len(u.gaps()) for u in uses if not u.persistent and u.nbytes >= least)
    if gaps > most_gaps:
        return LowerBound(compute, f"{gaps} gaps are more than {most_gaps}")
    try:
        windows = _WINDOWS if gaps <= _MANY_GAPS else _FEW_WINDOWS
        found = _Relaxation(request, windows).solve()
    except solver_errors() as error:
        _log.warning("the solver cannot be run: %s", error)
        return LowerBound(compute, "the solver cannot be run")
    if found is None:
        return LowerBound(compute, "the solver found no optimum")
    return LowerBound(max(compute, found * (1 - _SLACK)))


@dataclass(slots=True)
class _Gap:
    """A gap between two uses in which a storage may be off the device.

    Variables are numbered by the windows that the gap crosses, from 0.

    Attributes:
        storage: Name of the storage, or of one of several equivalent storages.
        nbytes: Bytes of all equivalent storages on the device, which are aligned.
        copied: Bytes that their copies transfer.
        after: Position of the use before the gap.
        before: Position of the use behind the gap; in the next step, the number of
            nodes or more.
        windows: Windows that the gap crosses; those of the next step follow the last.
        merged: Whether it stands for several storages.
        clean: Whether the host already has the bytes, so that no offload is needed.
        stuck: Whether the storage cannot be copied.
        used: Whether the gap ends with a use; else the storage may stay away.
        again: Windows in which the storage can be recomputed.
        resident: Variables of the fraction that is resident throughout a window.
        restored: Variables of the fractions copied in or recomputed in a window.
        prefetched: Variable of the fraction copied in that was never dropped.
        recomputed: Variable of the fraction recomputed in a window.
        first: Variable of the part of this that was not recomputed in the gap before.
        copied_out: Variables of the fraction copied out by the end of a window; None
            if no copy is needed.
        still: Variable of the fraction that has not left since the gap began, for some
            of the windows.
    """

    storage: str
    nbytes: int
    copied: float
    after: int
    before: int
    windows: range
    merged: bool = False
    clean: bool = False
    stuck: bool = False
    used: bool = True
    again: frozenset[int] = frozenset()
    resident: list[int] = field(default_factory=list)
    restored: list[list[int]] = field(default_factory=list)
    prefetched: list[int] = field(default_factory=list)
    recomputed: dict[int, int] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    copied_out: list[list[int] | None] = field(default_factory=list)
    still: dict[int, int] = field(default_factory=dict)


class _Relaxation:
    """Linear program of a request with a budget."""

    def __init__(self, request: StepRequest, windows: int) -> None:
        self._request, self._graph = request, request.graph
        self._lp = LinearProgram()
        self._ms = _fastest_ms(request)
        hosted = request.persistent if request.hosted is None else request.hosted
        self._moving = hosted & request.persistent
        phases = itertools.pairwise(node.phase for node in self._graph.nodes)
        backward = next((i + 1 for i, (a, b) in enumerate(phases) if a is not b), 0)
        self._needed = self._operands()
        self._starts = self._windows(backward, windows)
        count = len(self._starts)
        self._compute: list[Terms] = [[] for _ in range(count)]
        self._fixed_ms = [0.0] * count
        self._out: list[Terms] = [[] for _ in range(count)]
        self._in: list[Terms] = [[] for _ in range(count)]
        self._outs: dict[str, dict[int, int]] = {}
        self._outs_again: dict[str, list[int]] = {}
        self._recompute = recompute_chains(self._graph, _SMALL * request.budget)
        self._gaps: dict[str, list[_Gap]] = {}
        for gap in self._all_gaps():
            self._gaps.setdefault(gap.storage, []).append(gap)

    def solve(self) -> float | None:
        """Return the optimum in ms; None if it is not found.

        The optimum is infinity if the program is infeasible.
        """
        gaps = [*itertools.chain(*self._gaps.values())]
        chains = [self._chain(gap) for gap in gaps]
        for gap, (again_ms, _) in zip(gaps, chains, strict=True):
            self._add(gap, again_ms)
        for gap, (_, read) in zip(gaps, chains, strict=True):
            self._add_recompute_inputs(gap, read)
        self._add_memory()
        self._add_times()
        found = self._lp.solve()
        return None if found is None else found.objective

    def _windows(self, backward: int, most: int) -> list[int]:
        """Return the first nodes of windows of about equal weight.

        The node that needs most memory is a window: what is restored behind it would
        otherwise need no memory there.
        """
        profile = self._request.profile
        weights = [self._ms[node.name] for node in self._graph.nodes]
        for saved in self._graph.saved:
            weights[saved.first] += saved.nbytes / profile.out_bytes_per_ms
            weights[saved.again] += saved.nbytes / profile.in_bytes_per_ms
        peak = max(range(len(weights)), key=self._needed.__getitem__, default=0)
        total, quota, starts = sum(weights), 1, {0, backward, peak, peak + 1}
        for position, mark in enumerate(itertools.accumulate(weights[:-1])):
            if total and mark >= quota * total / most:
                starts.add(position + 1)
                quota = int(mark * most / total) + 1
        return sorted(starts & {*range(max(1, len(weights)))})

    def _window(self, position: int) -> int:
        """Return the window of a position; those of the next step follow the last."""
        step, at = divmod(position, max(1, len(self._graph.nodes)))
        return step * len(self._starts) + bisect_right(self._starts, at) - 1

    def _between(self, first: int, last: int) -> range:
        return range(self._window(first), self._window(last) + 1)

    def _all_gaps(self) -> Iterator[_Gap]:
        """Yield all gaps; those of equivalent parameters and state are merged.

        Storages of few elements take more bytes than their copies transfer. So only
        those of about the same share are merged, and the least share counts.
        """
        count = len(self._graph.nodes)
        alike: dict[tuple[int, int, bool, int], _Gap] = {}
        for use in uses_of(self._graph).values():
            if not use.persistent:
                if use.nbytes >= _SMALL * self._request.budget:
                    tail = (
                        use.positions[-1],
                        self._recompute.narrow.get(use.storage, -1),
                    )
                    for after, before in (*use.gaps(), tail):
                        if after < before < count:
                            yield self._of_activation(use, after, before)
                continue
            for after, before in use.gaps() if use.storage in self._moving else ():
                clean = before < count or not use.writes
                windows = self._between(after, before)
                share = self._graph.tensors[use.storage].nbytes / max(1, use.nbytes)
                key = windows.start, windows.stop, clean, int(share * _SHARES)
                gap = _Gap(
                    *(use.storage, 0, math.inf, after, before, windows), clean=clean
                )
                gap = alike.setdefault(key, gap)
                gap.merged = gap.nbytes > 0
                share = min(share, gap.copied / max(1, gap.nbytes))
                gap.nbytes += use.nbytes
                gap.copied = share * gap.nbytes
                gap.after = max(gap.after, after)
                gap.before = min(gap.before, before)
        yield from alike.values()

    def _of_activation(self, use: Use, after: int, before: int) -> _Gap:
        graph = self._graph
        producer = graph.producers.get(use.storage)
        windows, phases = self._between(after, before), _phases_again(use.storage)
        again: frozenset[int] = frozenset()
        if (
            producer is not None
            and producer.phase is Phase.FORWARD
            and producer.remakes(use.storage)
            and graph.nodes[before].phase in phases
        ):
            again = frozenset(w for w in windows if self._has(w, phases))
        return _Gap(
            use.storage,
            use.nbytes,
            graph.tensors[use.storage].nbytes,
            after,
            before,
            windows,
            stuck=use.storage in graph.immovable,
            used=before in use.positions,
            again=again,
        )

    def _has(self, window: int, phases: tuple[Phase, ...]) -> bool:
        """Return whether a window has a node of some phases."""
        first, behind = [*self._starts, len(self._graph.nodes)][window : window + 2]
        return any(node.phase in phases for node in self._graph.nodes[first:behind])

    def _add(self, gap: _Gap, again_ms: float) -> None:
        """Add the variables and the flow constraints of a gap."""
        variable = self._lp.variable
        last = len(gap.windows) - 1
        gap.resident = [variable() for _ in gap.windows]
        gap.prefetched = [] if gap.stuck else [variable() for _ in gap.windows]
        for t, window in enumerate(gap.windows):
            gap.restored.append(gap.prefetched[t : t + 1])
            if gap.prefetched:
                self._copy(self._in, window, gap.prefetched[t], gap)
            if window in gap.again:
                gap.first[t], gap.recomputed[t] = first, again = variable(), variable()
                gap.restored[t].append(again)
                self._compute[window].append((again, again_ms))
                self._require([again], [first])
                self._require(gap.first.values(), [again])
        dropped = []  # the fraction that leaves without a copy
        if gap.recomputed or not gap.used:
            dropped = [variable()]
        if gap.recomputed and gap.used:
            self._require(gap.first.values(), dropped)
        gap.copied_out = [self._copied_out(gap, t) for t in range(last + 1)]
        self._add_second_copies(gap)
        for t, resident in enumerate(gap.resident):
            if (copied_out := gap.copied_out[t]) is not None:
                self._require([resident, *dropped, *copied_out])
                if gap.used and t == last > 0:  # copies out may follow the use
                    copied_out = [*(gap.copied_out[t - 1] or ()), gap.resident[t - 1]]
                elif dropped and t == last - gap.used:
                    self._lp.limit([(v, 1.0) for v in (*copied_out, *dropped)], 1.0)
                if gap.prefetched:
                    self._require(copied_out, gap.prefetched[t : t + 1])
            following = gap.resident[t + 1 : t + 2]
            if following or gap.used:
                self._require([resident, *gap.restored[t]], following)

    def _add_second_copies(self, gap: _Gap) -> None:
        """Let what was recomputed be copied out, and back."""
        outs: list[int] = []
        for t in gap.recomputed if gap.prefetched else ():
            out, back = self._lp.variable(), self._lp.variable()
            self._copy(self._out, gap.windows[t], out, gap)
            self._copy(self._in, gap.windows[t], back, gap)
            outs.append(out)
            gap.restored[t].append(back)
            again = [gap.recomputed[u] for u in (t - 1, t) if u in gap.recomputed]
            self._require([*gap.resident[max(0, t - 1) : t], *again], [out])
            self._require([v for u, v in gap.first.items() if u <= t], outs)
            self._require(outs, [back])
        self._outs_again[gap.storage] = [*self._outs_again.get(gap.storage, ()), *outs]

    def _copy(self, copies: list[Terms], window: int, variable: int, gap: _Gap) -> None:
        """Count the bytes of a copy in a window."""
        copies[window % len(self._starts)].append((variable, gap.copied))

    def _require(self, more: Iterable[int], less: Sequence[int] = ()) -> None:
        """Require a sum of variables to be at least that of others, or at least 1."""
        terms = [*((v, -1.0) for v in more), *((v, 1.0) for v in less)]
        self._lp.limit(terms, 0.0 if less else -1.0)

    def _copied_out(self, gap: _Gap, index: int) -> list[int] | None:
        """Return the variables copied out by the end of a window; None if clean."""
        if gap.clean:
            return None
        if gap.stuck:
            return []
        graph, count = self._graph, len(self._starts)
        outs = self._outs.setdefault(gap.storage, {})
        first = gap.windows.start
        if gap.before < len(graph.nodes):
            producer = graph.producers.get(gap.storage)
            first = 0 if producer is None else graph.positions[producer.name]
            first = self._window(first)
        windows = range(first, gap.windows[index] + 1)
        possible = dict.fromkeys(window % count for window in windows)
        for window in possible:
            if window not in outs:
                outs[window] = self._lp.variable()
                self._copy(self._out, window, outs[window], gap)
        again = self._outs_again.get(gap.storage, ())  # of the gaps before
        return [*(outs[window] for window in possible), *again]

    def _chain(self, gap: _Gap) -> tuple[float, list[str]]:
        """Return the least time of recomputing a storage in a gap, and what is read.

        A node whose inputs were overwritten since cannot run again: its result is kept.
        """
        graph, profile = self._graph, self._request.profile
        ms, needed = 0.0, {gap.storage}
        for position, node in self._recompute.chains.get(gap.storage, ()):
            read = {graph.storages[name] for name in node.inputs}
            known = gap.storage in node.outputs or not any(
                position < at <= gap.before
                for storage in read
                for at in graph.overwriting.get(storage, ())
            )
            if known and not needed.isdisjoint(node.outputs):
                ms += profile.recompute_ms.get(node.name, self._ms[node.name])
                needed |= read
        return ms, sorted(needed - {gap.storage})

    def _add_recompute_inputs(self, gap: _Gap, read: Iterable[str]) -> None:
        """Require saved inputs of recomputation to be resident."""
        for above in itertools.chain(*(self._gaps.get(name, ()) for name in read)):
            if above.merged:  # others may be away
                continue
            begun = -1
            mine: list[int] = []
            for t, again in gap.recomputed.items():
                if gap.windows[t] not in above.windows[1:]:
                    continue
                at = above.windows.index(gap.windows[t])
                restored = above.restored[at - 1] + above.restored[at]
                self._require([above.resident[at - 1], *restored], [again])
                begun = at - 1 if begun < 0 else begun
                mine.append(gap.first[t])
                had = [self._still(above, begun)]
                had += [first for u, first in above.first.items() if u <= at]
                self._require([*had, *above.prefetched[: at + 1]], mine)
                if (copied_out := above.copied_out[begun]) is not None:
                    self._require([*had, *copied_out], mine)

    def _still(self, gap: _Gap, last: int) -> int:
        """Return the variable of what has not left since a gap began, by a window."""
        if last not in gap.still:
            gap.still[last] = still = self._lp.variable()
            for resident in gap.resident[: last + 1]:
                self._require([resident], [still])
        return gap.still[last]

    def _add_memory(self) -> None:
        """Require resident bytes and workspaces at every node to fit the budget.

        A variable has the bytes of all resident fractions. It changes where gaps and
        windows begin and end, so each fraction is in few rows.
        """
        nodes, budget = self._graph.nodes, self._request.budget
        edges = [*self._starts, len(nodes)]
        changes: list[Terms] = [[] for _ in range(len(nodes) + 1)]
        for gap in itertools.chain(*self._gaps.values()):
            for resident, window in zip(gap.resident, gap.windows, strict=True):
                step, at = divmod(window, len(self._starts))
                before = step * len(nodes)  # nodes of the steps before
                first = max(edges[at], gap.after + 1 - before)
                behind = min(edges[at + 1], gap.before - before)
                if first < behind:
                    changes[first].append((resident, gap.nbytes))
                    changes[behind].append((resident, -gap.nbytes))
        plans, unit = _plans(self._request), max(budget, 1.0) / _SCALE
        # What is resident at the last row, what has changed since, the most that may be
        # resident, and the room of the rows since the last change.
        held: Terms = []
        since: Terms = []
        most, least_room = 0.0, math.inf
        for position, node in enumerate(nodes):
            window, workspace = self._window(position), []
            room = budget - self._needed[position]
            if node.name not in plans:
                self._fixed_ms[window] += self._ms[node.name]
            else:
                (least, slowest_ms), *others = lower_hull(plans[node.name])
                self._fixed_ms[window] += slowest_ms
                room -= least
                for nbytes, ms in others:
                    chosen = self._lp.variable()
                    workspace.append((chosen, nbytes - least))
                    self._compute[window].append((chosen, ms - slowest_ms))
                if workspace:
                    self._lp.limit([(v, 1.0) for v, _ in workspace], 1.0)
            since += changes[position]
            most += sum(nbytes for _, nbytes in changes[position])
            if most + sum(nbytes for _, nbytes in workspace) <= room:
                continue
            if since:
                changed = [(v, -nbytes / unit) for v, nbytes in since]
                changed += [(v, -1.0) for v, _ in held]
                held = [(self._lp.variable(math.inf, lower=-math.inf), 1.0)]
                self._lp.equal([*held, *changed], 0.0)
                least_room, since = math.inf, []
            if workspace or room < least_room:
                row = [(v, nbytes / unit) for v, nbytes in workspace]
                self._lp.limit([*row, *held], room / unit)
                least_room = least_room if workspace else room

    def _operands(self) -> list[int]:
        """Return the bytes that must be resident at every node in any plan.

        These are a node's operands (its result in place where possible), its scratch
        memory unless it is a convolution, resident tensors, and results of the step.
        """
        graph, workspaces = self._graph, self._request.profile.workspaces
        count = len(graph.nodes)
        found = [
            rounded(workspaces.get(node.name, 0)) - _in_place_bytes(graph, node)
            for node in graph.nodes
        ]
        for use in uses_of(graph).values():
            at: Sequence[int] = use.positions
            if use.persistent and use.storage not in self._moving:
                at = range(count)
            elif at and at[-1] == count and not use.persistent:
                last = at[-2] if len(at) > 1 else 0
                at = [*at[:-2], *range(last, count)]
            for position in at:
                if position < count:
                    found[position] += use.nbytes
        return found

    def _add_times(self) -> None:
        """Bound the time of each window by compute and copies."""
        profile = self._request.profile
        for window, fixed_ms in enumerate(self._fixed_ms):
            ms = self._lp.variable(math.inf, cost=1.0)
            self._lp.limit([(ms, -1.0), *self._compute[window]], -fixed_ms)
            for copies, rate in (
                (self._out[window], profile.out_bytes_per_ms),
                (self._in[window], profile.in_bytes_per_ms),
            ):
                if copies and math.isfinite(rate):
                    self._lp.limit(
                        [(ms, -1.0), *((v, n / rate) for v, n in copies)], 0.0
                    )


def _plans(request: StepRequest) -> Mapping[str, Sequence[ConvPlan]]:
    if request.convolutions == "dynamic":
        return request.profile.fronts
    chosen = first_plans(request.profile, request.convolutions, request.plans)
    return {name: (plan,) for name, plan in chosen.items()}


def _fastest_ms(request: StepRequest) -> dict[str, float]:
    """Return the least time of each node."""
    found = {n.name: request.profile.node_ms[n.name] for n in request.graph.nodes}
    for name, plans in _plans(request).items():
        found[name] = min(plan.time_ms for plan in plans)
    return found


def _phases_again(storage: str) -> tuple[Phase, ...]:
    """Return the phases in which a storage may be recomputed; see `Residency`."""
    sliced = of_whole(storage) != storage
    return (Phase.FORWARD, Phase.BACKWARD) if sliced else (Phase.BACKWARD,)


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
