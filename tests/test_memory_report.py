"""Memory studies: timelines, techniques, traces, snapshots and the page."""

import itertools
import json
import pickle
import xml.etree.ElementTree as ET
from collections import Counter
from functools import cache

import pytest
from hypothesis import given, strategies as st

from mucudnn.errors import PlanningError
from mucudnn.passes.estimate import estimate
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.plan_step import (
    best_technique,
    largest_batch_within,
    minimum_budget,
    plan_step,
    try_technique,
)
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import PLANNED, policy_names
from mucudnn.passes.scheduling import SCHEDULERS
from mucudnn.passes.scheduling.step_plan import (
    WORKSPACE,
    memory_intervals,
    memory_points,
    stalls,
)
from mucudnn.report.memory import memory_report, memory_tables, speed_series
from mucudnn.report.memory_charts import (
    WIDTH,
    Series,
    lanes_chart,
    speed_chart,
    stack_chart,
)
from mucudnn.report.svg import linear_scale, reduce_to_columns, unit_of
from mucudnn.report.trace import LANES, snapshot, snapshot_bytes, trace_json
from mucudnn.studies.memory import study_memory
from mucudnn.studies.memory_results import StepSpec

pytestmark = pytest.mark.usefixtures("short_searches")

MIB = 1 << 20


def spec(model="cifar_quick", batch=8, **more):
    return StepSpec(model=model, batch=batch, device="null", **more)


@cache
def step(model="cifar_quick", batch=8):
    graph = spec(model, batch).graph()
    return graph, estimate(graph, "null")


def test_a_budget_and_what_does_not_fit_it_read_differently():
    graph, profile = step()
    budget = minimum_budget(StepRequest(graph, profile)) - 256
    study = study_memory(spec(), policies=["planned"], budget=budget)
    (table,) = memory_tables(study)
    asked, needed = table.title.rpartition("budget ")[2], table.rows[0][3]
    assert table.rows[0][2] == "no"
    assert asked != needed
    assert f"within {asked}" in memory_report(study)


def budget_of(share, model="cifar_quick"):
    graph, profile = step(model)
    least = minimum_budget(StepRequest(graph, profile))
    most = minimum_budget(StepRequest(graph, profile, policy="keep_all"))
    return int(least + share * (most - least))


@cache
def plan(policy=PLANNED, scheduler="timed", share=0.3, model="cifar_quick"):
    technique = try_technique(
        StepRequest(
            *step(model),
            policy=policy,
            scheduler=scheduler,
            budget=budget_of(share, model),
        )
    )
    return technique.plan


@cache
def study(share=0.3, **asked):
    return study_memory(
        spec(), policies=policy_names(), budget=budget_of(share), **asked
    )


# Timelines ------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", SCHEDULERS.table)
@pytest.mark.parametrize("policy", ["paging", "lru", "superneurons", PLANNED])
def test_the_highest_point_of_the_curve_is_the_schedules_peak(policy, scheduler):
    model = "cifar_quick" if policy == PLANNED else "resnet20"
    found = plan(policy, scheduler, share=0.5, model=model)
    if found is None:
        pytest.skip("does not fit")
    points = memory_points(memory_intervals(found))
    assert max(nbytes for _, nbytes in points) == found.peak_bytes
    assert all(nbytes >= 0 for _, nbytes in points)
    times = [ms for ms, _ in points]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] <= found.prediction.step_ms + 1e-9


def test_an_offloaded_tensor_is_there_twice_and_never_at_the_same_time():
    found = plan("paging")
    by_name = {}
    for interval in memory_intervals(found):
        by_name.setdefault(interval.name, []).append(interval)
    returned = {lane.name for lane in found.prediction.lanes if lane.engine == "in"}
    assert returned
    at_home = set(found.schedule.hosted)
    assert at_home <= returned
    for name, intervals in by_name.items():
        assert (len(intervals) > 1) == (name in returned) or name in at_home
        for before, after in itertools.pairwise(intervals):
            assert before.last < after.first
            assert before.stop_ms <= after.start_ms


@pytest.mark.parametrize("policy", ["paging", PLANNED])
def test_pauses_are_the_stalls_of_the_prediction(policy):
    found = plan(policy)
    pauses = sum(stop - start for start, stop in stalls(found.prediction.lanes))
    assert pauses <= sum(found.prediction.stalls_ms.values()) + 1e-6
    compute = [x for x in found.prediction.lanes if x.engine == "compute"]
    assert pauses == pytest.approx(compute[-1].stop_ms - found.prediction.compute_ms)


# Techniques -----------------------------------------------------------------------


@given(
    st.integers(0, 1 << 21),
    st.integers(0, 1 << 16),
    st.integers(1, 1 << 20),
    st.integers(1, 1 << 20),
    st.integers(0, 3),
)
def test_the_largest_batch_within_a_budget_is_found_in_few_trials(
    budget, rest, start, most, bend
):
    tried = []

    def least(batch):
        return rest + batch + max(0, bend * (batch - 1000))

    def asked(batch):
        tried.append(batch)
        return least(batch)

    found = largest_batch_within(asked, budget, start=start, most=most)
    assert found == 0 or least(found) <= budget
    assert found == most or least(found + 1) > budget
    assert all(1 <= batch <= most for batch in tried)
    assert len(tried) == len(set(tried)) < 60


def test_parameters_that_outweigh_all_samples_mislead_nobody():
    """From the first two batches the line is flat; it says nothing about later ones."""
    found = study_memory(
        spec("alexnet", 1), policies=("paging",), budget=1 << 30, max_batch=True
    ).max_batch["paging"]
    assert 1 < found < 10_000


def test_a_study_says_what_does_not_fit_and_by_how_much():
    data = study().to_json()
    for row, technique in zip(data["rows"], study().techniques, strict=True):
        fits = row["fits"]
        assert fits == (row["predicted_ms"] is not None)
        assert (row["peak_bytes"] <= data["budget_bytes"]) == fits
        if not fits:
            assert row["short_bytes"] == row["peak_bytes"] - data["budget_bytes"]
        assert technique.policy == row["policy"]
    assert [row["fits"] for row in data["rows"] if row["policy"] == "keep_all"] == [
        False
    ]
    assert sum(row["best"] for row in data["rows"]) == 1
    techniques = study().techniques
    best = best_technique(techniques)
    assert best is study().best
    assert best.step_ms == min(t.step_ms for t in techniques if t.fits)
    assert best_technique([t for t in techniques if not t.fits]) is None


@pytest.mark.slow
def test_the_curve_falls_with_the_budget_for_our_policy():
    found = study(curve=True)
    budgets = sorted({t.budget for t in found.curve}, reverse=True)
    assert budgets[0] == found.unbounded.peak_bytes
    assert budgets[-1] == found.minimum
    ours = next(s for s in speed_series(found) if s.strong)
    assert len(ours.points) == len(budgets)
    assert max(speed for _, speed in ours.points) == pytest.approx(1, abs=0.01)


def test_limits_by_policy_agree_with_trying():
    policies = ("keep_all", "paging", "superneurons", "cost_based", PLANNED)
    found = study_memory(
        spec("lenet"),
        policies=policies,
        budget=8 * MIB,
        max_batch=True,
        min_budget=True,
    )
    for policy, batch in found.max_batch.items():
        fitting, beyond = (
            StepRequest(*step("lenet", n), policy=policy, budget=8 * MIB)
            for n in (batch, batch + 1)
        )
        assert minimum_budget(fitting) <= 8 * MIB < minimum_budget(beyond)
        assert plan_step(fitting).peak_bytes <= 8 * MIB
        with pytest.raises(PlanningError):
            plan_step(beyond)
    graph, profile = step("lenet")
    for policy, least in found.min_budget.items():
        assert least == minimum_budget(StepRequest(graph, profile, policy=policy))
    text = [table.rows for table in memory_tables(found)][-1]
    assert [row[0] for row in text] == [*policies]


# Traces and snapshots -------------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep_all", "paging", PLANNED])
def test_a_trace_has_three_lanes_and_the_memory(policy):
    found = plan(policy, share=1.0 if policy == "keep_all" else 0.3)
    events = json.loads(trace_json(found))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == list(LANES.values())
    boxes = [e for e in events if e["ph"] == "X"]
    assert len(boxes) == len(found.prediction.lanes)
    for lane in names:
        mine = [e for e in boxes if e["tid"] == lane]
        for before, after in itertools.pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    counters = [e for e in events if e["ph"] == "C"]
    assert max(e["args"]["bytes"] for e in counters) == found.peak_bytes
    assert [e["ts"] for e in counters] == sorted(e["ts"] for e in counters)
    end = max(e["ts"] + e["dur"] for e in boxes) / 1e3
    if found.schedule.live_across:  # copies go on in the next step
        assert end >= 0.999 * found.prediction.step_ms
    else:
        assert end == pytest.approx(found.prediction.step_ms)


@cache
def placed_step(policy, share=0.3, scheduler=None):
    return place_step(
        StepRequest(
            *step(), budget=budget_of(share), policy=policy, scheduler=scheduler
        )
    )


@pytest.mark.parametrize("scheduler", [None, *SCHEDULERS.table])
@pytest.mark.parametrize(
    ("policy", "share"),
    [("paging", 0.0), ("paging", 0.1), ("paging", 0.6), ("keep_all", 1.0)],
)
def test_a_snapshot_has_the_addresses_of_the_step(policy, share, scheduler):
    placed = placed_step(policy, share, scheduler)
    (trace,) = snapshot(placed)["device_traces"]
    arena, *events = trace
    assert arena["size"] == placed.nbytes <= budget_of(share)
    bottom, layout = arena["addr"] + placed.state_bytes, placed.layout
    taken = {}
    for event in events:
        if event["action"] == "alloc":
            taken.setdefault(event["frames"][0]["name"], []).append(event["addr"])
    for name, offsets in layout.offsets.items():
        assert taken.pop(name) == [bottom + offset for offset in offsets]
    for node, offset in layout.workspace_offsets.items():
        assert taken.pop(WORKSPACE + node) == [bottom + offset]
    assert set(taken) == set(placed.plan.schedule.resident) & set(taken)
    assert all(len(at) == 1 and at[0] < bottom for at in taken.values())


@pytest.mark.parametrize("policy", ["paging", PLANNED])
def test_a_snapshot_replays_without_overlaps_to_what_its_segment_holds(policy):
    placed = placed_step(policy)
    found = placed.plan
    data = pickle.loads(snapshot_bytes(placed))
    assert data["segments"][0]["total_size"] == placed.nbytes <= found.budget
    assert set(data) >= {"segments", "device_traces"}
    (trace,), (segment,) = data["device_traces"], data["segments"]
    arena = trace[0]
    assert arena["action"] == "segment_alloc"
    assert (arena["addr"], arena["size"]) == (segment["address"], segment["total_size"])
    alive, most, asked = {}, 0, set()
    for event in trace[1:]:
        assert {"action", "addr", "size", "stream", "frames", "time_us"} <= set(event)
        start, stop = event["addr"], event["addr"] + event["size"]
        match event["action"]:
            case "alloc":
                assert arena["addr"] <= start < stop <= arena["addr"] + arena["size"]
                assert all(stop <= a or a + n <= start for a, n in alive.items())
                alive[start] = event["size"]
                most = max(most, sum(alive.values()))
            case "free_requested":
                assert alive[start] == event["size"]
                asked.add(start)
            case "free_completed":
                asked.remove(start)
                assert alive.pop(start) == event["size"]
            case other:
                pytest.fail(other)
    assert not asked
    assert most == found.peak_bytes
    blocks = segment["blocks"]
    active = [b for b in blocks if b["state"] == "active_allocated"]
    assert {b["address"]: b["size"] for b in active} == alive
    assert sum(b["size"] for b in blocks) == segment["total_size"]
    times = [event["time_us"] for event in trace]
    assert times == sorted(times)


@pytest.mark.torch
def test_pytorchs_own_reader_opens_a_snapshot():
    viz = pytest.importorskip("torch.cuda._memory_viz")
    data = snapshot(placed_step(PLANNED))
    counts = Counter(event["action"] for event in data["device_traces"][0])
    text = viz.trace(data)
    assert text.count("# free completed") == counts["free_completed"]
    assert viz.segsum(data)
    assert "<html" in viz.trace_plot(data) or "<!DOCTYPE" in viz.trace_plot(data)


# The page -------------------------------------------------------------------------


def elements(page, name):
    return ET.fromstring(page.partition("\n")[2]).iter(name)


def test_the_page_is_well_formed_and_shows_every_technique(short_search):
    policies = ("keep_all", "paging", PLANNED)
    found = study_memory(spec(), policies=policies, budget=budget_of(0.3), curve=True)
    page = memory_report(found)
    assert page.startswith("<!DOCTYPE html>")
    rows = ["".join(row.itertext()) for row in elements(page, "tr")]
    for technique in found.techniques:
        assert any(row.startswith(technique.policy) for row in rows)
    assert sum(row.endswith("best") for row in rows) == 1
    headings = {"".join(h.itertext()) for h in elements(page, "h2")}
    assert {
        "Memory over the step",
        "Tensors in memory",
        "Compute and copies",
    } <= headings
    assert "nan" not in page
    assert "http" not in page


def test_the_page_has_every_table_of_the_command():
    """Also minimum budgets, the largest batch and the throughput."""
    asked = {"min_budget": True, "max_batch": True, "curve": True}
    found = study_memory(spec(), policies=["paging"], budget=budget_of(0.3), **asked)
    page = memory_report(found)
    headings = {"".join(h.itertext()).lower() for h in elements(page, "h2")}
    titles = [table.title for table in memory_tables(found)[1:]]
    assert len(titles) == 3
    assert headings >= {title.lower() for title in titles}


def test_names_of_many_equal_lines_fit_into_their_chart_and_are_on_top():
    points = ((9 * MIB, 0.8), (12 * MIB, 1.0))
    names = [f"a_long_name_of_a_policy_{i}" for i in range(14)]
    (chart,) = elements(f"\n{speed_chart([Series(n, points) for n in names])}", "svg")
    (*_, name) = chart
    assert name.text.endswith("_1, a_long_name_of_a_policy_2, 11 more")
    assert float(name.get("x")) - 5.6 * len(name.text) >= 0


def test_numbers_of_a_full_axis_are_not_cut():
    """The last number is centred at the end of the axis, and may be long."""
    (chart,) = elements(f"\n{lanes_chart(study().best.plan)}", "svg")
    axis = next(line for line in chart.iter("line") if line.get("class") == "axis")
    assert float(axis.get("x2")) + 5.3 * len("0.0045") / 2 <= WIDTH


def test_offloaded_parameters_have_the_colour_of_parameters():
    least = study_memory(spec("lenet", 2), policies=[PLANNED], budget=MIB).minimum
    plan = study_memory(spec("lenet", 2), policies=[PLANNED], budget=least).best.plan
    (chart,) = elements(f"\n{stack_chart(plan)}", "svg")
    drawn = {
        path.find("{*}title").text.partition(":")[0]: path.get("class")
        for path in chart.iter("path")
    }
    assert drawn["conv.1/weight"] == "stay state"


def test_nothing_is_drawn_outside_its_picture_and_the_largest_tensors_are_named():
    page = memory_report(study())
    for picture in elements(page, "svg"):
        _, _, width, height = map(float, picture.get("viewBox").split())
        for box in picture.iter("rect"):
            x, y, w, h = (float(box.get(k)) for k in ("x", "y", "width", "height"))
            assert -0.1 <= x <= x + w <= width + 0.1
            assert -0.1 <= y <= y + h <= height + 0.1
        for line in picture.iter("line"):
            assert all(0 <= float(line.get(k)) <= height for k in ("y1", "y2"))
    titles = ["".join(t.itertext()) for t in elements(page, "title")]
    largest = max(
        (i for i in memory_intervals(study().best.plan) if not i.persistent),
        key=lambda i: i.nbytes * (i.stop_ms - i.start_ms),
    )
    assert any(title.startswith(f"{largest.name}:") for title in titles)
    found = study_memory(spec("lenet"), policies=("keep_all",), budget=MIB)
    page = memory_report(found)
    assert "nothing fits" in page
    assert "Compute and copies" not in page


def test_an_interrupted_study_keeps_what_is_done(monkeypatch):
    from mucudnn.studies import memory

    done = []

    def interrupted(request):
        if done:
            raise KeyboardInterrupt
        done.append(try_technique(request))
        return done[0]

    monkeypatch.setattr(memory, "try_technique", interrupted)
    found = study_memory(
        spec("lenet"), policies=("paging", "lru"), budget=64 * MIB, curve=True
    )
    assert found.interrupted
    assert [t.policy for t in found.techniques] == [t.policy for t in done]
    assert "Interrupted" in memory_report(found)
    assert any("interrupted" in note for note in memory_tables(found)[0].notes)


# Axes -----------------------------------------------------------------------------


@given(st.floats(1e-3, 1e12), st.booleans())
def test_ticks_are_few_and_within_the_axis(high, along):
    start, stop = (0.0, 900.0) if along else (300.0, 0.0)
    scale = linear_scale(high, start, stop)
    assert 3 <= len(scale.ticks) <= 13
    assert scale.ticks[0] == 0
    assert scale.ticks[-1] <= high * (1 + 1e-9)
    units = [unit_of(nbytes) for nbytes in (3 << 30, 2000, 0)]
    assert units == [("GiB", 1 << 30), ("KiB", 1 << 10), ("B", 1)]


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 99)), min_size=1),
    st.sampled_from([0.5, 1.0, 7.0]),
)
def test_columns_keep_every_height(steps, width):
    points = sorted((x / 10, float(value)) for x, value in steps)
    drawn = reduce_to_columns(points, width)
    assert max(v for _, v in drawn) == max(v for _, v in points)
    assert drawn[-1][1] == points[-1][1]
    xs = [x for x, _ in drawn]
    assert xs == sorted(xs)
