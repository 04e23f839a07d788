"""The planner's core: a linear program over all saved tensors, rounded to residencies.

A saved tensor is kept, offloaded or recomputed. The linear program decides this for all
of them at once, in fractions, so a step of 64 equal blocks is as easy as one of two:

    minimize    sum of the windows' times
    subject to  a window's time >= its nodes and what is recomputed in it,
                                   bytes copied out / B_out,  bytes copied in / B_in
                at every node: resident bytes + workspaces <= budget

*Windows* are a few consecutive nodes. Copies are lumped together in them: `queue` has
the bytes that are to be copied out but are still on the device, `prefetched` those that
were copied in before they are needed.

*Places* are the backward nodes before which a forward node may run again. One copy
serves all later uses, so a node runs at the first place that needs its result:

* the first backward use of its own results,
* the first place of another node of its block that reads them,
* places of the next blocks, if the block's result is needed to recompute those.

A variable per place has the fraction of the node that has run by then, and another one
the fraction of an offloaded tensor that is back by then. From there on the bytes are
held. Chains across more than two blocks have no places; the program keeps or offloads
the results of blocks in between. Block results that only the forward pass reads, such
as residual sums in low precision, are candidates like saved tensors.

*Gaps.* Other bytes, such as gradients that wait for another branch, may be paged over
the gaps between two uses. A plan does so where its residencies alone do not fit.

*Rounding.* Most tensors are integral in the optimum. The others are rounded a few at a
time, the surest first, and the program is solved in between. The scheduler and the
simulator judge the result. Where bytes were missing, or computation waited for copies,
the next round may use fewer bytes. Real copies wait for each other, which windows
neglect; so the last rounds have slower links.

The optimum is no proven bound: the program does not know `RECOMPUTE_EACH`.
"""

import itertools
import logging
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import Node, Phase
from mucudnn.passes.graph.split import of_whole
from mucudnn.passes.linear_program import LinearProgram, solver_errors
from mucudnn.passes.liveness import rounded
from mucudnn.passes.planning.bound import lower_hull
from mucudnn.passes.planning.climbing import SearchState
from mucudnn.passes.planning.request import (
    StepRequest,
    UnsimulatedPlan,
    schedule_residency,
)
from mucudnn.passes.residency import EVERYTHING, PERSISTENTS, Residency
from mucudnn.passes.scheduling.problem import first_plans
from mucudnn.passes.scheduling.step_plan import StepPlan, exchanges_of

_FORWARD_NODES, _BACKWARD_NODES = 8, 14
"""Most nodes of a window, by phase."""

_WINDOWS = 400
"""A window takes at most such a part of the step, unless it is one node."""

_EARLY = 2
"""Most places of a node for other blocks than its own."""

_PAGED = 1e-3
"""Size from which bytes are paged, as a fraction of the step's peak."""

_FAR = 8
"""Distance of two operands' producers from which a node joins branches."""

_TINY, _BIG = 1e-6, 1e-5
"""Sizes below which tensors are kept, and are not followed through chains, as fractions
of the step's peak."""

_SURE = 0.99
"""Fraction from which a tensor's residency is integral."""

_ROUNDS = ((1.0, 1.0), (1.0, 1.0), (1.0, 0.5), (0.95, 0.5))
"""Fractions of the budget and of the links' rates with which the program is solved.
Margins grow as long as both are 1. Of 12 pairs that were tried none was the best for
most networks, but half the rates were better than the full ones for most of them."""

_PLAIN_ROUNDS = 5 * ((1.0, 1.0),)
"""The same for small and for large steps."""

_ROOM = (1.0, 1.001, 1.002, 1.005, 1.01, 1.02, 1.03)
"""Factors on the budget, of which the least with an optimum counts. The program
needs more than the least budget, as it counts bytes that arrive twice, and pages
nothing, which costs U-Nets up to 4 %. Plans page what does not fit."""

_ROOMY_NODES = 1500
"""Nodes of a step from which more than the budget is tried. In smaller ones a local
search finds more than the program does at their least budgets."""

_DIVES = 12
"""Times that the program is solved while rounding its optimum; half with slow links."""

_LEAST_NODES = 400
"""Nodes of a step from which slower links are tried."""

_FEW_DIVES = 2
"""The same for large steps."""

_RANKS = 3
"""Residencies that are tried for one tensor while rounding."""

_MOST_NODES = 5000
"""Nodes of a step up to which the program is solved while rounding."""

_ENOUGH = 1.003
"""Factor on the optimum from which a plan is not improved by another round."""

_SHORT = 1e-3
"""Waits for copies, as fractions of the step, that are neglected."""

_log = logging.getLogger(__name__)

Choices = dict[str, Residency]

_ALSO_PAGED: Sequence[Choices] = (
    {},
    {EVERYTHING: Residency.PAGE},
    {EVERYTHING: Residency.PAGE, PERSISTENTS: Residency.PAGE},
)
"""Residencies of all else, tried in turn until a plan fits."""

Margins = Mapping[int, float]
"""Bytes of the budget that are not used in a window."""


@dataclass(slots=True)
class _Tensor:
    """A forward result of some size.

    Attributes:
        name: Name of the tensor.
        size: Bytes on the device.
        maker: Position of its producer.
        last: Position of its last forward use.
        back: Positions of its backward uses, ascending.
        chain: Positions of the forward nodes that read it when they run again.
        places: Places at which it may be needed; see the module.
        until: Last position at which a chain reads it.
        decided: Whether the program decides about it.
    """

    name: str
    size: int
    maker: int
    last: int
    back: tuple[int, ...] = ()
    chain: list[int] = field(default_factory=list)
    places: tuple[int, ...] = ()
    until: int = -1
    decided: bool = False


class StepModel:
    """What the program needs to know of a step, whatever the budget.

    Attributes:
        tensors: Forward results that may be kept, offloaded or recomputed, in order.
        places: Places of every forward node that may run again.
        base: Bytes at every node without the tensors that the program decides about.
        gaps: Bytes that may be paged, and the positions of the uses around the gap.
    """

    def __init__(self, request: StepRequest) -> None:
        self.request, self.graph = request, request.graph
        self.nodes = request.graph.nodes
        self._ready = request.rewritten({})
        plans = first_plans(self._ready.profile, request.convolutions, request.plans)
        needed = self._ready.problem(plans, math.inf).least()[1]
        self._kept = [needed[i] for i in range(len(self.nodes))]
        self._peak = peak = max(self._kept, default=0)
        self._tiny, self._big = _TINY * peak, _BIG * peak
        self._again = [_recomputed(node) for node in self.nodes]
        self.fronts = {
            node.name: lower_hull(request.profile.fronts[node.name])
            for node in self.nodes
            if request.convolutions == "dynamic" and node.name in request.profile.fronts
        }
        self.node_ms = [self._ms(node, plans) for node in self.nodes]
        self._clock = [0.0, *itertools.accumulate(self.node_ms)]
        self.tensors = self._tensors()
        self.places: dict[int, tuple[int, ...]] = {}
        self._place()
        self._choose()
        self.base = self._without_candidates()
        self.starts = self._windows()
        self.gaps = [] if self.plain else self._gaps()
        self.transients = self._transients()

    @property
    def plain(self) -> bool:
        """True if bytes are not paged, and links not slowed down.

        A local search of a small step is as good, and large steps have no time for it.
        """
        return not _LEAST_NODES < len(self.nodes) <= _MOST_NODES

    def again_ms(self, position: int) -> float:
        """Return the time to recompute the results of a node."""
        node = self.nodes[position]
        if node.name in self.request.profile.recompute_ms:
            return self.request.profile.recompute_ms[node.name]
        return self.node_ms[position]

    def inputs_again(self, position: int) -> list[_Tensor]:
        """Return the tensors that a node reads when it runs again."""
        node, storages = self._again[position], self.graph.storages
        names = () if node is None else dict.fromkeys(storages[t] for t in node.inputs)
        return [self.tensors[name] for name in names if name in self.tensors]

    def remakes(self, tensor: _Tensor) -> bool:
        """Return whether a tensor can be recomputed."""
        node = self.nodes[tensor.maker]
        return tensor.maker in self.places and node.remakes(tensor.name)

    def window(self, position: int) -> int:
        """Return the number of the window of a position."""
        return bisect_right(self.starts, position) - 1

    def window_after(self, position: int, ms: float) -> int:
        """Return the window some time after (or before) a node without a budget."""
        at = bisect_right(self._clock, self._clock[position] + ms) - 1
        return self.window(min(max(at, 0), len(self.nodes) - 1))

    def _ms(self, node: Node, plans: Mapping[str, ConvPlan]) -> float:
        if node.name in self.fronts:
            return self.fronts[node.name][-1][1]
        if node.name in plans:
            return plans[node.name].time_ms
        return self.request.profile.node_ms[node.name]

    def _tensors(self) -> dict[str, _Tensor]:
        graph, found = self.graph, {}
        for i, spec, forward, backward in graph.activations():
            size, last = rounded(spec.nbytes), max([i, *forward])
            if size <= self._tiny or spec.name in graph.immovable:
                continue
            if not backward or backward[0] > last:
                found[spec.name] = _Tensor(spec.name, size, i, last, tuple(backward))
        storages = graph.storages
        for i, again in enumerate(self._again):
            if again is not None:
                for name in dict.fromkeys(storages[t] for t in again.inputs):
                    if name in found:
                        found[name].chain.append(i)
        return found

    def _place(self) -> None:
        """Find the places of all forward nodes, the last node first."""
        ends = self._block_ends()
        near: dict[int, float] = {}
        for i in reversed(range(len(self.nodes))):
            if self._again[i] is None and self.nodes[i].phase is not Phase.FORWARD:
                continue
            mine = [t for t in self.nodes[i].outputs if t in self.tensors]
            inside: list[float] = []
            outside: list[float] = []
            own = math.inf
            for tensor in map(self.tensors.__getitem__, mine):
                own = min([own, *tensor.back[:1]])
                final = tensor.name in ends and len(tensor.chain) > 1
                for reader in tensor.chain:
                    if reader not in near:
                        continue
                    if not any(t in ends for t in self.nodes[reader].outputs):
                        inside.append(near[reader])
                    outside.append(near[reader])
                    outside += () if final else self.places[reader]
            first = min([own, *inside])
            if first == math.inf:
                first = max(outside, default=math.inf)
            if first == math.inf:
                continue
            early = sorted({p for p in outside if p < first})[-_EARLY:]
            places = [*early, first, *((own,) if first < own < math.inf else ())]
            for tensor in map(self.tensors.__getitem__, mine):
                latest = tensor.back[0] if tensor.back else math.inf
                tensor.places = tuple(int(p) for p in places if p <= latest)
                found = [near[r] for r in tensor.chain if r in near]
                tensor.until = int(max([*found, *tensor.places]))
            if self._again[i] is not None:
                near[i] = first
                self.places[i] = tuple(map(int, places))

    def _block_ends(self) -> frozenset[str]:
        """Return results that end a block: sole survivors, and joins of branches.

        The slices of a tensor, or of a node, count as one.
        """
        big = {t.name: t for t in self.tensors.values() if t.size >= self._big}
        slices: dict[str, list[tuple[int, Node]]] = defaultdict(list)
        for i, node in enumerate(self.nodes):
            if node.phase is Phase.FORWARD:
                slices[of_whole(node.name)].append((i, node))
        number = {i: k for k, found in enumerate(slices.values()) for i, _ in found}
        made = {of_whole(t.name): number[t.maker] for t in big.values()}
        last: dict[str, int] = defaultdict(int)
        for t in big.values():
            last[of_whole(t.name)] = max(last[of_whole(t.name)], number[t.last])
        ends: set[str] = set()
        alive: set[str] = set()
        for k, found in enumerate(slices.values()):
            node, storages = found[0][1], self.graph.storages
            written = {of_whole(t) for _, n in found for t in n.outputs if t in big}
            alive = {name for name in alive | written if last[name] > k}
            if len(alive) == 1:
                ends |= alive
            inputs = (storages[t] for _, n in found for t in n.inputs)
            read = [made[of_whole(t)] for t in inputs if t in big]
            if not node.traits.view and read and max(read) - min(read) >= _FAR:
                ends |= written
        return frozenset(name for name in big if of_whole(name) in ends)

    def _choose(self) -> None:
        """Choose the tensors to decide about: saved, narrow, and results of blocks."""
        ends, narrow = self._block_ends(), self.request.chains.narrow
        for tensor in self.tensors.values():
            ends_block = tensor.name in ends and len(tensor.chain) > 1
            worth = bool(tensor.back) or ends_block or tensor.name in narrow
            tensor.decided = bool(tensor.places) and worth

    def kept_range(self, tensor: _Tensor) -> tuple[int, int]:
        """Return the positions, end excluded, that a tensor is only kept for."""
        return tensor.last + 1, tensor.back[0] if tensor.back else tensor.until + 1

    def _without_candidates(self) -> list[float]:
        change = [0] * (len(self.nodes) + 1)
        for tensor in self.tensors.values():
            if tensor.decided and tensor.back:
                first, behind = self.kept_range(tensor)
                change[first] -= tensor.size
                change[behind] += tensor.size
        less = itertools.accumulate(change)
        return [a + b for a, b in zip(self._kept, less, strict=False)]

    def _windows(self) -> list[int]:
        most_ms = sum(self.node_ms) / _WINDOWS
        starts: list[int] = []
        count, ms, before = 0, 0.0, None
        for i, node in enumerate(self.nodes):
            forward = node.phase is Phase.FORWARD
            most = _FORWARD_NODES if forward else _BACKWARD_NODES
            full = count >= most or ms + self.node_ms[i] > most_ms
            if not starts or full or forward is not before:
                starts.append(i)
                count, ms = 0, 0.0
            count, ms, before = count + 1, ms + self.node_ms[i], forward
        return starts

    def _gaps(self) -> list[tuple[int, int, int]]:
        """Return the gaps between uses, except where a decided tensor may be absent."""
        storages = self._ready.graph.storages
        decided: dict[str, list[int]] = defaultdict(list)
        for tensor in self.tensors.values():
            if tensor.decided and tensor.back:
                decided[storages[tensor.name]].append(tensor.last)
        return [
            (use.nbytes, i, j)
            for use in self._ready.moveable()
            if not use.persistent and use.nbytes >= _PAGED * self._peak
            for i, j in use.gaps()
            if j < len(self.nodes) and self.window(j) - self.window(i) > 1
            if not any(i <= last < j for last in decided[use.storage])
        ]

    def critical(self) -> list[int]:
        """Return the positions where memory may peak, without those of chains."""
        found = []
        for first, behind in itertools.pairwise([*self.starts, len(self.nodes)]):
            span = range(first, behind)
            found += sorted(
                {
                    max(span, key=lambda p: (self.base[p], -p)),
                    max(span, key=lambda p: (self._kept[p], -p)),
                }
            )
        wide = (
            i for i, n in enumerate(self.nodes) if len(self.fronts.get(n.name, ())) > 1
        )
        return sorted({*found, *wide})

    def before(self, position: int) -> float:
        """Return the base bytes before a node allocates its results and workspace."""
        node, tensors = self.nodes[position], self.graph.tensors
        over = node.outputs[:1] if node.traits.overwrites else ()
        own = (tensors[t] for t in node.outputs if t not in over)
        new = sum(rounded(spec.nbytes) for spec in own if spec.alias is None)
        workspace = rounded(self.request.profile.workspaces.get(node.name, 0))
        return self.base[position] - new - workspace

    def _transients(self) -> dict[int, int]:
        """Return the bytes that only a chain needs while a node runs again."""
        found = {}
        for i in self.places:
            node = self.nodes[i]
            size = sum(t.size for t in self.inputs_again(i) if self._passing(t))
            if not node.traits.overwrites:
                mine = (self.tensors[t] for t in node.outputs if t in self.tensors)
                size += sum(tensor.size for tensor in mine if self._passing(tensor))
            if size:
                found[i] = size
        return found

    def _passing(self, tensor: _Tensor) -> bool:
        return not tensor.decided and len(tensor.chain) < 2 and not tensor.back


def _recomputed(node: Node) -> Node | None:
    """Return the node that runs to recompute a forward node's result; None if none."""
    if node.phase is not Phase.FORWARD or node.traits.view or not node.recomputable:
        return None
    return node.recompute_node or node


@dataclass(frozen=True, slots=True)
class Fractions:
    """A solution of the program.

    Attributes:
        step_ms: The optimum.
        keep: Fraction of each tensor that is kept.
        offload: Fraction of each tensor that is offloaded.
    """

    step_ms: float
    keep: Mapping[str, float]
    offload: Mapping[str, float]

    def surely(self, name: str) -> Residency | None:
        """Return the residency of a tensor if it is integral."""
        keep, offload = self.keep[name], self.offload[name]
        if keep > _SURE:
            return Residency.KEEP
        if offload > _SURE:
            return Residency.OFFLOAD
        return Residency.RECOMPUTE if keep + offload < 1 - _SURE else None

    def certainty(self, name: str) -> float:
        """Return the largest fraction of a tensor with the same residency."""
        keep, offload = self.keep[name], self.offload[name]
        return max(keep, offload, 1 - keep - offload)

    def ranked(self, name: str) -> list[Residency]:
        """Return the residencies of a tensor by descending fraction."""
        keep, offload = self.keep[name], self.offload[name]
        found = (
            (keep, Residency.KEEP),
            (offload, Residency.OFFLOAD),
            (1 - keep - offload, Residency.RECOMPUTE),
        )
        return [r for _, r in sorted(found, key=lambda pair: -pair[0])]


class _Program:
    """The program of a step within a budget, with a fraction of the links' rates."""

    def __init__(
        self, model: StepModel, budget: float, margins: Margins, share: float
    ) -> None:
        self._model, self._lp = model, LinearProgram()
        profile = model.request.profile
        self._rates = share * profile.out_bytes_per_ms, share * profile.in_bytes_per_ms
        self._budget, self._margins = budget, margins
        self._unit = unit = max(budget, 1.0) / 64
        self._tensors = [t for t in model.tensors.values() if t.decided]
        windows = range(len(model.starts))
        variable = self._lp.variable
        self.keep = {t.name: variable() for t in self._tensors}
        # Copies have a small price: of equally fast plans, take one with few of them.
        self.back = {
            t.name: [
                variable(cost=1e-4 * t.size / unit if p == t.places[-1] else 0.0)
                for p in t.places
            ]
            for t in self._tensors
        }
        self.ran = {
            i: [variable() for _ in places] for i, places in model.places.items()
        }
        self._gaps = model.gaps if share < 1.0 else []
        self._paged = [variable(cost=1e-4 * size / unit) for size, _, _ in self._gaps]
        self._ms = [variable(math.inf, cost=1.0) for _ in windows]
        self._out = [variable(math.inf) for _ in windows]
        self._in = [variable(math.inf) for _ in windows]
        self._queue = [variable(math.inf) for _ in windows]
        self._prefetched = [variable(math.inf) for _ in windows]
        self._held: list[tuple[int, int, int, float]] = []
        self._add_choices()
        self._add_chains()
        work = self._add_copies()
        self._add_memory(work)
        self._add_times(work)

    def solve(self, fixed: Mapping[str, Residency] | None = None) -> Fractions | None:
        """Return the optimum, with fixed residencies of some tensors."""
        values = {}
        for name, choice in (fixed or {}).items():
            values[self.keep[name]] = float(choice is Residency.KEEP)
            values[self.back[name][-1]] = float(choice is Residency.OFFLOAD)
        found = self._lp.solve(values)
        if found is None or not found.values:
            return None
        return Fractions(
            sum(found.values[ms] for ms in self._ms),
            {name: found.values[keep] for name, keep in self.keep.items()},
            {name: found.values[back[-1]] for name, back in self.back.items()},
        )

    def _add_choices(self) -> None:
        """Keep, offload or recompute what the backward pass reads, and only once."""
        lp, model = self._lp, self._model
        for tensor in self._tensors:
            keep, back = self.keep[tensor.name], self.back[tensor.name]
            lp.limit([(keep, 1.0), (back[-1], 1.0)], 1.0)
            for earlier, later in itertools.pairwise(back):
                lp.limit([(earlier, 1.0), (later, -1.0)], 0.0)
            if tensor.back:
                terms = [(keep, -1.0), (back[-1], -1.0)]
                if model.remakes(tensor):
                    terms += self._ran_by(tensor.maker, tensor.back[0])
                lp.limit(terms, -1.0)
        for ran in self.ran.values():
            for earlier, later in itertools.pairwise(ran):
                lp.limit([(earlier, 1.0), (later, -1.0)], 0.0)

    def _ran_by(self, position: int, place: float) -> list[tuple[int, float]]:
        """Return the negative term of the fraction of a node that ran by a place."""
        index = bisect_right(self._model.places[position], place) - 1
        return [(self.ran[position][index], -1.0)] if index >= 0 else []

    def _add_chains(self) -> None:
        """Require the inputs of recomputation at each place, and hold results."""
        lp, model = self._lp, self._model
        for position, places in model.places.items():
            for tensor in model.inputs_again(position):
                if not tensor.decided and tensor.back:
                    continue  # kept, as it cannot be decided about
                for place, ran in zip(places, self.ran[position], strict=True):
                    terms = [(ran, 1.0)]
                    if tensor.decided:
                        terms.append((self.keep[tensor.name], -1.0))
                        index = bisect_right(tensor.places, place) - 1
                        if index >= 0:
                            terms.append((self.back[tensor.name][index], -1.0))
                    if model.remakes(tensor):
                        terms += self._ran_by(tensor.maker, place)
                    elif not tensor.decided:
                        continue
                    lp.limit(terms, 0.0)
        for tensor in model.tensors.values():
            if not tensor.places or not (tensor.decided or len(tensor.chain) > 1):
                continue
            end = tensor.back[0] if tensor.back else tensor.until + 1
            for i, (start, stop) in enumerate(
                itertools.pairwise([*tensor.places, end])
            ):
                if stop <= start:
                    continue
                if tensor.decided:
                    back = self.back[tensor.name][i]
                    self._held.append((start, stop, back, tensor.size))
                if model.remakes(tensor) and i < len(self.ran[tensor.maker]):
                    ran = self.ran[tensor.maker][i]
                    self._held.append((start, stop, ran, tensor.size))

    def _add_copies(self) -> list[list[tuple[int, float]]]:
        """Add the flow of copies; return the bytes that leave in each window."""
        lp, model = self._lp, self._model
        leaving: list[list[tuple[int, float]]] = [[] for _ in model.starts]
        needed: list[list[tuple[int, float]]] = [[] for _ in model.starts]
        self._copying: list[list[tuple[int, float]]] = [[] for _ in model.starts]
        for tensor in self._tensors:
            back, size = self.back[tensor.name], tensor.size / self._unit
            self._leave(leaving, tensor.last, back[-1], tensor.size)
            for i, place in enumerate(tensor.places):
                arrives = [(back[i], size), *([(back[i - 1], -size)] if i else [])]
                needed[model.window(place)] += arrives
        for paged, (nbytes, i, j) in zip(self._paged, self._gaps, strict=True):
            self._leave(leaving, i, paged, nbytes)
            needed[model.window(j)].append((paged, nbytes / self._unit))
            self._held.append((i + 1, j, paged, -nbytes))
        for w, (out, into) in enumerate(zip(self._out, self._in, strict=True)):
            queue, ready = self._queue[w], self._prefetched[w]
            old_queue = [(self._queue[w - 1], -1.0)] if w else []
            old_ready = [(self._prefetched[w - 1], -1.0)] if w else []
            left = [(v, -size) for v, size in leaving[w]]
            lp.equal([(queue, 1.0), (out, 1.0), *old_queue, *left], 0.0)
            lp.equal([(ready, 1.0), (into, -1.0), *old_ready, *needed[w]], 0.0)
            if needed[w]:  # prefetched in an earlier window
                lp.limit([*needed[w], *old_ready], 0.0)
        return leaving

    def _leave(
        self,
        leaving: Sequence[list[tuple[int, float]]],
        last: int,
        variable: int,
        nbytes: int,
    ) -> None:
        """Copy a fraction of some bytes out after their last use."""
        term = variable, nbytes / self._unit
        first = self._model.window(last)
        leaving[first].append(term)
        behind = self._model.window_after(last, nbytes / self._rates[0])
        for w in range(first, behind + 1):
            self._copying[w].append(term)

    def _add_memory(self, leaving: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Require the resident bytes at critical nodes and at places to fit."""
        lp, model = self._lp, self._model
        for tensor in self._tensors:
            first, behind = model.kept_range(tensor)
            self._held.append((first, behind, self.keep[tensor.name], tensor.size))
        chains: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for position in model.transients:
            for i, place in enumerate(model.places[position]):
                chains[place].append((position, i))
        rows = [(p, False) for p in model.critical()]
        places = dict.fromkeys(p for found in model.places.values() for p in found)
        rows = sorted(
            [*rows, *((p, True) for p in places)], key=lambda r: (r[0], not r[1])
        )
        marks = [position for position, _ in rows]
        changes: list[list[tuple[int, float]]] = [[] for _ in range(len(rows) + 1)]
        for first, behind, variable, size in self._held:
            at, until = _index(marks, first), _index(marks, behind)
            if at < until:
                changes[at].append((variable, -size / self._unit))
                changes[until].append((variable, size / self._unit))
        self._growth: list[tuple[int, int, float]] = []
        before: list[tuple[int, float]] = []
        for k, (position, chain) in enumerate(rows):
            held = lp.variable(math.inf, lower=-math.inf)
            lp.equal([(held, 1.0), *before, *changes[k]], 0.0)
            before = [(held, -1.0)]
            w = model.window(position)
            terms = [(held, 1.0)]
            flows = [(self._in[w], 1.0), *leaving[w]]
            if w:
                flows += [(self._queue[w - 1], 1.0), (self._prefetched[w - 1], 1.0)]
            if not chain:
                terms += self._workspaces(position, w)
                fixed = model.base[position]
            else:
                fixed = model.before(position)
                if chains[position]:
                    transient = lp.variable(math.inf)
                    terms.append((transient, 1.0))
                    for node, i in chains[position]:
                        size = model.transients[node] / self._unit
                        run = [(self.ran[node][i], size)]
                        if i:
                            run.append((self.ran[node][i - 1], -size))
                        lp.limit([*run, (transient, -1.0)], 0.0)
            most = (self._budget - fixed - self._margins.get(w, 0.0)) / self._unit
            lp.limit([*terms, *flows], most)
            # A tensor is on the device as a whole while any of it is copied.
            lp.limit([*terms, *self._copying[w]], most)

    def _workspaces(self, position: int, window: int) -> list[tuple[int, float]]:
        """Return the terms of a convolution's workspace beyond the least."""
        front = self._model.fronts.get(self._model.nodes[position].name, [])
        if len(front) < 2:
            return []
        terms = []
        slowest, fastest = front[0], front[-1]
        chosen = [self._lp.variable() for _ in front[1:]]
        self._lp.limit([(v, 1.0) for v in chosen], 1.0)
        # A node's time is that of its fastest plan; smaller plans add to it.
        self._growth.append((window, -1, slowest[1] - fastest[1]))
        for variable, (nbytes, ms) in zip(chosen, front[1:], strict=True):
            terms.append((variable, (nbytes - slowest[0]) / self._unit))
            self._growth.append((window, variable, ms - slowest[1]))
        return terms

    def _add_times(self, leaving: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Bound the time of each window by its nodes and by the copies beside them."""
        lp, model, profile = self._lp, self._model, self._model.request.profile
        again: list[list[tuple[int, float]]] = [[] for _ in model.starts]
        fixed = [
            sum(model.node_ms[first:behind])
            for first, behind in itertools.pairwise([*model.starts, len(model.nodes)])
        ]
        for position, places in model.places.items():
            ms = model.again_ms(position)
            for i, place in enumerate(places):
                again[model.window(place)].append((self.ran[position][i], ms))
                if i + 1 < len(places):  # what has run once does not run again
                    later = again[model.window(places[i + 1])]
                    later.append((self.ran[position][i], -ms))
        for window, variable, ms in self._growth:
            if variable < 0:
                fixed[window] += ms
            else:
                again[window].append((variable, ms))
        links = [*zip((self._out, self._in), self._rates, strict=True)]
        for w, ms in enumerate(self._ms):
            slower = [
                (copies[w], profile.copy_share * self._unit / rate)
                for copies, rate in links
                if profile.copy_share and math.isfinite(rate)
            ]
            lp.limit([(ms, -1.0), *again[w], *slower], -fixed[w])
            for copies, rate in links:
                if math.isfinite(rate):
                    lp.limit([(copies[w], 1.0), (ms, -rate / self._unit)], 0.0)
        if profile.network_ms:
            self._add_exchanges()

    def _add_exchanges(self) -> None:
        """Let the windows up to each one take as long as the transfers awaited in it.

        Collectives start early enough, but each transfers alone.
        """
        lp, model = self._lp, self._model
        known = exchanges_of(model.graph, model.request.profile)
        awaited = {a: i for i, (_, made) in reversed([*known.items()]) for a in made}
        fixed = [0.0] * len(self._ms)
        again: list[list[tuple[int, float]]] = [[] for _ in self._ms]
        for position, (ms, _) in known.items():
            if ms is None:
                continue
            fixed[model.window(awaited.get(position, position))] += ms
            places = model.places.get(position, ())
            for i, (place, ran) in enumerate(
                zip(places, self.ran.get(position, ()), strict=True)
            ):
                again[model.window(place)].append((ran, ms))
                if i + 1 < len(places):
                    again[model.window(places[i + 1])].append((ran, -ms))
        before: list[tuple[int, float]] = []
        for w, ms in enumerate(self._ms):
            idle = lp.variable(math.inf)  # time that the network was free so far
            lp.equal([(idle, 1.0), *before, (ms, -1.0), *again[w]], -fixed[w])
            before = [(idle, -1.0)]


def _index(marks: Sequence[int], position: int) -> int:
    """Return the index of the first mark at a position or behind it."""
    return bisect_right(marks, position - 1)


def fill(
    request: StepRequest, best: SearchState
) -> tuple[float | None, Sequence[Choices]]:
    """Improve the best plan of a search by rounded optima of the program.

    Returns:
        The optimum in ms, None if the program has none or no solver can be run; and
        the residencies that fit, the fastest first.
    """
    try:
        return _Rounding(request, best).run()
    except solver_errors() as error:
        _log.warning("the solver cannot be run: %s", error)
        return None, ()


class _Rounding:
    """Rounds of solving, rounding, scheduling and repair."""

    def __init__(self, request: StepRequest, best: SearchState) -> None:
        self._request, self._best = request, best
        self._model = StepModel(request)
        self._classes = self._alike()
        self._margins: dict[int, float] = {}
        self._optimum, self._room = 0.0, 1.0
        self._fitting: list[tuple[float, Choices]] = []

    def run(self) -> tuple[float | None, Sequence[Choices]]:
        """Run the rounds; see `fill`."""
        for part, share in _PLAIN_ROUNDS if self._model.plain else _ROUNDS:
            exact = part == share == 1.0
            solved = self._solve(part, share, self._margins if exact else {})
            if solved is None:
                if self._optimum:
                    continue  # with slower links there may be an optimum
                break
            program, found = solved
            self._optimum = self._optimum or found.step_ms
            if self._best.step_ms <= _ENOUGH * found.step_ms:
                break
            before = dict(self._margins)
            choices = self._dive(program, found, _DIVES if exact else _DIVES // 2)
            self._try(choices)
            # A scheduler keeps offloaded tensors that have room; so a few bytes too
            # many become a short copy instead of a refusal.
            big = _BIG * self._request.budget
            offloaded = {
                name: Residency.OFFLOAD
                if choice is Residency.KEEP and self._model.tensors[name].size >= big
                else choice
                for name, choice in choices.items()
            }
            self._try(offloaded)
            close = self._best.step_ms <= _ENOUGH * self._optimum
            if close or (self._model.plain and self._margins == before):
                break
        self._fitting.sort(key=lambda pair: pair[0])
        return self._optimum or None, [choices for _, choices in self._fitting]

    def _solve(
        self, part: float, share: float, margins: Margins
    ) -> tuple[_Program, Fractions] | None:
        """Solve the program, if it has an optimum.

        The first time, find the room that it needs.
        """
        known: dict[float, tuple[_Program, Fractions]] = {}

        def works(room: float) -> bool:
            budget = room * part * self._request.budget
            if share == 1.0 and budget < max(self._model.base):
                return False  # as nothing is paged
            program = _Program(self._model, budget, margins, share)
            found = program.solve()
            if found is not None:
                known[room] = program, found
            return found is not None

        large = len(self._model.nodes) >= _ROOMY_NODES
        rooms = _ROOM if large and not self._optimum else (self._room,)
        at = 0
        # Even with the most room there may be no optimum: then nothing else is tried.
        if not works(rooms[0]) and len(rooms) > 1 and works(rooms[-1]):
            at = bisect_left(rooms, True, 1, len(rooms) - 1, key=works)
        self._room = rooms[at]
        return known.get(self._room)

    def _dive(self, program: _Program, found: Fractions, dives: int) -> Choices:
        """Round a few tensors at a time, the surest first, and solve in between."""
        fixed = self._sure(found)
        if len(self._model.nodes) > _MOST_NODES:
            dives = _FEW_DIVES
        while dives and len(fixed) < len(found.keep):
            unsure = [name for name in found.keep if name not in fixed]
            unsure.sort(key=lambda name: -found.certainty(name))
            count = max(1, len(unsure) // dives)
            dives -= 1
            better = None
            for rank in range(_RANKS if count == 1 else 1):
                more = {n: found.ranked(n)[rank] for n in unsure[:count]}
                solved = program.solve(fixed | more)
                if solved and (better is None or solved.step_ms < better[0].step_ms):
                    better = solved, more
                if better and better[0].step_ms < _ENOUGH * found.step_ms:
                    break
            if better is None:
                break
            found = better[0]
            fixed |= better[1] | self._sure(found)
        return self._carried(found) | fixed

    def _sure(self, found: Fractions) -> Choices:
        sure = {name: found.surely(name) for name in found.keep}
        return {name: choice for name, choice in sure.items() if choice}

    def _carried(self, found: Fractions) -> Choices:
        """Round by classes of tensors, carrying errors over to the next tensor."""
        debt: dict[object, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        order = (Residency.KEEP, Residency.OFFLOAD, Residency.RECOMPUTE)
        choices = {}
        for name, keep in found.keep.items():
            offload = found.offload[name]
            shares = [keep, offload, 1 - keep - offload]
            owed = debt[self._classes[name]]
            sums = [
                a + b if a > 1 - _SURE else -9.0
                for a, b in zip(shares, owed, strict=True)
            ]
            at = sums.index(max(sums))
            for i, share in enumerate(shares):
                owed[i] += share - (i == at)
            choices[name] = order[at]
        return choices

    def _alike(self) -> dict[str, object]:
        """Return the class of each tensor: operations and sizes around it."""
        graph, nodes = self._model.graph, self._model.nodes
        return {
            t.name: (
                nodes[t.maker].op,
                t.size,
                tuple(nodes[c].op for c in t.chain),
                tuple(graph.tensors[i].nbytes for i in nodes[t.maker].inputs),
            )
            for t in self._model.tensors.values()
        }

    def _try(self, choices: Choices) -> None:
        """Schedule residencies; if they do not fit, spare the missing bytes."""
        error = self._schedule(choices)
        if error is not None and error.least_bytes is not None:
            short = error.least_bytes - self._request.budget
            self._spare(self._window_of(error.node), short)

    def _spare(self, window: int, nbytes: float) -> None:
        """Use fewer bytes in a window from the next round on."""
        self._margins[window] = self._margins.get(window, 0.0) + nbytes

    def _window_of(self, node: str | None) -> int:
        origin = (node or "").partition("~")[0]
        return self._model.window(self._model.graph.positions.get(origin, 0))

    def _spare_waits(self, plan: StepPlan) -> None:
        """Use fewer bytes where computation waited for copies."""
        lanes = [lane for lane in plan.prediction.lanes if lane.engine == "compute"]
        rate = self._request.profile.out_bytes_per_ms
        for before, lane in itertools.pairwise(lanes):
            wait = lane.start_ms - before.stop_ms
            if wait > _SHORT * plan.prediction.step_ms:
                self._spare(self._window_of(lane.name), wait * rate)

    def _schedule(self, choices: Choices) -> PlanningError | None:
        """Offer the plans of residencies by every scheduler; return a refusal."""
        request = self._request
        kept = Residency.KEEP
        tensors = self._model.tensors
        residency = {
            name: choice
            for name, choice in choices.items()
            if choice is not kept or not tensors[name].back
        }
        names = ["timed", "adaptive_window"]
        found: list[UnsimulatedPlan] = []
        refusal: PlanningError | None = None
        for name in names if request.scheduler is None else [request.scheduler]:
            plain = self._model.plain and self._room == 1.0
            for paged in ({},) if plain else _ALSO_PAGED:
                try:
                    plan = schedule_residency(
                        request.scheduled(name), residency | paged, self._best.step_ms
                    )
                except PlanningError as error:
                    # The traceback would hold this frame.
                    refusal = refusal or error.with_traceback(None)
                    continue
                found.append(plan)
                self._best.take(plan)
                if not self._model.plain:
                    self._fitting.append((plan.step_ms(), residency | paged))
                break
        if found and refusal is None:
            fastest = min(found, key=lambda plan: plan.step_ms())
            if fastest.step_ms() > _ENOUGH * self._optimum:
                self._spare_waits(fastest.plan())
        return refusal
