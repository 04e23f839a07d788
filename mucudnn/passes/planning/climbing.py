"""Improvement of one plan by changes of residencies, one after another.

Networks repeat blocks, and under a tight budget no change of a single tensor helps: so
the largest tensors change first, then equivalent tensors and whole blocks, then others.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy

from mucudnn.errors import PlanningError
from mucudnn.ir.graph import Graph
from mucudnn.passes.planning.request import (
    StepRequest,
    UnsimulatedPlan,
    schedule_residency,
)
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    RECOMPUTED_BACKWARD,
    Residency,
)
from mucudnn.passes.residency.candidates import (
    Candidate,
    Change,
    group_changes,
    same_changes,
    single_changes,
    slices_of,
    total_bytes,
)
from mucudnn.passes.scheduling.step_plan import StepPlan

_FEW = 16
"""Number of the largest tensors that are tried one by one before groups."""

_DEAR = 0.5
"""Share of the time of copies above which a recomputation is not tried."""

_ROUNDED = 1 - 1e-9

_CHEAPER = {
    Residency.RECOMPUTE_EACH: (Residency.RECOMPUTE, Residency.OFFLOAD, Residency.KEEP),
    Residency.RECOMPUTE: (Residency.OFFLOAD, Residency.KEEP),
    Residency.KEEP: (Residency.OFFLOAD,),
}
"""Residencies of single tensors that help at last, by those that they have: less is
recomputed, and tensors that were kept make room for that."""


def closer(one: PlanningError, other: PlanningError) -> PlanningError:
    """Return the error with the smaller sufficient budget."""
    return min(one, other, key=lambda e: e.least_bytes or math.inf)


class SearchState:
    """The best plan so far of a step; residencies are tried once."""

    def __init__(self, request: StepRequest) -> None:
        self._request = request
        self._best: UnsimulatedPlan | StepPlan | None = None
        self._step_ms = math.inf
        self._error: PlanningError | None = None
        self._tried: set[frozenset[tuple[str, Residency]]] = set()

    @property
    def step_ms(self) -> float:
        """Time of the best plan; infinity without one."""
        return self._step_ms

    @property
    def found(self) -> bool:
        """True if there is a plan that fits."""
        return self._best is not None

    @property
    def residency(self) -> Mapping[str, Residency]:
        """Residencies of the best plan; empty without one."""
        return {} if self._best is None else self._best.residency

    @property
    def plan(self) -> StepPlan:
        """The best plan, emitted on first access; without one, the closest error."""
        if self._best is None:
            raise copy(self._error or PlanningError("nothing was tried"))
        if isinstance(self._best, UnsimulatedPlan):
            self._best = self._best.plan()
        return self._best

    def consider(self, residency: Mapping[str, Residency]) -> bool | None:
        """Try residencies; return whether they are better than all before.

        Returns:
            None if they were tried before.
        """
        key = frozenset(residency.items())
        if key in self._tried:
            return None
        self._tried.add(key)
        if self._too_much_compute(residency):
            return False
        try:
            found = schedule_residency(self._request, residency, self.step_ms)
            return self.take(found)
        except PlanningError as e:
            error = copy(e)  # without a traceback, which would hold callers' locals
            self._error = closer(self._error or error, error)
            return False

    def _too_much_compute(self, residency: Mapping[str, Residency]) -> bool:
        """Return whether compute alone takes as long as the best plan."""
        if self._best is None or self._request.convolutions != "dynamic":
            return False
        return self._request.compute_ms(residency) * _ROUNDED >= self.step_ms

    def offer(self, plan: StepPlan) -> bool:
        """Offer a plan; return whether it is better than all before."""
        return self._accept(plan, plan.prediction.step_ms)

    def take(self, found: UnsimulatedPlan) -> bool:
        """Take a scheduled plan; return whether it is better than all before."""
        return self._accept(found, found.step_ms(self.step_ms))

    def take_over(self, other: "SearchState") -> bool:
        """Adopt the best plan of others; return whether it is better."""
        return self._accept(other._best, other._step_ms)

    def _accept(self, plan: UnsimulatedPlan | StepPlan | None, step_ms: float) -> bool:
        if step_ms >= self._step_ms:
            return False
        self._best, self._step_ms = plan, step_ms
        return True


class Climb:
    """Improvement of a plan, a limited number of changes at a time.

    Args:
        request: The planning request; names the scheduler.
        changes: Changes that are tried in turn, see `changes_of`.
        start: Residencies to begin with.

    Attributes:
        state: The best plan so far.
    """

    def __init__(
        self,
        request: StepRequest,
        changes: Sequence[Change],
        start: Mapping[str, Residency] | None = None,
    ) -> None:
        self.state = SearchState(request)
        if start is not None:
            self.state.consider(start)
        self._request, self._all = request, changes
        self._changes = itertools.cycle(changes)
        self._behind = 0  # changes since one helped

    @property
    def step_ms(self) -> float:
        """Time of the best plan; infinity without one."""
        return self.state.step_ms

    def copy(self) -> "Climb":
        """Return a climb from the best plan, with the same changes."""
        return Climb(self._request, self._all, self.state.residency)

    def run(self, trials: int) -> None:
        """Go on with the changes, all around until none of them helps any more."""
        while trials > 0 and self._behind <= len(self._all):
            change = next(self._changes)
            better = self.state.consider({**self.state.residency, **dict(change)})
            trials -= better is not None
            self._behind = 0 if better else self._behind + 1

    def finish(self, names: Sequence[str], patience: int) -> None:
        """Give single tensors cheaper residencies for as long as that helps.

        Groups change first, see `run`: where memory is tight, single tensors make room
        only once it is known which blocks are recomputed.

        Args:
            names: The tensors, in the order of trials.
            patience: Changes in a row that may not help before this ends.
        """
        state, left, behind = self.state, patience, 0
        for name in itertools.cycle(names):
            others = state.residency.get(EVERYTHING, Residency.KEEP)
            behind += 1
            for choice in _CHEAPER.get(state.residency.get(name, others), ()):
                better = state.consider({**state.residency, name: choice})
                left -= better is not None
                if better:
                    behind, left = 0, patience
                    break
            if behind > len(names) or left <= 0:
                return


def try_changes(changes: Iterable[Change], state: SearchState) -> None:
    """Try changes one after another, each on the best plan so far."""
    for change in changes:
        state.consider({**state.residency, **dict(change)})


def in_turn(some: Iterable[Change], others: Iterable[Change]) -> Iterator[Change]:
    """Yield changes of both in turn, as long as there are any."""
    pairs = itertools.zip_longest(some, others, fillvalue=())
    return filter(None, itertools.chain.from_iterable(pairs))


def changes_of(
    graph: Graph, candidates: Sequence[Candidate], *, mixed: bool = False
) -> Iterator[Change]:
    """Yield changes for a climb: of the largest tensors, of groups, of others.

    All slices of a tensor change together before single slices do. Recomputation that
    takes more than half as long as copies has never helped, so it is not tried.

    Args:
        graph: The training graph.
        candidates: Its saved tensors.
        mixed: Whether groups and tensors change in turn, both those with the most bytes
            first. This helps earlier, but not always as much.
    """
    known = {c.saved.name: c for c in candidates}
    for change in _every_change(graph, candidates, mixed):
        (_, choice), *_ = change
        if choice in RECOMPUTED_BACKWARD:
            group = [known[name] for name, _ in change]
            cost = sum(c.recompute_ms for c in group)
            if cost > _DEAR * sum(c.copy_ms for c in group):
                continue
        yield change


def _every_change(
    graph: Graph, candidates: Sequence[Candidate], mixed: bool
) -> Iterator[Change]:
    tensors = slices_of(candidates)
    groups = sorted(tensors.values(), key=total_bytes, reverse=True)
    largest = [[c.saved.name for c in group] for group in groups]
    sliced = [names for names in largest if len(names) > 1]
    few = [] if mixed else largest[:_FEW]
    yield from same_changes(few, RECOMPUTED_BACKWARD if sliced else tuple(Residency))
    others = largest if sliced else largest[len(few) :]
    single = same_changes([*others, [EVERYTHING], [PERSISTENTS]])
    grouped = group_changes(graph, candidates)
    if mixed:
        yield from in_turn(grouped, single)
    else:
        yield from itertools.chain(grouped, single)
    yield from single_changes([*itertools.chain(*sliced)])
