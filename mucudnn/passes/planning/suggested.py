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
from mucudnn.passes.residency.candidates import Candidate, Change
from mucudnn.passes.scheduling.costs import origin
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.passes.simulate import Lane

__all__ = ["again_ms", "stalls_ms", "suggested"]

_FIRST = 5
"""Of the tensors that cost most, which are changed one by one."""

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
    stalls = _most(stalls_ms(plan, candidates))
    again = _most(again_ms(plan, candidates))
    impossible = {c.saved.name for c in candidates if math.isinf(c.again_ms)}
    ranked = ((stalls, _INSTEAD_OF_COPIES), (again, _INSTEAD_OF_NODES))
    for count in (None, *_TOGETHER):
        for names, choices in ranked:
            groups = _alone(names) if count is None else _prefix(names, count)
            for choice, group in itertools.product(choices, groups):
                if choice not in RECOMPUTED or impossible.isdisjoint(group):
                    yield [(name, choice) for name in group]
    for one, other in itertools.product(stalls[:3], again[:3]):
        if one != other and one not in impossible:
            yield [(one, Residency.RECOMPUTE_EACH), (other, Residency.OFFLOAD)]


def _most(costs: Mapping[str, float]) -> list[str]:
    return sorted(costs, key=lambda name: (-costs[name], name))


def _alone(names: Sequence[str]) -> list[Sequence[str]]:
    return [[name] for name in names[:_FIRST]]


def _prefix(names: Sequence[str], count: int) -> list[Sequence[str]]:
    return [names[:count]] if len(names) >= count else []


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
