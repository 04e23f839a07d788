"""Every schedule of every scheduler keeps its budget, and the rules of instructions."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from mucudnn.errors import PlanningError, ScheduleError
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import Alloc, Compute, Free, SwapIn, SwapOut, Wait
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.planning.plan_step import minimum_budget, unbounded
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.passes.residency import EVERYTHING, PERSISTENTS, Residency
from mucudnn.passes.scheduling import SCHEDULERS, timed
from mucudnn.passes.scheduling.intervals import MemoryLedger, least_occupancy, split
from mucudnn.passes.scheduling.problem import first_plans
from mucudnn.passes.scheduling.schedulers import adaptive_window
from tests.examples import examples
from tests.random_graphs import profiles, residencies, training_graphs
from tests.schedule_oracle import verify
from tests.test_simulate import layers


def test_the_table():
    assert set(SCHEDULERS.table) == {"on_demand", "timed", "adaptive_window"}


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
@given(data=st.data(), scheduler=st.sampled_from(["on_demand", "timed"]))
def test_a_byte_less_than_the_least_is_refused(data, scheduler):
    graph = data.draw(training_graphs())
    profile = data.draw(profiles(graph))
    residency = data.draw(residencies(graph))
    least = StepRequest(graph, profile).rewritten(residency).least_peak()
    with pytest.raises(PlanningError, match=r"1 B \(1 bytes\) short: node '"):
        plan_residency(
            StepRequest(graph, profile, budget=least - 1, scheduler=scheduler),
            residency,
        )


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


def test_convolutions_get_workspace_that_early_prefetches_would_take(monkeypatch):
    graph = with_updates(training_graph(get_model("unet2d")(16)), Momentum())
    free = StepRequest(graph, estimate(graph, "h200"))
    least, most = minimum_budget(free), unbounded(graph, free.profile).peak_bytes
    budget = (3 * least + most) // 4

    def paged():
        request = StepRequest(graph, free.profile, budget, scheduler="adaptive_window")
        return plan_residency(request, {EVERYTHING: Residency.PAGE})

    later = paged()
    monkeypatch.setattr("mucudnn.passes.planning.request._LINK_SHARES", ())
    early = paged()
    assert later.prediction.step_ms < 0.99 * early.prediction.step_ms
    assert later.prediction.compute_ms < 0.99 * early.prediction.compute_ms
    assert verify(later.schedule, budget, granularity=ALIGNMENT) == later.peak_bytes


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


@pytest.fixture(scope="module", params=["activations", "weights too"])
def moving(request):
    """A schedule that moves tensors both ways."""
    return moves(PERSISTENTS if request.param == "weights too" else None)


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


@pytest.mark.parametrize("kind", [Alloc, SwapOut, SwapIn, Wait, Compute, Free])
def test_verify_misses_no_instruction(moving, kind):
    """The oracle can fail: a schedule without any one of them is wrong."""
    program = moving.instructions
    assert verify(moving, granularity=ALIGNMENT)
    places = [
        i for i, instruction in enumerate(program) if isinstance(instruction, kind)
    ]
    assert places
    for i in places:
        shorter = program[:i] + program[i + 1 :]
        changed = replace(moving, instructions=shorter)
        with pytest.raises(ScheduleError):
            verify(changed, granularity=ALIGNMENT)


@examples(60)
@given(data=st.data())
def test_stays_of_a_storage_do_not_meet(data):
    graph = data.draw(training_graphs())
    profile = data.draw(profiles(graph))
    ready = StepRequest(graph, profile).rewritten(data.draw(residencies(graph)))
    plans = first_plans(ready.profile, "least")
    problem = ready.problem(plans, ready.least_peak() + 512)
    last = {}
    for interval in timed(problem)[0]:
        before = last.get(interval.storage)
        assert interval.copied_in == (interval.host_resident or before is not None)
        assert before is None or before.stop < interval.start <= interval.needed
        last[interval.storage] = interval


PAGED = {EVERYTHING: Residency.PAGE}


def problem_of(graph, profile, residency, budget):
    ready = StepRequest(graph, profile).rewritten(residency)
    plans = first_plans(ready.profile, "least")
    return ready.problem(plans, budget)


@examples(150)
@given(data=st.data())
def test_both_windows_share_the_budget(data):
    graph = data.draw(training_graphs(most=14, updates=data.draw(st.booleans())))
    profile = data.draw(profiles(graph))
    residency = data.draw(st.one_of(residencies(graph), st.just(PAGED)))
    least = StepRequest(graph, profile).rewritten(residency).least_peak()
    budget = least + data.draw(st.sampled_from([0, 1, 512, 2048, 10_000, 50_000]))
    problem = problem_of(graph, profile, residency, budget)
    intervals, _ = adaptive_window(problem)
    resident = problem.resident()
    for i, node in enumerate(problem.graph.nodes):
        scratch = problem.workspaces.get(node.name, 0)
        there = sum(s.nbytes for s in intervals if s.start <= i <= s.stop)
        assert there <= budget - resident - scratch, node.name


@examples(60)
@given(data=st.data())
def test_without_gaps_of_its_own_everything_may_leave(data):
    graph = data.draw(training_graphs())
    profile = data.draw(profiles(graph))
    least = StepRequest(graph, profile).rewritten(PAGED).least_peak()
    for residency in ({}, PAGED):
        plan = plan_residency(
            StepRequest(graph, profile, budget=least, scheduler="adaptive_window"),
            residency,
        )
        assert verify(plan.schedule, least, granularity=ALIGNMENT) <= least
    with pytest.raises(PlanningError, match="short"):
        plan_residency(
            StepRequest(graph, profile, budget=least - 1, scheduler="adaptive_window"),
            {},
        )


def test_what_is_met_again_in_time_never_leaves():
    graph, profile, _ = layers()
    peak = plan_residency(StepRequest(graph, profile, budget=math.inf), {}).peak_bytes
    found, _ = adaptive_window(problem_of(graph, profile, {}, peak))
    assert not any(interval.copied_in for interval in found)
    tight, _ = adaptive_window(problem_of(graph, profile, {}, peak - ALIGNMENT))
    assert any(interval.copied_in for interval in tight)


def test_a_clean_copy_is_not_made_twice():
    """Paged away time and again, what nobody writes leaves the device once."""
    graph, profile, _ = layers()
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
