"""Policy `planned`: search for the least simulated step time within a budget.

The linear program of `planning/program.py` comes first. Where its plan is as good as
its optimum, or the step is too large for trials of single tensors, nothing else runs.

Otherwise plans from many starts are improved side by side, and the fastest plan wins.

*Starts* are the residencies of every other policy, so the plan is never slower than the
best of them; the request's seed; the solutions of the program; and where the program
has none, rules for whole blocks.
Each is scheduled by every scheduler. Parameters and optimizer state are offloaded where
that is faster, or where nothing else fits.

*Improvement*, see `climbing.py`. Under a tight budget most starts lead to a poor local
optimum, and which of them do shows only after some changes. So the changes that are
tried are divided into rounds: several plans get a few of them, and the fastest of these
plans get more; the last one, as long as it gains, and single tensors get cheaper
residencies in the end. Every other plan tries changes in another order. Plans that are
much slower than the fastest one get none: in none of the networks that were tried did
one of them become the fastest. The exception are two families of starts: those of
`eviction.py`, which are tried where all others are far above the lower bound, and those
that page nearly everything (`paged_family`), which are tried there and where the
program has no solution. They are slow, since copies fill the time, but leave
convolutions the most memory, and plans of tight budgets come from them. A few plans of
small steps try changes that keep narrow results as well. Each of these families is
compared with its own plans only, until the end.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace

from mucudnn.errors import PlanningError
from mucudnn.passes.planning.bound import lower_bound
from mucudnn.passes.planning.climbing import (
    Climb,
    SearchState,
    changes_of,
    closer,
    in_turn,
)
from mucudnn.passes.planning.eviction import MOST_NODES, evicted_family
from mucudnn.passes.planning.program import fill
from mucudnn.passes.planning.request import (
    StepRequest,
    check_residency,
    grow_workspace_plans,
    plan_residency,
    schedule_residency,
)
from mucudnn.passes.residency import EVERYTHING, PERSISTENTS, Residency
from mucudnn.passes.residency.candidates import (
    Candidate,
    blockwise,
    by_cost,
    initial_residencies,
    narrow_changes,
    paged_family,
    policy_residencies,
)
from mucudnn.passes.residency.policies import keep_all, vdnn_all, vdnn_conv
from mucudnn.passes.scheduling import SCHEDULERS, Scheduler
from mucudnn.passes.scheduling.problem import first_plans
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.processes import gc_relaxed

Residencies = Mapping[str, Residency]

_OTHERS = Residency.KEEP, Residency.PAGE
"""Residencies of all bytes that a rule does not name."""

_ROUNDS = ((5, 40), (3, 60), (1, 100))
"""Plans that are improved side by side, and the changes of each that are tried."""

_LAST = 200
"""Changes that are tried of the best plan of each family after these rounds."""

_SLOWER_START, _SLOWER = 1.1, 1.04
"""Factors on the fastest plan above which another one is not improved: before the first
round, and before the others."""

_NARROW_PLANS = 3
"""Plans whose changes also keep narrow results; see `RecomputeChains`. In larger
steps these change nothing that the program has not found."""

_FAR = 1.1
"""Factor on the lower bound above which evictions are tried as well."""

_WORTH = 0.995
"""Factor on the fastest plan's time. In the end it is improved for as long as the same
number of changes makes it faster by this factor."""

_NODES = 300
"""Nodes of a step from which fewer changes are tried, in proportion."""

_LEAST_TRIALS = 8
"""Changes of a plan of the largest steps in one round."""

_WORK = 60_000
"""Limit of nodes that each scheduler is given in starts that are no policy's."""

_NEAR = 1.005
"""Factor on the lower bound below which a plan is not improved any more."""

_CLOSE = 1.005
"""Factor on the program's optimum up to which its plan needs no local search."""

_SMALL = 400
"""Nodes of a step up to which the optimum, which is no proven bound, is not trusted."""

_LARGE = 3000
"""Nodes of a step from which the program's plan is not compared with a local search."""

_BLIND = "on_demand"
"""Scheduler that is hardly ever better than the others for the same residencies."""


@gc_relaxed()
def search(request: StepRequest, *, thorough: bool = True) -> StepPlan:
    """Search for the fastest plan.

    Args:
        request: The planning request.
        thorough: Whether plans are improved after the first round, which helps little
            unless the budget is tight.

    Raises:
        PlanningError: No residencies fit; the error of those that came closest.
    """
    best = SearchState(request)
    best.consider(keep_all(request))
    if best.found and best.step_ms <= _unbounded_ms(request):
        return replace(best.plan, least_ms=best.step_ms)
    bound = lower_bound(request)
    optimum, rounded = fill(request, best)
    nodes = len(request.graph.nodes)
    large = best.found and nodes > _LARGE
    trusted = bound.step_ms if nodes <= _SMALL else optimum
    if optimum is None or not (large or best.step_ms <= _CLOSE * (trusted or 0.0)):
        rounds = _ROUNDS if thorough else _ROUNDS[:1]
        _search_locally(request, bound.step_ms, best, rounded, rounds)
    return replace(best.plan, least_ms=bound.step_ms)


def _search_locally(
    request: StepRequest,
    bound_ms: float,
    best: SearchState,
    rounded: Sequence[Residencies],
    rounds: Sequence[tuple[int, int]],
) -> None:
    """Look for a better plan than the best so far, from many starts.

    The best of the `rounded` optima of the program is improved in every round, beside
    the other plans.
    """
    candidates = request.candidates
    begin = _begin(request, by_cost(candidates))
    starts = [] if rounded or not best.found else [best.residency]
    for residency in begin:
        best.consider(residency)
    if request.scheduler is None:
        other = SearchState(request.scheduled(_BLIND))
        for residency in policy_residencies(request):
            other.consider(residency)
        best.take_over(other)
    try:
        begin.append(least_memory(request, begin))
    except PlanningError:
        return  # `best` has the error of the residencies that came closest
    best.consider(begin[-1])
    if request.convolutions == "dynamic":
        _offer_vdnn_dyn(request, best)
    nodes = len(request.graph.nodes)
    starts += begin
    if not rounded:
        starts += itertools.islice(_block_rules(request, candidates), _WORK // nodes)
    graph = request.graph
    orders = [list(changes_of(graph, candidates, mixed=m)) for m in (False, True)]
    small = nodes <= MOST_NODES
    narrow = list(narrow_changes(graph, request.chains)) if small else []
    with_narrow = list(in_turn(orders[1], narrow))
    far = small and best.step_ms > _FAR * bound_ms
    least_bytes, _ = request.need(begin[-1])
    evicted = evicted_family(request, best.step_ms, least_bytes) if far else []
    paged = paged_family(by_cost(candidates)) if far or not rounded else []
    side_by_side = rounds[0][0]
    first, climbs, *slow = (
        [
            Climb(request.scheduled(scheduler), tries[i % len(tries)], residency)
            for i, (scheduler, residency) in enumerate(_fastest(request, tried, count))
        ]
        for tried, count, tries in (
            (rounded, 1, orders),
            (starts, side_by_side, orders),
            (evicted, side_by_side, orders),
            (paged, side_by_side, orders),
            ([*rounded, *starts] if narrow else (), _NARROW_PLANS, (with_narrow,)),
        )
    )
    fewer = min(1.0, _NODES / nodes)
    factor = _SLOWER_START
    for plans, most in rounds:
        limit = factor * min(c.step_ms for c in itertools.chain(first, climbs, *slow))
        climbs = [climb for climb in climbs[:plans] if climb.step_ms <= limit]
        slow = [family[:plans] for family in slow]
        for climb in itertools.chain(first, climbs, *slow):
            climb.run(max(_LEAST_TRIALS, int(fewer * most)))
        climbs, *slow = map(_distinct, (climbs, *slow))
        factor = _SLOWER
        fastest = min(itertools.chain(first, climbs, *slow), key=lambda c: c.step_ms)
        if fastest.step_ms <= _NEAR * bound_ms:
            break
    if len(rounds) > 1 and fastest.step_ms > _NEAR * bound_ms:
        heads = [family[0] for family in (first, climbs, *slow) if family]
        trials = max(_LEAST_TRIALS, int(fewer * _LAST))
        fastest = _finished(heads, request, trials, _NEAR * bound_ms)
    best.take_over(fastest.state)


def _finished(
    climbs: Sequence[Climb], request: StepRequest, trials: int, enough_ms: float
) -> Climb:
    """Improve the best plans of all families to the end; return the fastest.

    Residencies of single tensors change after those of groups. In a copy of the fastest
    plan they change first, because its groups may need no more changes.
    """
    largest = sorted(request.candidates, key=lambda c: -c.saved.nbytes)
    names = [c.saved.name for c in largest]
    copied = min(climbs, key=lambda c: c.step_ms).copy()
    for climb in climbs:
        climb.run(trials)
    fastest, before = min(climbs, key=lambda c: c.step_ms), math.inf
    while enough_ms < fastest.step_ms <= _WORTH * before:
        before = fastest.step_ms
        fastest.run(trials)
    before = fastest.step_ms
    copied.finish(names, trials)
    if copied.step_ms < before:
        fastest = copied
    else:
        fastest.finish(names, trials)
    while enough_ms < fastest.step_ms <= _WORTH * before:
        before = fastest.step_ms
        fastest.run(trials)
        fastest.finish(names, trials)
    return fastest


def _alike(step_ms: float) -> float:
    """Return a time that is equal for plans that hardly differ."""
    return float(f"{step_ms:.5g}")


def _distinct(climbs: Sequence[Climb]) -> list[Climb]:
    """Return climbs that differ, the fastest first."""
    found: dict[float, Climb] = {}
    for climb in sorted(climbs, key=lambda climb: climb.step_ms):
        found.setdefault(_alike(climb.step_ms), climb)
    return list(found.values())


def least_memory(
    request: StepRequest, begin: Sequence[Residencies] | None = None
) -> Residencies:
    """Return residencies that fit, among those that need the least memory.

    A search succeeds if and only if there are any, so the feasibility of a budget is
    known without a search. If none fit, the error of the closest is raised.
    """
    if begin is None:
        begin = _begin(request, by_cost(request.candidates))
    closest: PlanningError | None = None
    for paged in ({PERSISTENTS: Residency.PAGE}, {}):
        for residency in begin:
            try:
                check_residency(request, {**residency, **paged})
            except PlanningError as e:
                error = copy(e)  # without a traceback, which would hold callers' locals
                closest = closer(closest or error, error)
            else:
                return {**residency, **paged}
    raise copy(closest or PlanningError("nothing was tried"))


def schedulers(request: StepRequest) -> list[str | Scheduler]:
    """Return the schedulers to try; only the request's if it names one."""
    if request.scheduler is None:
        return [name for name in SCHEDULERS.table if name != _BLIND]
    return [request.scheduler]


def _begin(request: StepRequest, candidates: Sequence[Candidate]) -> list[Residencies]:
    own = [] if request.seed is None else [request.seed]
    return own + initial_residencies(request, candidates)


def _block_rules(
    request: StepRequest, candidates: Sequence[Candidate]
) -> Iterator[Residencies]:
    """Yield rules for blocks, each with everything else kept and paged."""
    for rule in blockwise(request.graph, candidates):
        for others in _OTHERS:
            yield {EVERYTHING: others, **rule}


def _fastest(
    request: StepRequest, starts: Sequence[Residencies], count: int
) -> list[tuple[str | Scheduler, Residencies]]:
    """Return the schedulers and residencies of the fastest starts that differ in time.

    Where residencies do not fit, parameters and state are paged as well.
    """
    found: dict[float, tuple[str | Scheduler, Residencies]] = {}
    grows = request.convolutions == "dynamic"
    distinct = {frozenset(start.items()): start for start in starts}
    free = request.hosted is None
    for start in distinct.values():
        slowest = sorted(found)[count - 1 : count]
        # Compute alone takes longer, so none of its schedules is among the fastest.
        if grows and slowest and request.compute_ms(start) > slowest[0]:
            continue
        paged = [{**start, PERSISTENTS: Residency.PAGE}] if free else []
        for scheduler in schedulers(request):
            for residency in (start, *paged):
                with suppress(PlanningError):
                    tried = schedule_residency(
                        request.scheduled(scheduler), residency, *slowest
                    )
                    found.setdefault(_alike(tried.step_ms()), (scheduler, residency))
                    break
    return [found[step_ms] for step_ms in sorted(found)[:count]]


def _unbounded_ms(request: StepRequest) -> float:
    """Return the step time without a budget, slightly increased for rounding."""
    unbounded = plan_residency(request.within(math.inf), keep_all(request))
    return unbounded.prediction.step_ms * (1 + 1e-9)


def _offer_vdnn_dyn(request: StepRequest, best: SearchState) -> None:
    others = (_BLIND,) if request.scheduler is None else ()
    for scheduler in (request.timing, *others):
        with suppress(PlanningError):
            best.offer(vdnn_dyn(request.scheduled(scheduler)))


# Policy `vdnn_dyn`: the first configuration that fits, the fastest first.
#
# Where vDNN runs a step to find out whether a configuration fits, this schedules it.


def vdnn_dyn(request: StepRequest) -> StepPlan:
    """Plan by the dynamic policy of Rhu et al., "vDNN", MICRO 2016, section 3.3.

    First offload everything with the smallest convolutions: a step that does not fit
    then cannot be trained. Then, with the fastest convolutions, offload nothing, the
    inputs of convolutions, all inputs; then, for the last two sets, give every
    convolution the fastest algorithm that fits the remaining budget. The first of these
    that fits is chosen, else the very first. Fixed convolutions stay fixed.

    Raises:
        PlanningError: Not even the smallest configuration fits.
    """
    smallest = plan_residency(_with_convolutions(request, "least"), vdnn_all(request))
    for attempt, residency in _attempts(request):
        try:
            return plan_residency(attempt, residency)
        except PlanningError:
            continue
    return smallest


def check_vdnn_dyn(request: StepRequest) -> None:
    """Raise the `PlanningError` that `vdnn_dyn` would raise, without planning."""
    check_residency(_with_convolutions(request, "least"), vdnn_all(request))


def _attempts(
    request: StepRequest,
) -> Iterator[tuple[StepRequest, Mapping[str, Residency]]]:
    sets = (vdnn_conv(request), vdnn_all(request))
    fastest = _with_convolutions(request, "fastest")
    for residency in (keep_all(request), *sets):
        yield fastest, residency
    if request.convolutions != "fixed":
        for residency in sets:
            yield _greedy(request, residency), residency


def _with_convolutions(request: StepRequest, convolutions: str) -> StepRequest:
    fixed = request.convolutions == "fixed"
    return request if fixed else request.convolving(convolutions)


def _greedy(request: StepRequest, residency: Mapping[str, Residency]) -> StepRequest:
    """Give convolutions, in order, the fastest algorithm that still fits."""
    ready = request.rewritten(residency)
    plans = first_plans(ready.profile, "least")
    try:
        _, occupancy = ready.problem(plans, request.budget).least()
    except PlanningError:
        return _with_convolutions(request, "least")
    plans = grow_workspace_plans(ready, plans, occupancy)
    return request.convolving("fixed", plans)
