"""A search for steps in slices: starts by blocks, changes of all slices of a tensor.

A tensor that is cut into k slices is k tensors to decide about, and one at a time is
too little to see a gain. So changes are of all slices of a tensor, or of the first half
of them. It starts from families whose members treat alike what is alike: what is cheap
to compute per byte runs again, of the rest what was made first leaves; and blocks, of
which the output is kept or leaves and what lies within is computed again.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from mucudnn.errors import PlanningError
from mucudnn.ir.graph import Graph
from mucudnn.passes.graph.split_slices import of_whole
from mucudnn.passes.planning.evaluate import plan_residency
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import EVERYTHING, PERSISTENTS, RECOMPUTED, Residency
from mucudnn.passes.residency.candidates import Candidate, by_cost, candidates_of
from mucudnn.passes.scheduling import SCHEDULERS
from mucudnn.passes.scheduling.step_plan import StepPlan

__all__ = ["search_slices"]

Residencies = Mapping[str, Residency]

_SHARES = (0.0, 0.35, 0.6, 1.0)
"""Of the bytes that are saved: how many are computed again."""

_LEAVING = (0.0, 0.3, 1.0)
"""Of the others: how many leave."""

_WORK = 100_000
"""Nodes that all trials of a search may schedule together, beyond the starts."""

_LEAST_TRIALS = 10

_STARTS = 3
"""How many of the starts are timed by every scheduler."""

_CHOICES = (
    Residency.RECOMPUTE,
    Residency.RECOMPUTE_EACH,
    Residency.KEEP,
    Residency.OFFLOAD,
    Residency.PAGE,
)
"""What may become of a tensor, the first most often of use."""


def search_slices(request: StepRequest) -> StepPlan:
    """The best plan that is found for a step in slices, under a budget.

    Raises:
        PlanningError: None of the starts fits; it is the error of what came closest.
    """
    candidates = candidates_of(request)
    best = _Best(request.scheduled(request.timing))
    for others in (Residency.KEEP, Residency.PAGE):
        for residency in _starts(request.graph, candidates):
            best.consider({EVERYTHING: others, PERSISTENTS: others, **residency})
        if best.plan is not None:
            break
    names = list(SCHEDULERS.table) if request.scheduler is None else []
    for name, (_, residency) in itertools.product(names, best.first(_STARTS)):
        best.consider(residency, request.scheduled(name))
    if best.plan is None:
        raise best.error
    best.left = max(_LEAST_TRIALS, _WORK // len(request.graph.nodes))
    groups = _groups(candidates)
    while _improved(best, groups, False) or _improved(best, groups, True):
        continue
    return best.plan


class _Best:
    """The best plan so far, those it came from, and how many may follow."""

    def __init__(self, request: StepRequest) -> None:
        self.plan: StepPlan | None = None
        self.error = PlanningError("nothing was tried")
        self.left = 1 << 30
        self._request = request
        self._found: list[tuple[float, int, Residencies]] = []
        self._tried: set[tuple[str, frozenset[tuple[str, Residency]]]] = set()

    def consider(
        self, residency: Residencies, request: StepRequest | None = None
    ) -> bool:
        """Plan with residencies; whether that is better than all before."""
        asked = self._request if request is None else request
        key = str(asked.timing), frozenset(residency.items())
        if key in self._tried or self.left <= 0:
            return False
        self._tried.add(key)
        self.left -= 1
        try:
            plan = plan_residency(asked, residency)
        except PlanningError as e:
            if (e.least_bytes or math.inf) < (self.error.least_bytes or math.inf):
                self.error = e.with_traceback(None)
            return False
        step_ms = plan.prediction.step_ms
        self._found.append((step_ms, len(self._found), residency))
        if self.plan is not None and step_ms >= self.plan.prediction.step_ms:
            return False
        self.plan, self._request = plan, asked
        return True

    def first(self, count: int) -> list[tuple[float, Residencies]]:
        """The best residencies so far."""
        return [(ms, residency) for ms, _, residency in sorted(self._found)[:count]]


def _starts(graph: Graph, candidates: Sequence[Candidate]) -> Iterator[Residencies]:
    for again, leaving in itertools.product(_SHARES, _LEAVING):
        for mode in RECOMPUTED:
            yield _balanced(candidates, again, leaving, mode)
    kept = (Residency.KEEP, Residency.OFFLOAD, Residency.PAGE)
    for far, near, cheap in itertools.product(kept, RECOMPUTED, RECOMPUTED):
        for every in (1, 2):
            yield _by_blocks(graph, candidates, (far, near, cheap), every)


def _balanced(
    candidates: Sequence[Candidate], again: float, leaving: float, mode: Residency
) -> dict[str, Residency]:
    """The cheapest share of bytes is computed again; of the rest the first leave."""
    total = sum(c.saved.nbytes for c in candidates)
    found: dict[str, Residency] = {}
    rest, done = [], 0
    for candidate in by_cost(candidates):
        each = mode is Residency.RECOMPUTE_EACH and candidate.checkpoint
        if done >= again * total or candidate.again_ms == math.inf or each:
            rest.append(candidate)
        else:
            found[candidate.saved.name] = mode
            done += candidate.saved.nbytes
    total, done = sum(c.saved.nbytes for c in rest), 0
    for candidate in sorted(rest, key=lambda c: c.saved.first):
        if done < leaving * total:
            found[candidate.saved.name] = Residency.OFFLOAD
            done += candidate.saved.nbytes
    return found


def _by_blocks(
    graph: Graph,
    candidates: Sequence[Candidate],
    choices: tuple[Residency, Residency, Residency],
    every: int,
) -> dict[str, Residency]:
    """What joins branches, what is expensive within a block, and what is cheap.

    Of every few blocks only one output is treated as such.
    """
    far, near, cheap = choices
    found: dict[str, Residency] = {}
    blocks: dict[str, int] = {}
    for candidate in candidates:
        name = candidate.saved.name
        if candidate.again_ms == math.inf:
            found[name] = Residency.KEEP
        elif not candidate.checkpoint:
            found[name] = cheap
        elif _joins(graph, name):
            number = blocks.setdefault(of_whole(name), len(blocks))
            found[name] = near if number % every else far
        else:
            found[name] = near
    return found


def _joins(graph: Graph, name: str) -> bool:
    """Whether a checkpoint is a block's output: nothing expensive made it."""
    node = graph.producers[name]
    while node.traits.overwrites and not (node.traits.joint or node.traits.expensive):
        node = graph.producers[node.inputs[node.traits.overwrites[0]]]
    return node.traits.joint


def _groups(candidates: Sequence[Candidate]) -> list[list[str]]:
    """Saved tensors that are slices of one, the largest first."""
    found: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for candidate in candidates:
        whole = of_whole(candidate.saved.name)
        found.setdefault(whole, []).append(candidate.saved.name)
        sizes[whole] = sizes.get(whole, 0) + candidate.saved.nbytes
    return [found[whole] for whole in sorted(found, key=lambda w: -sizes[w])]


def _improved(best: _Best, groups: Sequence[Sequence[str]], halves: bool) -> bool:
    """Change all slices of a tensor, or half of them; whether anything helped."""
    improved = False
    for choice in _CHOICES:
        for group in groups:
            if halves and len(group) < 2:
                continue
            members = group[: len(group) // 2] if halves else group
            if best.left <= 0 or best.plan is None:
                return False
            before = best.plan.residency
            improved |= best.consider({**before, **dict.fromkeys(members, choice)})
    return improved
