"""The least predicted time within a budget: our own policy, a search on the simulator.

It starts from what every other policy decides, so it is never worse than the best of
them. Between "offload everything" and "compute everything again" lies a family with one
parameter: how many of the tensors that are cheapest to compute, per byte, are computed
again. The best member is then improved tensor by tensor. What a residency buys with its
bytes, residency of others or faster convolutions, the scheduler and the dynamic
workspaces decide, and the simulator weighs it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.passes.chains import chain
from mucudnn.passes.policies import keep_all
from mucudnn.passes.residency import (
    EVERYTHING,
    POLICIES,
    Residency,
    Saved,
    Step,
    saved_tensors,
)
from mucudnn.passes.step_plan import StepPlan, plan_residency, prepare

__all__ = ["minimum_budget", "plan_step", "search"]

PLANNED = "planned"
"""The policy that is a search over the others and beyond."""

_WORK = 100_000
"""Nodes that all trials of a search may schedule together."""

_LEAST_TRIALS = 24


def plan_step(
    graph: Graph,
    profile: Profile,
    *,
    budget: float,
    policy: str = PLANNED,
    scheduler: str = "timed",
    convolutions: str = "dynamic",
    plans: Mapping[str, ConvPlan] | None = None,
) -> StepPlan:
    """A training step under a budget, by a policy.

    Args:
        graph: A training graph that nothing has made in-place yet.
        profile: Of it.
        budget: Bytes for everything, parameters and state included.
        policy: `planned`, or a name in `POLICIES`.
        scheduler: Times the copies.
        convolutions: How convolutions get their workspace.
        plans: Convolution node -> plan, if they are fixed.

    Raises:
        PlanningError: It cannot fit; says how many bytes short, at which node, and the
            least budget that works.
        ValueError: A name is not known.
    """

    def trial(residency: Mapping[str, Residency], name: str) -> StepPlan:
        return plan_residency(
            graph,
            profile,
            residency,
            budget=budget,
            scheduler=scheduler,
            convolutions=convolutions,
            plans=plans,
            policy=name,
        )

    step = Step(graph, profile, budget)
    try:
        if policy != PLANNED:
            return trial(POLICIES.resolve(policy)(step), policy)
        return search(step, lambda residency: trial(residency, PLANNED))
    except PlanningError as e:
        least = minimum_budget(graph, profile)
        raise PlanningError(f"{e}; the least budget that works is {least}") from None


def search(
    step: Step, trial: Callable[[Mapping[str, Residency]], StepPlan]
) -> StepPlan:
    """The best plan that is found.

    Args:
        step: What to plan.
        trial: Schedules residencies.

    Raises:
        PlanningError: Nothing that was tried fits; it is the error of what came
            closest.
    """
    budget = max(_LEAST_TRIALS, _WORK // max(1, len(step.graph.nodes)))
    best = _Best(trial, budget)
    if best.consider(keep_all(step)):
        return best.plan
    for name, policy in POLICIES.table.items():
        if name != PLANNED:
            best.consider(policy(step))
    candidates = _by_cost(step)
    for residency in _family(candidates, best):
        best.consider(residency)
    _improve(candidates, best)
    return best.plan


def minimum_budget(graph: Graph, profile: Profile) -> int:
    """The least bytes, parameters and state included, that the step can run in.

    Args:
        graph: A training graph that nothing has made in-place yet.
        profile: Of it.
    """
    step = Step(graph, profile, 0.0)
    residencies: list[Mapping[str, Residency]] = [
        policy(step) for policy in POLICIES.table.values()
    ]
    candidates = _by_cost(step)
    for mode in (Residency.RECOMPUTE, Residency.RECOMPUTE_EACH):
        for count in {len(candidates) // 2, len(candidates)}:
            residencies.append(_mixed(candidates, count, mode))
    return min(prepare(graph, profile, r).least_peak() for r in residencies)


class _Best:
    """The best plan so far, and how many more may be tried."""

    def __init__(
        self, trial: Callable[[Mapping[str, Residency]], StepPlan], budget: int
    ) -> None:
        self._trial = trial
        self._left = budget
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
    def plan(self) -> StepPlan:
        if self._plan is None:
            raise self._error or PlanningError("nothing was tried")
        return self._plan

    def consider(self, residency: Mapping[str, Residency]) -> bool:
        """Try residencies; whether they fit and are better than all before."""
        key = frozenset(residency.items())
        if key in self._tried or self.exhausted():
            return False
        self._tried.add(key)
        self._left -= 1
        try:
            plan = self._trial(residency)
        except PlanningError as e:
            self._error = e
            return False
        if plan.prediction.step_ms >= self.step_ms:
            return False
        self._plan = plan
        return True


@dataclass(frozen=True, slots=True)
class _Candidate:
    saved: Saved
    again_ms: float


def _by_cost(step: Step) -> list[_Candidate]:
    """Saved tensors, the cheapest to compute again per byte first."""
    tensors = saved_tensors(step.graph)
    names = {saved.name for saved in tensors}
    found = []
    for saved in tensors:
        nodes = chain(step.graph, saved.name, names.__contains__)
        again = sum(step.profile.node_ms[node.name] for node in nodes)
        found.append(_Candidate(saved, again))
    return sorted(found, key=lambda c: c.again_ms / max(1, c.saved.nbytes))


def _mixed(
    candidates: list[_Candidate], count: int, mode: Residency
) -> dict[str, Residency]:
    """The first `count` candidates computed again, all others offloaded."""
    return {EVERYTHING: Residency.KEEP} | {
        c.saved.name: mode if i < count else Residency.OFFLOAD
        for i, c in enumerate(candidates)
    }


def _family(
    candidates: list[_Candidate], best: _Best
) -> Iterator[dict[str, Residency]]:
    """Members of the one-parameter family: coarse first, then around the best."""
    total = len(candidates)
    for mode in (Residency.RECOMPUTE, Residency.RECOMPUTE_EACH):
        stride = max(1, total // 8)
        counts = sorted({*range(0, total + 1, stride), total})
        scores: dict[int, float] = {}
        while True:
            for count in counts:
                if count in scores:
                    continue
                before = best.step_ms
                yield _mixed(candidates, count, mode)
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
    """Change one tensor's residency at a time, the largest first, while it helps."""
    largest = sorted(candidates, key=lambda c: -c.saved.nbytes)
    improved = True
    while improved and not best.exhausted():
        improved = False
        for candidate in largest:
            name = candidate.saved.name
            current = best.plan.residency
            for choice in Residency:
                if choice is not current.get(name, Residency.KEEP):
                    improved |= best.consider({**current, name: choice})
                if best.exhausted():
                    return
