"""The least predicted time within a budget: our own policy, a search on the simulator.

It starts from what every other policy decides, so it is never worse than the best of
them. Between "offload everything" and "compute everything again" lies a family with one
parameter: how many of the tensors that are cheapest to compute, per byte, are computed
again. The best member is then improved tensor by tensor. What a residency buys with its
bytes, residency of others or faster convolutions, the scheduler and the dynamic
workspaces decide, and the simulator weighs it. Parameters and optimizer state leave
where that is faster, or where nothing else fits.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mucudnn.errors import PlanningError
from mucudnn.passes.graph.recompute_chains import chain, is_checkpoint
from mucudnn.passes.planning.evaluate import StepPlan
from mucudnn.passes.planning.trial import Trial
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    POLICIES,
    RECOMPUTED,
    Residency,
    Saved,
    Step,
    decide,
    saved_tensors,
)
from mucudnn.passes.residency.milp import MOST_SAVED, exact
from mucudnn.passes.residency.published import keep_all
from mucudnn.passes.residency.vdnn_dyn import vdnn_dyn
from mucudnn.passes.scheduling import SCHEDULERS

__all__ = ["search", "smallest"]

_WORK = 60_000
"""Nodes, and parameters and state that leave, that all trials of a search may schedule
together, beyond the first ones."""

_SLOW = 1.5
"""Times the unbounded step, from which on more is tried."""

_LEAST_TRIALS = 12
"""How many trials of the largest graphs may follow the first ones."""


_OF_GROUPS = {
    EVERYTHING: (Residency.KEEP, Residency.PAGE),
    PERSISTENTS: (Residency.KEEP, Residency.OFFLOAD, Residency.PAGE),
}
"""What may become of tensors that nothing can compute again."""


_WINNING = (
    Residency.RECOMPUTE,
    Residency.RECOMPUTE_EACH,
    Residency.KEEP,
    Residency.OFFLOAD,
    Residency.PAGE,
)
"""Residencies, those first to which a change most often helps."""


def search(trial: Trial) -> StepPlan:
    """The best plan that is found.

    Args:
        trial: Schedules residencies.

    Raises:
        PlanningError: Not even what needs least fits; it is the error of what came
            closest.
    """
    step = trial.step
    candidates = _by_cost(step)
    seeds = _seeds(step, candidates)
    best = _Best(trial, max(_WORK, _LEAST_TRIALS * len(step.graph.nodes)))
    if best.consider(keep_all(step)) and best.step_ms <= _unbounded_ms(trial):
        return best.plan
    for residency in seeds:
        best.consider(residency, free=True)
    fits = best.found
    if not fits:
        best.consider(smallest(trial, seeds), free=True)
    if trial.convolutions == "dynamic":
        _offer_vdnn_dyn(trial, best)
    if len(candidates) <= MOST_SAVED:
        solution = exact(step, trial.preparer)
        if solution is not None:
            best.consider(solution.residency, free=True)
    if step.hosted is None:
        for residency in [best.residency] if fits else seeds:
            for choice in (Residency.OFFLOAD, Residency.PAGE):
                best.consider({**residency, PERSISTENTS: choice}, free=True)
    for residency in _family(candidates, best):
        best.consider(residency)
    _improve(candidates, best)
    if trial.any_scheduler:
        _offer_other_schedulers(trial, candidates, best)
    return best.plan


def _unbounded_ms(trial: Trial) -> float:
    """What a step takes with all the memory it wants; a little more for rounding."""
    unbounded = replace(trial, step=replace(trial.step, budget=math.inf))
    return unbounded(keep_all(trial.step)).prediction.step_ms * (1 + 1e-9)


def smallest(
    trial: Trial, seeds: Sequence[Mapping[str, Residency]] | None = None
) -> Mapping[str, Residency]:
    """Residencies that fit, of those that need least.

    A search finds a plan where there are any, and refuses to look for one otherwise:
    so it is known without a search which budget works.

    Args:
        trial: Under a budget.
        seeds: Where a search begins, if that is known.

    Raises:
        PlanningError: None fit; it is the error of what came closest.
    """
    if seeds is None:
        seeds = _seeds(trial.step, _by_cost(trial.step))
    closest: PlanningError | None = None
    for paged in ({PERSISTENTS: Residency.PAGE}, {}):
        for seed in seeds:
            try:
                trial.check({**seed, **paged})
            except PlanningError as e:
                closest = e if closest is None else _closer(closest, e)
            else:
                return {**seed, **paged}
    raise closest or PlanningError("nothing was tried")


def _closer(one: PlanningError, other: PlanningError) -> PlanningError:
    """The error that says that less would do."""
    return min(one, other, key=lambda e: e.least_bytes or math.inf)


def _offer_vdnn_dyn(trial: Trial, best: "_Best") -> None:
    others = ("on_demand",) if trial.any_scheduler else ()
    for scheduler in (trial.scheduler, *others):
        with suppress(PlanningError):
            best.offer(vdnn_dyn(replace(trial, scheduler=scheduler)))


def _offer_other_schedulers(
    trial: Trial, candidates: list["_Candidate"], best: "_Best"
) -> None:
    """What is best so far, and what policies decide, timed in other ways.

    Where a step is slow all the same, it is worth a search of its own under the best of
    these schedulers.
    """
    work = max(_WORK, _LEAST_TRIALS * len(trial.step.graph.nodes))
    found = best.residency
    rivals = []
    for name in SCHEDULERS.table:
        if name != trial.scheduler:
            other = replace(trial, scheduler=name)
            rival = _Best(other, work // 2)
            for residency in (found, *_decided(trial.step)):
                rival.consider(residency, free=True)
            rivals.append(rival)
    rival = min(rivals, key=lambda r: r.step_ms)
    if min(best.step_ms, rival.step_ms) > _SLOW * _unbounded_ms(trial):
        _improve(candidates, rival)
    if rival.found:
        best.offer(rival.plan)


class _Best:
    """The best plan so far, and how much more may be tried."""

    def __init__(self, trial: Trial, left: int) -> None:
        self._trial = trial
        self._left = left
        self._plan: StepPlan | None = None
        self._error: PlanningError | None = None
        self._tried: set[frozenset[tuple[str, Residency]]] = set()

    def exhausted(self) -> bool:
        """Whether nothing more may be tried."""
        return self._left <= 0

    @property
    def step_ms(self) -> float:
        return math.inf if self._plan is None else self._plan.prediction.step_ms

    @property
    def found(self) -> bool:
        """Whether anything fits."""
        return self._plan is not None

    @property
    def residency(self) -> Mapping[str, Residency]:
        """Of the best plan; empty without one."""
        return {} if self._plan is None else self._plan.residency

    @property
    def plan(self) -> StepPlan:
        if self._plan is None:
            raise self._error or PlanningError("nothing was tried")
        return self._plan

    def consider(
        self, residency: Mapping[str, Residency], *, free: bool = False
    ) -> bool:
        """Try residencies; whether they fit and are better than all before.

        Args:
            residency: Of saved tensors.
            free: Whether this does not count as work.
        """
        key = frozenset(residency.items())
        if key in self._tried or (self.exhausted() and not free):
            return False
        self._tried.add(key)
        ready = self._trial.preparer(residency)
        visitors = sum(ready.uses[name].persistent for name in ready.swaps)
        self._left -= 0 if free else len(ready.graph.nodes) + visitors
        try:
            plan = self._trial(residency)
        except PlanningError as e:
            self._error = e if self._error is None else _closer(self._error, e)
            return False
        return self.offer(plan)

    def offer(self, plan: StepPlan) -> bool:
        """Take a plan; whether it is better than all before."""
        if plan.prediction.step_ms >= self.step_ms:
            return False
        self._plan = plan
        return True


@dataclass(frozen=True, slots=True)
class _Candidate:
    saved: Saved
    again_ms: float
    checkpoint: bool


def _by_cost(step: Step) -> list[_Candidate]:
    """Saved tensors, the cheapest to compute again per byte first."""
    tensors = saved_tensors(step.graph)
    names = {saved.name for saved in tensors}
    found = []
    for saved in tensors:
        nodes = chain(step.graph, saved.name, names.__contains__)
        again = sum(step.profile.node_ms[node.name] for node in nodes)
        checkpoint = is_checkpoint(step.graph, saved.name, names.__contains__)
        found.append(_Candidate(saved, again, checkpoint))
    return sorted(found, key=lambda c: c.again_ms / max(1, c.saved.nbytes))


def _seeds(step: Step, candidates: list[_Candidate]) -> list[Mapping[str, Residency]]:
    """What every policy decides, and what is least of all: where a search begins."""
    found = list(_decided(step))
    for mode in RECOMPUTED:
        for count in (len(candidates) // 2, len(candidates)):
            found.append(_mixed(candidates, count, mode))
        found.append(_mixed(candidates, len(candidates), mode, Residency.PAGE))
    return found


def _decided(step: Step) -> Iterator[Mapping[str, Residency]]:
    """What every policy decides."""
    return (decide(name, step) for name in POLICIES.table)


def _mixed(
    candidates: list[_Candidate],
    count: int,
    mode: Residency,
    others: Residency = Residency.KEEP,
) -> dict[str, Residency]:
    """The first `count` candidates computed again, all others offloaded.

    Checkpoints are never computed for every use: chains of them take quadratic time.
    """

    def choice(index: int, candidate: _Candidate) -> Residency:
        each = mode is Residency.RECOMPUTE_EACH
        if index >= count or (each and candidate.checkpoint):
            return Residency.OFFLOAD
        return mode

    return {EVERYTHING: others} | {
        c.saved.name: choice(i, c) for i, c in enumerate(candidates)
    }


def _family(
    candidates: list[_Candidate], best: _Best
) -> Iterator[dict[str, Residency]]:
    """Members of the one-parameter family: coarse first, then around the best."""
    total = len(candidates)
    for mode in RECOMPUTED:
        stride = max(1, total // 8)
        counts = sorted({*range(0, total + 1, stride), total})
        scores: dict[int, float] = {}
        while True:
            for count in counts:
                if count in scores:
                    continue
                before = best.step_ms
                persistents = best.residency.get(PERSISTENTS, Residency.KEEP)
                yield {**_mixed(candidates, count, mode), PERSISTENTS: persistents}
                scores[count] = best.step_ms if best.step_ms < before else math.inf
            if stride == 1 or best.exhausted():
                break
            stride = max(1, stride // 4)
            centre = min(scores, key=lambda count: (scores[count], count))
            counts = [
                count
                for count in range(centre - 2 * stride, centre + 2 * stride + 1, stride)
                if 0 <= count <= total
            ]


def _improve(candidates: list[_Candidate], best: _Best) -> None:
    """Change one tensor's residency at a time, then two, the largest first.

    One kind of change goes through all tensors before the next: what is computed again
    instead of copied wins most, and most often.
    """
    largest = sorted(candidates, key=lambda c: -c.saved.nbytes)
    names = [*(candidate.saved.name for candidate in largest), EVERYTHING, PERSISTENTS]
    while _improved(_single_changes(names), best) or _improved(_pairs(names), best):
        continue


def _single_changes(names: Sequence[str]) -> Iterator[list[tuple[str, Residency]]]:
    for choice in _WINNING:
        for name in names:
            if choice in _OF_GROUPS.get(name, _WINNING):
                yield [(name, choice)]


def _pairs(names: Sequence[str]) -> Iterator[list[tuple[str, Residency]]]:
    for one, other in itertools.combinations(names, 2):
        for first in _OF_GROUPS.get(one, _WINNING):
            for second in _OF_GROUPS.get(other, _WINNING):
                yield [(one, first), (other, second)]


def _improved(changes: Iterable[Sequence[tuple[str, Residency]]], best: _Best) -> bool:
    """Try changes one after the other; whether any of them helped."""
    improved = False
    for change in changes:
        if best.exhausted():
            return False
        improved |= best.consider({**best.plan.residency, **dict(change)})
    return improved
