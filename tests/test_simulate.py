"""The simulator against sums by hand, and against its own bound."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.optimizers import Sgd
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import Alloc, Compute, Free, Schedule, SwapIn, SwapOut, Wait
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.placement.fit_to_arena import (
    fit_to_arena,
    grow_workspaces,
    shortest,
    with_least_workspaces,
)
from mucudnn.passes.placement.layout import PlacedStep, lay_out
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.plan_step import (
    minimum_budget,
    plan_of_least,
    plan_step,
    try_technique,
    unbounded,
)
from mucudnn.passes.planning.request import (
    StepRequest,
    plan_residency,
    schedule_residency,
)
from mucudnn.passes.residency import Residency, policy_names, saved_tensors
from mucudnn.passes.scheduling import SCHEDULERS
from mucudnn.passes.scheduling.problem import profile_of, timed_by
from mucudnn.passes.simulate import simulate
from tests.examples import examples
from tests.random_graphs import profiles, residencies, training_graphs
from tests.schedule_oracle import verify


def layers(count=6):
    """Layers whose activations are offloaded."""
    g = GraphBuilder()
    x = g.input("x", (64, 64))
    for _ in range(count):
        x = g.tanh(g.linear(x, 64))
    graph = training_graph(g.build(g.mean_squared_error(x, g.input("t", (64, 64)))))
    graph = with_updates(graph, Sgd())
    profile = Profile(
        node_ms={node.name: 1.0 for node in graph.nodes},
        workspaces={},
        fronts={},
        out_bytes_per_ms=1024.0,
        in_bytes_per_ms=1024.0,
    )
    return graph, profile, {s.name: Residency.OFFLOAD for s in saved_tensors(graph)}


def by_hand():
    """f1 -> a, f2 -> b (forward); b2 reads b, b1 reads a. 1000 bytes each."""
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    spec = {
        name: TensorSpec(name, (250,), role=Role.ACTIVATION) for name in ("a", "b", "d")
    }
    spec["x"] = TensorSpec("x", (250,), role=Role.INPUT)
    nodes = (
        Node("f1", "relu", ("x",), ("a",), phase=forward),
        Node("f2", "relu", ("a",), ("b",), phase=forward),
        Node("b2", "relu", ("b",), ("d",), phase=backward),
        Node("b1", "relu_grad", ("a", "d"), ("e",), phase=backward),
    )
    spec["e"] = TensorSpec("e", (250,), role=Role.GRADIENT)
    return Graph(spec, nodes, ("e",))


BY_HAND = (
    *(Alloc("x"), Alloc("a"), Compute("f1"), Free("x")),
    *(Alloc("b"), Compute("f2"), SwapOut("a"), Wait("a"), Free("a")),
    *(Alloc("a"), SwapIn("a"), Alloc("d"), Compute("b2"), Free("b")),
    *(Wait("a"), Alloc("e"), Compute("b1"), Free("a"), Free("d")),
)
COSTS_BY_HAND = Profile(
    node_ms=dict.fromkeys(("f1", "f2", "b2", "b1"), 2.0),
    workspaces={},
    fronts={},
    out_bytes_per_ms=200.0,
    in_bytes_per_ms=250.0,
)


def test_a_step_by_hand():
    """Each node takes 2 ms, a copy out 5 ms, a copy in 4 ms.

    f1 0-2, f2 2-4, out a 4-9 and waited for; b2 9-11; in a 9-13, waited for before b1:
    13-15.
    """
    found = simulate(Schedule(by_hand(), BY_HAND, {}, 3000), COSTS_BY_HAND)
    assert found.step_ms == pytest.approx(15.0)
    assert found.compute_ms == pytest.approx(8.0)
    assert found.stalls_ms == pytest.approx({"memory": 5.0, "operand": 2.0})
    assert (found.out_bytes, found.in_bytes) == (1000, 1000)
    assert found.bound_ms == pytest.approx(max(4.0, 5.0) + max(4.0, 4.0))
    lanes = [
        (lane.engine, lane.name, lane.start_ms, lane.stop_ms) for lane in found.lanes
    ]
    assert lanes == [
        ("compute", "f1", 0.0, 2.0),
        ("compute", "f2", 2.0, 4.0),
        ("out", "a", 4.0, 9.0),
        ("in", "a", 9.0, 13.0),
        ("compute", "b2", 9.0, 11.0),
        ("compute", "b1", 13.0, 15.0),
    ]


def test_a_step_that_copies_slow_down_by_hand():
    """A copy takes half of its time from what is computed beside it, or waits.

    f1 0-2, f2 2-4, out a 4-9 and waited for, which hides its half; in a 9-13, its half
    9-11, so b2 11-13, b1 13-15.
    """
    profile = replace(COSTS_BY_HAND, copy_share=0.5)
    found = simulate(Schedule(by_hand(), BY_HAND, {}, 3000), profile)
    compute = [lane for lane in found.lanes if lane.engine == "compute"]
    assert [lane.start_ms for lane in compute] == [0.0, 2.0, 11.0, 13.0]
    assert found.step_ms == pytest.approx(15.0)
    assert found.stalls_ms == {"copies": 4.5, "memory": 2.5, "operand": 0.0}
    slower = simulate(
        Schedule(by_hand(), BY_HAND, {}, 3000), replace(profile, copy_share=1.0)
    )
    assert slower.step_ms == pytest.approx(17.0)


def test_what_every_copy_takes_of_the_computation_by_hand():
    """Half a ms a copy, of which the first hides behind waiting for it: f1 0-2, f2 2-4,
    out a 4-9 and waited for; in a 9-13, b2 9.5-11.5, waits for a.
    """
    profile = replace(COSTS_BY_HAND, copy_overhead_ms=0.5)
    found = simulate(Schedule(by_hand(), BY_HAND, {}, 3000), profile)
    compute = [lane.start_ms for lane in found.lanes if lane.engine == "compute"]
    assert compute == [0.0, 2.0, 9.5, 13.0]
    assert found.stalls_ms == {"copies": 1.0, "memory": 4.5, "operand": 1.5}
    assert found.step_ms == pytest.approx(15.0)


@examples(150)
@given(data=st.data(), scheduler=st.sampled_from(sorted(SCHEDULERS.table)))
def test_no_step_is_faster_than_its_bound(data, scheduler):
    graph = data.draw(training_graphs())
    share = data.draw(st.sampled_from([0.0, 0.5, 2.0]))
    profile = replace(data.draw(profiles(graph)), copy_share=share)
    residency = data.draw(residencies(graph))
    least = StepRequest(graph, profile).rewritten(residency).least_peak()
    budget = least + data.draw(st.sampled_from([0, 512, 4096, 30_000]))
    plan = plan_residency(
        StepRequest(graph, profile, budget=budget, scheduler=scheduler), residency
    )
    found = plan.prediction
    slack = 1e-9 * max(1.0, found.step_ms)
    assert found.bound_ms <= found.step_ms + slack
    assert found.compute_ms <= found.step_ms + slack
    stalls = sum(found.stalls_ms.values())
    assert found.compute_ms + stalls <= found.step_ms + slack
    for engine in ("compute", "out", "in"):
        lanes = [lane for lane in found.lanes if lane.engine == engine]
        for one, two in pairwise(lanes):
            assert one.stop_ms <= two.start_ms + slack


@examples(40)
@given(data=st.data())
def test_a_step_without_copies_is_the_sum_of_its_nodes(data):
    graph = data.draw(training_graphs())
    profile = data.draw(profiles(graph))
    plan = plan_residency(
        StepRequest(graph, profile, budget=math.inf, convolutions="fastest"), {}
    )
    total = math.fsum(
        plan.plans[n.name].time_ms if n.op == "conv" else profile.node_ms[n.name]
        for n in graph.nodes
    )
    assert plan.prediction.step_ms == pytest.approx(total)
    assert plan.prediction.stalls_ms == {"operand": 0.0, "memory": 0.0}
    assert plan.prediction.out_bytes == plan.prediction.in_bytes == 0


def test_links_without_end_leave_no_stall():
    graph, profile, residency = layers()
    fast = Profile(
        node_ms=profile.node_ms,
        workspaces={},
        fronts={},
        out_bytes_per_ms=math.inf,
        in_bytes_per_ms=math.inf,
    )
    least = StepRequest(graph, fast).rewritten(residency).least_peak()
    plan = plan_residency(StepRequest(graph, fast, budget=least), residency)
    assert plan.prediction.out_bytes > 0
    assert plan.prediction.step_ms == pytest.approx(plan.prediction.compute_ms)


# The time of a step from its intervals, against its simulated program.


@st.composite
def drafts(draw):
    """Any residencies of any step, in a budget between the least and all it wants."""
    graph = draw(training_graphs(updates=draw(st.booleans())))
    residency = draw(residencies(graph))
    free = StepRequest(
        graph,
        replace(
            draw(profiles(graph)),
            copy_share=draw(st.sampled_from([0, 0.3])),
            copy_overhead_ms=draw(st.sampled_from([0, 0.2])),
        ),
        scheduler=draw(st.sampled_from(sorted(SCHEDULERS.table))),
    )
    least = free.rewritten(residency).least_peak()
    budget = least + draw(st.sampled_from([0, 1024, 8192, 65536]))
    return schedule_residency(free.within(budget), residency)


@examples(120)
@given(found=drafts())
def test_it_is_what_the_simulated_program_takes_to_the_last_bit(found):
    assert found.step_ms() == found.plan().prediction.step_ms


@examples(150)
@given(found=drafts(), share=st.floats(0, 1.5))
def test_what_is_not_faster_is_given_up_and_what_is_faster_never(found, share):
    whole = found.step_ms()
    for below in (share * whole, whole, math.nextafter(whole, math.inf)):
        assert found.step_ms(below) == (whole if whole < below else math.inf)


# Whatever returns a step, its prediction and its peak are of the schedule it has.


def found_by_all(data, graph, profile):
    """One step of everything that returns one."""
    policy = data.draw(st.sampled_from(policy_names()))
    least = minimum_budget(StepRequest(graph, profile, policy=policy))
    budget = least + data.draw(st.integers(0, 20)) * 1000
    way = {"budget": budget, "policy": policy}
    yield unbounded(graph, profile)
    yield plan_of_least(StepRequest(graph, profile, policy=policy))
    yield try_technique(
        StepRequest(graph, profile, policy=policy, scheduler="timed", budget=budget)
    ).plan
    given_ones = data.draw(residencies(graph))
    yield plan_residency(StepRequest(graph, profile, budget=float("inf")), given_ones)
    yield place_step(StepRequest(graph, profile, **way)).plan
    plan = plan_step(StepRequest(graph, profile, **way))
    yield plan
    yield shortest(plan)
    bare = with_least_workspaces(plan)
    yield bare
    layout = lay_out(bare.schedule)
    yield grow_workspaces(PlacedStep(bare, layout), layout.nbytes + 4096).plan
    placed = fit_to_arena(plan, 2 * budget)
    assert placed is not None
    yield placed.plan


@examples(30)
@given(data=st.data())
def test_predictions_are_of_the_schedule(data):
    graph = data.draw(training_graphs(most=4, updates=data.draw(st.booleans())))
    profile = data.draw(profiles(graph))
    for plan in found_by_all(data, graph, profile):
        schedule = plan.schedule
        times = timed_by(profile_of(schedule.graph, profile), plan.plans)
        assert plan.prediction == simulate(schedule, times)
        assert verify(schedule, granularity=ALIGNMENT) == plan.peak_bytes
        for name, chosen in plan.plans.items():
            assert chosen.workspace <= schedule.workspaces.get(name, 0)
