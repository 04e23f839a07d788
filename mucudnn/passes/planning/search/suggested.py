"""Changes that a plan itself suggests: less of what it waits for, or computes again.

Where compute waits for a link, something that the link moved before could be computed
again or kept instead; where much is computed again while a link idles, it could leave.
What costs most comes first, alone and then together with what costs next.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from mucudnn.passes.residency import RECOMPUTED, Residency
from mucudnn.passes.residency.blocks import slices_of
from mucudnn.passes.residency.candidates import Candidate, Change
from mucudnn.passes.scheduling.costs import origin
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.passes.simulate import Lane

__all__ = ["again_ms", "stalls_ms", "suggested"]

_FIRST = 5
"""Of the tensors that cost most, which are changed one by one, all slices of each."""

_TOGETHER = (2, 4, 8)
"""How many of them are changed at once."""

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
    """Changes of a plan's residencies, the most promising ones first.

    Args:
        plan: Under a budget.
        candidates: Saved tensors of its graph, in any order.
    """
    tensors = slices_of(candidates)
    stalls = _most(stalls_ms(plan, candidates), tensors)
    again = _most(again_ms(plan, candidates), tensors)
    impossible = {c.saved.name for c in candidates if math.isinf(c.again_ms)}
    ranked = ((stalls, _INSTEAD_OF_COPIES), (again, _INSTEAD_OF_NODES))
    for count in (None, *_TOGETHER):
        for costly, choices in ranked:
            groups = costly[:_FIRST] if count is None else _prefix(costly, count)
            for choice, group in itertools.product(choices, groups):
                if choice not in RECOMPUTED or impossible.isdisjoint(group):
                    yield [(name, choice) for name in group]
    for one, other in itertools.product(stalls[:3], again[:3]):
        if one != other and impossible.isdisjoint(one):
            yield [(name, Residency.RECOMPUTE_EACH) for name in one] + [
                (name, Residency.OFFLOAD) for name in other
            ]


def _most(
    costs: Mapping[str, float], tensors: Mapping[str, Sequence[Candidate]]
) -> list[Sequence[str]]:
    """Slices of the tensors that cost most, those first."""
    groups = [[c.saved.name for c in slices] for slices in tensors.values()]
    costly = [group for group in groups if not costs.keys().isdisjoint(group)]

    def cost(group: Sequence[str]) -> tuple[float, str]:
        return -sum(costs.get(name, 0.0) for name in group), group[0]

    return sorted(costly, key=cost)


def _prefix(groups: Sequence[Sequence[str]], count: int) -> list[Sequence[str]]:
    """The first few as one."""
    return [[*itertools.chain(*groups[:count])]] if len(groups) >= count else []


def again_ms(plan: StepPlan, candidates: Sequence[Candidate]) -> dict[str, float]:
    """Tensor -> about how long a plan computes it again; no others are named."""
    graph = plan.schedule.graph
    runs = Counter(origin(n.name) for n in graph.nodes if origin(n.name) != n.name)
    return {
        c.saved.name: runs[c.saved.producer.name] * c.again_ms
        for c in candidates
        if runs[c.saved.producer.name]
    }


def stalls_ms(plan: StepPlan, candidates: Sequence[Candidate]) -> dict[str, float]:
    """Tensor -> how long compute waits for copies, of which those of it are a part.

    Whoever waits for a copy waits for all that the link has made before it without a
    pause; each has its share in that, by the time that it took.
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
    """How long compute waits, and for which copies in a row."""
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
