"""Schedules and schedulers: what a schedule says, and when copies run."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from mucudnn.errors import ScheduleError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.graph import PERSISTENT, Graph, Node, Phase
from mucudnn.ir.optimizers import Momentum, Sgd
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import Alloc, Compute, Free, Schedule, SwapIn, SwapOut, Wait
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
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
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    Residency,
    policy_names,
    saved_tensors,
)
from mucudnn.passes.scheduling import SCHEDULERS
from mucudnn.passes.scheduling.intervals import MemoryLedger, least_occupancy, split
from mucudnn.passes.scheduling.problem import first_plans, profile_of, timed_by
from mucudnn.passes.scheduling.schedulers import adaptive_window
from mucudnn.passes.simulate import simulate
from tests.examples import examples
from tests.graphs import graphs, scratch
from tests.plain_schedule import keep_all, peak_bytes
from tests.random_graphs import profiles, residencies, training_graphs
from tests.schedule_oracle import verify


@given(st.data())
def test_keep_all_is_accepted_with_the_live_peak_and_nothing_changed_is(data):
    graph = data.draw(graphs())
    workspaces = data.draw(scratch(graph))
    schedule = keep_all(graph, workspaces)
    assert verify(schedule) == schedule.peak_bytes == peak_bytes(graph, workspaces)
    moved = {i.tensor for i in schedule.instructions if not isinstance(i, Compute)}
    roles = {graph.tensors[name].role for name in moved}
    assert not roles & set(PERSISTENT)
    assert all(graph.storages[name] == name for name in moved)
    given_ = schedule.instructions
    at = data.draw(st.integers(0, len(given_) - 1))
    without = (*given_[:at], *given_[at + 1 :])
    with pytest.raises(ScheduleError):
        verify(replace(schedule, instructions=without))
    doubled = (*given_[: at + 1], *given_[at:])
    with pytest.raises(ScheduleError):
        verify(replace(schedule, instructions=doubled))
    peak = schedule.peak_bytes
    assert verify(schedule, peak) == peak
    with pytest.raises(ScheduleError, match="budget"):
        verify(schedule, peak - 1)
    with pytest.raises(ScheduleError, match=f"states a peak of {peak + 4}"):
        verify(replace(schedule, peak_bytes=peak + 4))


def two_steps():
    """x -> a -> b -> c, and c also reads a."""
    b = GraphBuilder()
    x = b.input("x", (4,))
    a = b.scale(x, 2.0)
    return b.build(b.add(b.scale(a, 3.0), a))


A, B, C = "scale", "scale.1", "add"
START = (Alloc("x"), Alloc(A), Compute(A), Free("x"))
END = (Alloc(C), Compute(C), Free(A), Free(B))
MIDDLE = (Alloc(B), Compute(B))


def run(*instructions, peak=48):
    return verify(Schedule(two_steps(), instructions, {}, peak))


def test_a_swap_makes_room_and_brings_back():
    away = (SwapOut(A), Wait(A), Free(A))
    back = (Alloc(A), SwapIn(A), Wait(A))
    assert run(*START, *MIDDLE, *away, *back, *END) == 48


@pytest.mark.parametrize(
    ("instructions", "problem"),
    [
        ((*START, SwapOut(A), Free(A), *MIDDLE, *END), "being copied"),
        ((*START, *MIDDLE, SwapOut(A), SwapOut(A), *END), "being copied"),
        ((*START, *MIDDLE, SwapOut(A), Wait(A), SwapIn(A), *END), "still copied"),
        ((*START, *MIDDLE, SwapIn(A), Wait(A), *END), "not on the host"),
        ((*START, *MIDDLE, SwapOut(C), *END), "nothing to save"),
        ((*START, SwapOut(A), Wait(A), Free(A), SwapIn(A)), "no room"),
        ((*START, *MIDDLE, Free(A), Alloc(A), *END), "'scale', which is not there"),
        ((*START, *MIDDLE, Free("y"), *END), "no memory of its own"),
        ((*START, *MIDDLE, Compute("y"), *END), "no such node"),
        ((*START, *MIDDLE, Compute(B), *END), "has run already"),
        ((*START, Compute(B), *END), "'scale.1' has no memory"),
        ((*START, *MIDDLE, *END[:-1]), "never freed"),
        ((*START, *MIDDLE, *END, Free(C)), "'add' is lost"),
        ((*START, *MIDDLE, Free(A), Free(B)), r"\['add'\] never run"),
        ((*START, *MIDDLE, *END, SwapOut(C)), "nothing waits"),
    ],
)
def test_every_rule_is_checked(instructions, problem):
    with pytest.raises(ScheduleError, match=problem):
        run(*instructions)


def test_what_was_overwritten_cannot_be_read():
    tensors = {
        "x": TensorSpec("x", (1,), role=Role.INPUT),
        "a": TensorSpec("a", (1,)),
        "b": TensorSpec("b", (1,), alias="a"),
        "c": TensorSpec("c", (1,)),
    }
    nodes = (
        Node("make", "scale", ("x",), ("a",)),
        Node("overwrite", "relu", ("a",), ("b",)),
        Node("read", "scale", ("a",), ("c",)),
    )
    with pytest.raises(ScheduleError, match="it reads 'a', which is not there"):
        verify(keep_all(Graph(tensors, nodes, ("c",))))
    assert verify(keep_all(Graph(tensors, nodes[:2], ("b",)))) == 8


def test_a_copy_on_the_host_keeps_the_value_it_had():
    tensors = {
        "x": TensorSpec("x", (1,), role=Role.INPUT),
        "a": TensorSpec("a", (1,)),
        "b": TensorSpec("b", (1,), alias="a"),
    }
    nodes = (
        Node("make", "scale", ("x",), ("a",)),
        Node("overwrite", "relu", ("a",), ("b",)),
    )
    graph = Graph(tensors, nodes, ("b",))
    made = (Alloc("x"), Alloc("a"), Compute("make"), Free("x"))
    saved = (SwapOut("a"), Wait("a"), Compute("overwrite"))
    back = (SwapIn("a"), Wait("a"))
    assert verify(Schedule(graph, (*made, *saved), {}, 8)) == 8
    with pytest.raises(ScheduleError, match="'b' is lost"):
        verify(Schedule(graph, (*made, *saved, *back), {}, 8))
    early = (*made, SwapOut("a"), Compute("overwrite"), Wait("a"))
    with pytest.raises(ScheduleError, match="being copied"):
        verify(Schedule(graph, early, {}, 8))


def test_persistent_tensors_never_move():
    b = GraphBuilder()
    b.bias(b.input("x", (2, 3)))
    graph = b.build("bias.1")
    schedule = keep_all(graph)
    moved = (Alloc("bias"), *schedule.instructions)
    with pytest.raises(ScheduleError, match="persistent"):
        verify(replace(schedule, instructions=moved))


@examples(150)
@given(data=st.data(), scheduler=st.sampled_from(sorted(SCHEDULERS.table)))
def test_schedules_keep_every_rule_and_the_budget(data, scheduler):
    graph = data.draw(training_graphs(updates=data.draw(st.booleans())))
    profile = data.draw(profiles(graph))
    residency = data.draw(residencies(graph))
    least = StepRequest(graph, profile).rewritten(residency).least_peak()
    budget = least + data.draw(st.sampled_from([0, 1, 512, 3000, 20_000, 10**9]))
    plan = plan_residency(
        StepRequest(graph, profile, budget=budget, scheduler=scheduler), residency
    )
    assert verify(plan.schedule, budget, granularity=ALIGNMENT) == plan.peak_bytes
    fronts = profile.fronts
    for name, chosen in plan.plans.items():
        assert chosen in fronts[name.partition("~")[0]]
        assert plan.schedule.workspaces.get(name, 0) >= chosen.workspace


@examples(40)
@given(data=st.data(), scheduler=st.sampled_from(["timed", "adaptive_window"]))
def test_nothing_moves_that_has_room(data, scheduler):
    graph = data.draw(training_graphs())
    profile = data.draw(profiles(graph))
    residency = data.draw(residencies(graph))
    plan = plan_residency(
        StepRequest(graph, profile, budget=10**12, scheduler=scheduler), residency
    )
    moved = [
        i.tensor for i in plan.schedule.instructions if isinstance(i, SwapOut | SwapIn)
    ]
    if scheduler == "adaptive_window":  # what may leave does so at the end of a step
        moved = [name for name in moved if name not in plan.schedule.hosted]
    else:
        assert plan.schedule.hosted == ()
    assert moved == []


def unet_request(share):
    """A request of a U-Net, for a share of the room above the least budget."""
    graph = with_updates(training_graph(get_model("unet2d")(16)), Momentum())
    free = StepRequest(graph, estimate(graph, "h200"), scheduler="adaptive_window")
    least, most = minimum_budget(free), unbounded(graph, free.profile).peak_bytes
    return free.within(least + int(share * (most - least)))


def test_convolutions_get_workspace_that_early_prefetches_would_take(monkeypatch):
    def paged():
        page = {EVERYTHING: Residency.PAGE}
        return schedule_residency(request, page, below=0.0).plan()

    request = unet_request(0.25)
    later = paged()
    monkeypatch.setattr("mucudnn.passes.planning.request._LINK_SHARES", ())
    early = paged()
    assert later.prediction.step_ms < 0.99 * early.prediction.step_ms
    assert later.prediction.compute_ms < 0.99 * early.prediction.compute_ms
    peak = verify(later.schedule, request.budget, granularity=ALIGNMENT)
    assert peak == later.peak_bytes


def test_slow_convolutions_get_workspace_before_copies_are_scheduled():
    request = unet_request(0.4)
    saved = saved_tensors(request.graph)
    offload = dict.fromkeys((s.name for s in saved), Residency.OFFLOAD)
    after = schedule_residency(request, offload, below=0.0)
    before = schedule_residency(request, offload)
    assert before.step_ms() < 0.98 * after.step_ms()
    plan = before.plan()
    peak = verify(plan.schedule, request.budget, granularity=ALIGNMENT)
    assert peak == plan.peak_bytes


@examples(60)
@given(data=st.data())
def test_the_ledger_of_stays_is_their_sum(data):
    graph = data.draw(training_graphs())
    profile = data.draw(profiles(graph))
    ready = StepRequest(graph, profile).rewritten(data.draw(residencies(graph)))
    n = len(ready.graph.nodes)
    intervals = [
        interval
        for use in ready.problem({}, math.inf).moving()
        for interval in split(use, ready.swaps.get(use.storage, ()), n)
    ]
    ledger = least_occupancy(intervals, [7] * n, 100, 0.0)
    for i in range(n):
        there = sum(
            s.nbytes
            for s in intervals
            if s.start <= i <= s.stop
            or (s.host_resident and s.start <= i + n <= s.stop)
        )
        assert ledger[i] == 107 + there


@examples(80)
@given(data=st.data())
def test_the_need_is_the_peak_of_the_shortest_intervals(data):
    graph = data.draw(training_graphs(updates=data.draw(st.booleans())))
    profile = data.draw(profiles(graph))
    residency = data.draw(residencies(graph))
    state = [Residency.KEEP, Residency.OFFLOAD, Residency.PAGE]
    residency = {**residency, PERSISTENTS: data.draw(st.sampled_from(state))}
    ready = StepRequest(graph, profile).rewritten(residency)
    plans = first_plans(ready.profile, data.draw(st.sampled_from(["least", "fastest"])))
    problem = ready.problem(plans, math.inf)
    intervals, ledger = problem.least()
    peak, position = ledger.peak()
    assert problem.need() == (peak, problem.graph.nodes[position].name)
    summed = problem.ledger(intervals)
    assert [ledger[i] for i in range(len(ledger))] == [
        summed[i] for i in range(len(summed))
    ]


@given(st.integers(1, 150), st.data())
def test_what_fits_over_a_range_fits_at_each_position_of_it(count, data):
    position = st.integers(-count, 2 * count - 1)
    ledger = MemoryLedger(data.draw(st.lists(st.integers(0, 9), min_size=count)), 20)
    for _ in range(data.draw(st.integers(0, 4))):
        start = data.draw(position)
        stop = start + data.draw(st.integers(0, count - 1))
        ledger.add(start, stop, data.draw(st.integers(0, 4)))
    start = data.draw(position)
    stop = start + data.draw(st.integers(-1, count - 1))
    nbytes = data.draw(st.integers(0, 20))
    expected = all(ledger.fits(at, nbytes) for at in range(start, stop + 1))
    assert ledger.fits_over(start, stop, nbytes) == expected
    used = [ledger[at] for at in range(len(ledger))]
    for at in range(start, stop + 1) if expected else ():
        used[at % len(used)] += nbytes
    assert ledger.take(start, stop, nbytes) == expected
    assert [ledger[at] for at in range(len(ledger))] == used
    assert ledger.peak() == (max(used), used.index(max(used)))


def moves(paged=None):
    graph, profile, residency = layers()
    if paged is not None:
        residency = {**residency, paged: Residency.PAGE}
    least = StepRequest(graph, profile).rewritten(residency).least_peak()
    return plan_residency(
        StepRequest(graph, profile, budget=least + 512), residency
    ).schedule


def test_weights_are_carried_from_step_to_step():
    assert not moves().hosted
    schedule = moves(PERSISTENTS)
    assert set() < set(schedule.live_across) < set(schedule.hosted)


PAGED = {EVERYTHING: Residency.PAGE}


def problem_of(graph, profile, residency, budget):
    ready = StepRequest(graph, profile).rewritten(residency)
    plans = first_plans(ready.profile, "least")
    return ready.problem(plans, budget)


def test_only_what_is_not_met_in_time_leaves_and_once_if_clean():
    graph, profile, _ = layers()
    peak = plan_residency(StepRequest(graph, profile, budget=math.inf), {}).peak_bytes
    found, _ = adaptive_window(problem_of(graph, profile, {}, peak))
    assert not any(interval.copied_in for interval in found)
    tight, _ = adaptive_window(problem_of(graph, profile, {}, peak - ALIGNMENT))
    assert any(interval.copied_in for interval in tight)
    # Paged away time and again, what nobody writes leaves the device once.
    least = StepRequest(graph, profile).rewritten(PAGED).least_peak()
    found, _ = adaptive_window(problem_of(graph, profile, PAGED, least))
    written = {}
    for interval in found:
        if interval.copied_out:
            written.setdefault(interval.storage, []).append(interval)
        assert interval.kept_on_host or not interval.copied_out
    uses = problem_of(graph, profile, PAGED, least).uses
    for storage, intervals in written.items():
        for one, two in pairwise(intervals):
            assert any(one.last < w <= two.last for w in uses[storage].writes)


def test_time_does_not_matter_to_it():
    graph, profile, _ = layers()
    least = StepRequest(graph, profile).rewritten(PAGED).least_peak()
    slow = Profile(
        node_ms=dict.fromkeys(profile.node_ms, 100.0),
        workspaces={},
        fronts={},
        out_bytes_per_ms=1.0,
        in_bytes_per_ms=7.0,
    )
    intervals = [
        adaptive_window(problem_of(graph, p, PAGED, least + 4096))[0]
        for p in (profile, slow)
    ]
    assert intervals[0] == intervals[1]


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
    # Half a ms a copy, of which the first hides behind waiting for it: f1 0-2, f2 2-4,
    # out a 4-9 and waited for; in a 9-13, b2 9.5-11.5, waits for a.
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


@examples(150)
@given(found=drafts(), share=st.floats(0, 1.5))
def test_it_takes_what_its_program_does_and_is_given_up_only_where_not_faster(
    found, share
):
    whole = found.step_ms()
    assert whole == found.plan().prediction.step_ms  # to the last bit
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
