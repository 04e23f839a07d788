"""Changes of residencies that the timeline of a plan suggests.

Where compute waits for a link, a tensor the link moved could be recomputed or kept
instead; where recomputation is expensive, a tensor could be offloaded instead. The most
expensive tensors come first, one by one and then together.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from mucudnn.passes.residency import RECOMPUTED, Residency
from mucudnn.passes.residency.candidates import Candidate, Change, slices_of
from mucudnn.passes.scheduling.problem import origin
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.passes.simulate import Lane

_FIRST = 5
"""Number of the most expensive tensors that are changed one by one."""

_TOGETHER = (2, 4, 8)
"""Numbers of the most expensive tensors that are changed at once."""

_INSTEAD_OF_COPIES = (
    Residency.RECOMPUTE_EACH,
    Residency.RECOMPUTE,
    Residency.KEEP,
)
_INSTEAD_OF_NODES = (
    Residency.OFFLOAD,
    Residency.KEEP,
    Residency.RECOMPUTE,
)


def suggested(plan: StepPlan, candidates: Sequence[Candidate]) -> Iterator[Change]:
    """Yield changes of a plan's residencies, the most promising ones first."""
    tensors = slices_of(candidates)
    stalls = _by_descending_cost(stalls_ms(plan, candidates), tensors)
    recomputed = _by_descending_cost(again_ms(plan, candidates), tensors)
    impossible = {c.saved.name for c in candidates if math.isinf(c.recompute_ms)}
    ranked = ((stalls, _INSTEAD_OF_COPIES), (recomputed, _INSTEAD_OF_NODES))
    for count in (None, *_TOGETHER):
        for costly, choices in ranked:
            groups = costly[:_FIRST]
            if count is not None:  # the first few as one group
                merged = [*itertools.chain(*costly[:count])]
                groups = [merged] if len(costly) >= count else []
            for choice, group in itertools.product(choices, groups):
                if choice not in RECOMPUTED or impossible.isdisjoint(group):
                    yield [(name, choice) for name in group]
    for one, other in itertools.product(stalls[:3], recomputed[:3]):
        if one != other and impossible.isdisjoint(one):
            yield [(name, Residency.RECOMPUTE_EACH) for name in one] + [
                (name, Residency.OFFLOAD) for name in other
            ]


def _by_descending_cost(
    costs: Mapping[str, float], tensors: Mapping[str, Sequence[Candidate]]
) -> list[Sequence[str]]:
    """Return the slices of each tensor with a cost, by descending cost."""
    groups = [[c.saved.name for c in slices] for slices in tensors.values()]
    costly = [group for group in groups if not costs.keys().isdisjoint(group)]

    def cost(group: Sequence[str]) -> tuple[float, str]:
        return -sum(costs.get(name, 0.0) for name in group), group[0]

    return sorted(costly, key=cost)


def again_ms(plan: StepPlan, candidates: Sequence[Candidate]) -> dict[str, float]:
    """Return the approximate recompute time of each recomputed tensor."""
    graph = plan.schedule.graph
    runs = Counter(origin(n.name) for n in graph.nodes if origin(n.name) != n.name)
    return {
        c.saved.name: runs[c.saved.producer.name] * c.recompute_ms
        for c in candidates
        if runs[c.saved.producer.name]
    }


def stalls_ms(plan: StepPlan, candidates: Sequence[Candidate]) -> dict[str, float]:
    """Return the time that compute waits for copies of each tensor.

    A wait for a copy is a wait for the whole run of copies without a pause on the link;
    it is divided among them in proportion to their times.
    """
    storages = plan.schedule.graph.storages
    tensors: dict[str, list[str]] = defaultdict(list)
    for candidate in candidates:
        tensors[storages[candidate.saved.name]].append(candidate.saved.name)
    found: dict[str, float] = defaultdict(float)
    for stall, copies in _waits(plan.prediction.lanes):
        whole = sum(lane.stop_ms - lane.start_ms for lane in copies)
        for lane in copies:
            share = (lane.stop_ms - lane.start_ms) / whole if whole else 0.0
            for name in tensors[lane.name]:
                found[name] += stall * share
    return dict(found)


def _waits(lanes: Sequence[Lane]) -> Iterator[tuple[float, list[Lane]]]:
    """Yield the duration of each wait, and the run of copies it waits for."""
    ending: dict[float, list[Lane]] = {}
    runs: dict[str, list[Lane]] = {"out": [], "in": []}
    now = 0.0
    for lane in lanes:
        if lane.engine == "compute":
            if lane.start_ms > now and lane.start_ms in ending:
                yield lane.start_ms - now, ending[lane.start_ms]
            now = lane.stop_ms
            continue
        before = runs[lane.engine]
        follows = before and before[-1].stop_ms >= lane.start_ms
        runs[lane.engine] = [*before, lane] if follows else [lane]
        ending[lane.stop_ms] = runs[lane.engine]
