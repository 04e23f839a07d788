"""The bound of a schedule against all schedules of small steps that move a little.

Of one tensor and one parameter that leave, every copy begins and ends at every node at
which it can: also across the end of the step.
"""

import itertools
import math

import pytest

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.optimizers import Sgd
from mucudnn.ir.profile import Profile
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import Residency
from mucudnn.passes.scheduling.intervals import emit, least_occupancy, shifted
from mucudnn.passes.simulate import simulate
from tests.schedule_oracle import verify


def step(layers):
    g = GraphBuilder()
    x = g.input("x", (8, 64))
    for _ in range(layers):
        x = g.tanh(g.linear(x, 64))
    graph = training_graph(g.build(g.mean_squared_error(x, g.input("t", (8, 64)))))
    return with_updates(graph, Sgd())


def profile(graph, out, back):
    times = itertools.cycle((1.0, 3.0, 0.5))
    return Profile(
        node_ms={node.name: next(times) for node in graph.nodes},
        workspaces={},
        fronts={},
        out_bytes_per_ms=out,
        in_bytes_per_ms=back,
    )


def placements(interval, following):
    """Every later end of an interval and earlier start of the next, a node between."""
    start = following.start
    for stop in range(interval.stop, start):
        for begin in range(stop + 2, start + 1):
            yield stop, begin


def schedules(ready):
    """Every schedule of residencies."""
    problem = ready.problem({}, math.inf)
    intervals, _ = problem.least()
    count = len(ready.graph.nodes)
    of_storage = {}
    for i, interval in enumerate(intervals):
        if interval.storage in ready.swaps:
            of_storage.setdefault(interval.storage, []).append(i)
    pairs = []
    for indices in of_storage.values():
        pairs += [(i, j, 0) for i, j in itertools.pairwise(indices)]
        if intervals[indices[0]].host_resident:
            pairs.append((indices[-1], indices[0], count))
    ways = [
        list(placements(intervals[i], shifted(intervals[j], later)))
        for i, j, later in pairs
    ]
    for choice in itertools.product(*ways):
        found = list(intervals)
        for (i, j, later), (stop, begin) in zip(pairs, choice, strict=True):
            found[i] = found[i]._replace(stop=stop)
            found[j] = found[j]._replace(start=begin - later)
        found = [shifted(s, count) if s.start < 0 else s for s in found]
        yield emitted(problem, found, ready)


def emitted(problem, intervals, ready):
    peak, _ = least_occupancy(
        intervals, problem.scratch(), problem.resident(), math.inf
    ).peak()
    return emit(ready.graph, intervals, {}, peak, ready.away)


RESIDENCIES = tuple(
    {saved: Residency.OFFLOAD, weight: choice}
    for saved, weight, choice in (
        ("tanh", "linear.1/weight", Residency.OFFLOAD),
        ("tanh.1", "linear/weight", Residency.OFFLOAD),
        ("tanh.1", "linear.1/weight", Residency.PAGE),
    )
)
"""One saved tensor and one parameter that leave."""


def whole_ms(found):
    """What compute and each link have to do in a step, the longest of the three."""
    out = found.out_bytes / found.profile.out_bytes_per_ms
    back = found.in_bytes / found.profile.in_bytes_per_ms
    return max(found.compute_ms, out, back)


@pytest.mark.parametrize(("out", "back"), [(512.0, 512.0), (4096.0, 900.0)])
def test_no_schedule_of_a_small_step_is_faster_than_its_bound(out, back):
    graph = step(layers=2)
    times = profile(graph, out, back)
    across = above = count = 0
    for residency in RESIDENCIES:
        ready = StepRequest(graph, times).rewritten(residency)
        for schedule in schedules(ready):
            count += 1
            if count % 7 == 0:
                verify(schedule, granularity=ALIGNMENT)
            found = simulate(schedule, ready.profile)
            assert found.bound_ms <= found.step_ms * (1 + 1e-9)
            across += bool(schedule.live_across)
            above += bool(schedule.live_across) and found.bound_ms > whole_ms(found)
    assert count > 500
    assert across > 100
    assert above > 100
