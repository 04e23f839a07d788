"""Shares of a mini-batch, by exhaustive search, bounds and drift; `mucudnn fleet`."""

import itertools
import json
import random
import xml.etree.ElementTree as ET
from functools import partial

import pulp
import pytest
from hypothesis import example, given, settings, strategies as st

from mucudnn.errors import CacheError, PlanningError
from mucudnn.ir.fleet import AllReduce, Fleet, Rank, StepPoint, StepTable
from mucudnn.passes.linear_program import cbc
from mucudnn.passes.load_balancing import (
    ShareTimes,
    best_batch,
    equal_shares,
    measured_table,
    plan_of,
    proportional_shares,
    replanned,
    share_times,
    split_batch,
    step_bound_ms,
)
from mucudnn.recording_format import format_step_table, read_step_table
from mucudnn.report.fleet import fleet_report, fleet_tables, waiting_chart
from mucudnn.runtime.store.recordings import load_step_table, save_step_table
from mucudnn.studies.fleet import Link, study_fleet
from mucudnn.studies.memory_results import StepSpec
from tests import commands
from tests.tables import step_times


def a_table(name, *points):
    return StepTable(name, tuple(StepPoint(*point) for point in points))


def linear(name, fixed, each, most, **rank):
    table = a_table(name, (1, fixed + each), (most, fixed + each * most))
    return Rank(name, table, **rank)


@st.composite
def ranks(draw, most=12):
    points, time_ms, nbytes = [], 0.0, 100
    sizes = draw(st.sets(st.integers(1, most), min_size=1, max_size=4))
    for samples in sorted(sizes):
        # Times may fall, as measured ones do.
        time_ms = max(0.125, time_ms + draw(st.integers(-4, 24)) / 8)
        nbytes += draw(st.integers(0, 300))
        points.append(StepPoint(samples, time_ms, nbytes))
    memory = draw(st.none() | st.integers(100, 1200))
    return Rank("r", StepTable("d", tuple(points)), memory, draw(st.booleans()))


def of_all(fleet, batch, at_least):
    """The least time of a step by trying everything; None if nothing fits."""
    times = [share_times(rank, batch).times_ms for rank in fleet.ranks]
    sizes = [range(at_least, len(of)) for of in times]
    found = [
        max(of[n] for of, n in zip(times, shares, strict=True))
        for shares in itertools.product(*sizes)
        if sum(shares) == batch
    ]
    return min(found) + fleet.all_reduce_ms if found else None


def by_ilp(fleet, batch):
    times = [share_times(rank, batch).times_ms for rank in fleet.ranks]
    program = pulp.LpProblem("split", pulp.LpMinimize)
    longest = pulp.LpVariable("longest", lowBound=0)
    program += longest
    total = []
    for i, of in enumerate(times):
        x = [program.add_variable(f"x_{i}_{n}", cat="Binary") for n in range(len(of))]
        program += pulp.lpSum(x) == 1
        program += longest >= pulp.lpSum(t * v for t, v in zip(of, x, strict=True))
        total += [n * v for n, v in enumerate(x)]
    program += pulp.lpSum(total) == batch
    program.solve(cbc(10_000))
    return pulp.value(longest) + fleet.all_reduce_ms


FALLING = Rank("r", a_table("d", (1, 0.75), (3, 0.5), (5, 0.875), (6, 1.25)))
"""Of shares of two steps, the one after a flat part has the highest throughput."""


@given(ranks(), st.integers(1, 30))
@example(FALLING, 9)
@settings(max_examples=300, deadline=None)
def test_times_of_shares_are_those_of_their_steps(rank, most):
    of = share_times(rank, most)
    at_once = min(rank.most_at_once, most)
    assert of.most == (most if rank.accumulates and at_once else at_once)
    table = step_times(rank.table, at_once)
    expected, longest = [], 0.0
    for samples in range(of.most + 1):
        passes = of.passes(samples)
        each, more = divmod(samples, max(1, passes))
        steps = [each + (i < more) for i in range(passes)]
        assert all(step <= at_once for step in steps)
        longest = max(longest, sum(table[step] for step in steps))
        expected.append(longest)
    assert of.times_ms == pytest.approx(expected, rel=1e-12)
    assert [of.time_ms(n) for n in range(of.most + 1)] == list(of.times_ms)
    assert list(of.times_ms) == sorted(of.times_ms)
    for time_ms in (*of.times_ms, *(t * 1.01 for t in of.times_ms), 0.1):
        assert of.most_by(time_ms) == sum(t <= time_ms for t in of.times_ms) - 1
        assert of.most_before(time_ms) == sum(t < time_ms for t in of.times_ms) - 1
    rates = [n / of.time_ms(n) for n in range(1, of.most + 1)]
    corners = [n / of.time_ms(n) for n in of.corners()]
    assert max(corners, default=0) == pytest.approx(max(rates, default=0), rel=1e-12)


@given(st.lists(ranks(), min_size=1, max_size=3), st.integers(1, 16), st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_the_split_equals_exhaustive_search(members, batch, at_least):
    fleet = Fleet(tuple(members), AllReduce(measured_ms=0.5))
    batch = max(batch, at_least * len(members))
    if batch == 0:
        return
    best = of_all(fleet, batch, at_least)
    if best is None:
        with pytest.raises(PlanningError):
            split_batch(fleet, batch, at_least=at_least)
        return
    plan = split_batch(fleet, batch, at_least=at_least)
    assert plan.batch == batch
    assert min(plan.samples) >= at_least
    assert plan.step_ms == best
    assert step_bound_ms(fleet, batch) <= plan.step_ms * (1 + 1e-12)
    for rank, share in zip(fleet.ranks, plan.shares, strict=True):
        if share.samples:
            assert rank.most_at_once * share.passes >= share.samples
            assert rank.accumulates or share.passes == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PuLP's solvers
@given(st.integers(0, 10_000))
@settings(max_examples=5, deadline=None)
def test_the_split_equals_an_integer_program(seed):
    rng = random.Random(seed)
    members = [
        linear(f"r{i}", rng.uniform(0, 5), rng.uniform(0.2, 3), 40) for i in range(5)
    ]
    fleet = Fleet(tuple(members))
    assert split_batch(fleet, 40).step_ms == pytest.approx(by_ilp(fleet, 40), rel=1e-5)


@given(st.lists(ranks(8), min_size=1, max_size=2), st.integers(1, 6), st.integers(0, 6))
@settings(max_examples=50, deadline=None)
def test_the_best_batch_of_a_range_equals_trying_each(members, least, more):
    fleet = Fleet(tuple(members), AllReduce(measured_ms=1.0))
    rates = []
    for batch in range(least, least + more + 1):
        try:
            rates.append(split_batch(fleet, batch).samples_per_s)
        except PlanningError:
            break
    if not rates:
        with pytest.raises(PlanningError):
            best_batch(fleet, least, least + more)
        return
    found = best_batch(fleet, least, least + more)
    assert least <= found.batch <= least + more
    assert found.samples_per_s == pytest.approx(max(rates))


def test_a_fast_and_a_slow_device_end_together():
    fleet = Fleet((linear("slow", 0, 4.0, 256), linear("fast", 0, 1.0, 256)))
    plan = split_batch(fleet, 250)
    assert plan.samples == (50, 200)
    assert plan.idle_ms == (0.0, 0.0)
    assert equal_shares(fleet, 250).step_ms == 500
    assert proportional_shares(fleet, 250).samples == (50, 200)


@pytest.mark.parametrize("number", [4, 1024])
def test_a_thousand_ranks_look_at_few_shares(number, monkeypatch):
    """Of each kind as many as halving a range of times takes, whatever the batch."""
    looked, most_by = [], ShareTimes.most_by
    monkeypatch.setattr(
        ShareTimes, "most_by", lambda of, ms: (looked.append(of), most_by(of, ms))[1]
    )
    monkeypatch.delattr(ShareTimes, "times_ms")  # of every share there is
    rng = random.Random(0)
    kinds = [(rng.uniform(0.3, 3), rng.uniform(0.1, 2)) for _ in range(number)]
    members = [linear(f"r{i}", *kinds[i % number], 512) for i in range(1024)]
    fleet = Fleet(tuple(members), AllReduce(measured_ms=3.0))
    plan = split_batch(fleet, 65_536)
    assert len(looked) <= 128 * number + len(members)
    assert plan.batch == 65_536
    # No rank could take another sample in the same time: the least time it is.
    longest = max(fixed + each for fixed, each in kinds)
    assert max(plan.idle_ms) <= longest
    below = plan.compute_ms - 1e-9
    fits = (1024 // number) * sum(
        max(n for n in range(513) if n == 0 or fixed + each * n <= below)
        for fixed, each in kinds
    )
    assert fits < 65_536


@pytest.mark.parametrize(
    ("memory", "most"), [(None, 8), (99, 0), (100, 2), (250, 5), (10_000, 8)]
)
def test_the_largest_step_within_memory_is_on_the_line_between_points(memory, most):
    table = a_table("d", (2, 1.0, 100), (6, 2.0, 300), (8, 3.0, 300))
    assert table.most_within(memory) == most


def test_a_table_is_a_line_between_its_points():
    table = a_table("d", (4, 3.0), (2, 2.0))
    assert share_times(Rank("r", table), 4).times_ms == (0.0, 2.0, 2.0, 2.5, 3.0)
    with pytest.raises(ValueError, match="two steps of 3"):
        a_table("d", (3, 1.0), (3, 2.0))
    with pytest.raises(ValueError, match="has no step"):
        StepTable("d", ())


def test_what_cannot_be_shared_out_is_said():
    fleet = Fleet((linear("a", 0, 1.0, 8, accumulates=False),) * 2)
    with pytest.raises(PlanningError, match="at most 16 samples a step, not 17"):
        split_batch(fleet, 17)
    with pytest.raises(ValueError, match="fewer than 2 samples for each of 2 ranks"):
        split_batch(fleet, 3, at_least=2)
    with pytest.raises(PlanningError, match="a takes at most 8 samples a step, not 9"):
        plan_of(fleet, (9, 0))
    with pytest.raises(ValueError, match="1 shares for 2 ranks"):
        plan_of(fleet, (9,))


def test_a_split_is_changed_where_that_pays_and_kept_otherwise():
    fleet = Fleet((linear("a", 0, 1.0, 64), linear("b", 0, 1.0, 64)))
    assert replanned(fleet, (32, 32), (1.0, 1.1)) is None
    changed = replanned(fleet, (32, 32), (1.0, 3.0))
    assert changed is not None
    assert changed.samples == (48, 16)
    # Once changed it stays, with the same factors and with slightly other ones.
    assert replanned(fleet, changed.samples, (1.0, 3.0)) is None
    assert replanned(fleet, changed.samples, (1.0, 2.9)) is None
    # And it goes back when the rank is as it was.
    back = replanned(fleet, changed.samples, (1.0, 1.0))
    assert back is not None
    assert back.samples == (32, 32)


def test_an_all_reduce_is_a_ring():
    ring = AllReduce(nbytes=1000, bytes_per_ms=100.0, latency_ms=0.5)
    assert ring.time_ms(1) == 0
    assert ring.time_ms(2) == 2 * (0.5 + 5)
    assert ring.time_ms(4) == 6 * (0.5 + 2.5)
    assert AllReduce(measured_ms=7.0).time_ms(4) == 7


STEP = StepSpec(model="lenet", batch=64)


@pytest.fixture
def tables(tmp_path):
    """A slow device and one that is four times as fast, as files."""
    for name, each in (("slow", 4.0), ("fast", 1.0)):
        points = (StepPoint(1, 1 + each, 200), StepPoint(64, 1 + 64 * each, 6500))
        save_step_table(tmp_path / f"{name}.json", StepTable(name, points), 3000)
    return tmp_path


def test_tables_of_steps_are_shared_out_by_their_times(tables):
    devices = [str(tables / "slow.json"), str(tables / "fast.json")]
    study = study_fleet(STEP, devices)
    assert study.plan.batch == 64
    slow, fast = study.plan.shares
    assert abs(slow.time_ms - fast.time_ms) <= 4.0
    assert fast.passes == 2  # 29 samples fit in 3,000 bytes
    assert study.plan.all_reduce_ms == 0
    assert study.link.startswith("not counted")
    assert study.bound_ms <= study.plan.step_ms <= study.equal.step_ms
    assert study.fastest_alone_ms == study.alone[1] < study.alone[0]


def test_estimates_pay_for_the_all_reduce_and_better_devices_do_more():
    study = study_fleet(STEP, ["k40c", "2xp100"], link=Link(bytes_per_s=1e9))
    names = [rank.name for rank in study.fleet.ranks]
    assert names == ["k40c", "p100 0", "p100 1"]
    parameters = STEP.graph().parameter_count
    expected = 4 * (0.02 + 4 * parameters / 3 / 1e6)
    assert study.plan.all_reduce_ms == pytest.approx(expected)
    assert study.plan.samples[1] == study.plan.samples[2] > study.plan.samples[0]
    assert study_fleet(STEP, ["p100"]).plan.all_reduce_ms == 0


def test_a_device_that_is_faster_alone_is_marked():
    def remark(link):
        study = study_fleet(STEP, ["k40c", "p100"], link=link)
        rows = {row[0]: row for row in fleet_tables(study)[1].rows}
        return rows["fastest device alone"][-1]

    assert remark(Link(all_reduce_ms=1e6)) == "beats any split"
    assert remark(Link(all_reduce_ms=0.0)) == ""


def test_a_device_by_itself_is_the_step_without_a_budget():
    study = study_fleet(STEP, ["p100"])
    assert study.plan.samples == (64,)
    assert study.fastest_alone_ms == study.plan.step_ms == study.equal.step_ms


def test_a_range_of_batches_takes_the_one_with_the_most_samples_a_second():
    step = StepSpec(model="lenet", batch=8)
    found = study_fleet(step, ["p100"], most=64)
    assert found.plan.batch == 64  # fixed costs are shared by more
    assert found.plan.samples_per_s > study_fleet(step, ["p100"]).plan.samples_per_s


def test_few_sizes_make_a_table_that_is_right_in_between():
    asked = []

    def measure(samples):
        asked.append(samples)
        return StepPoint(samples, max(5.0, 0.5 * samples))

    table = measured_table("d", 1, 256, measure)
    times = step_times(table, 256)
    assert max(abs(times[n] - max(5.0, 0.5 * n)) for n in range(1, 257)) < 1.0
    assert len(asked) == len(set(asked)) <= 12
    asked.clear()
    measured_table("d", 1, 256, lambda n: asked.append(n) or StepPoint(n, 2.0 + n))
    assert asked == [256, 1, 16]


def test_tables_go_to_files_and_back(tmp_path):
    table = StepTable("d", (StepPoint(1, 0.5), StepPoint(8, 2.25, 99)))
    save_step_table(tmp_path / "t.json", table, 1 << 30)
    assert load_step_table(tmp_path / "t.json") == (table, 1 << 30)
    assert read_step_table(format_step_table(table)) == (table, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "x"}, "not a step table"),
        ({"schema": 2}, "its schema is 2, and this version reads 1"),
        ({"steps": []}, "has no step"),
        ({"steps": [{"samples": 0, "time_ms": 1}]}, "samples must be at least 1"),
        ({"steps": [{"samples": 1, "time_ms": 0}]}, "time_ms must be above 0"),
        ({"steps": [{"samples": 1, "time_ms": "1"}]}, "not of type float"),
        ({"steps": [{"samples": 1}]}, "steps\\[0\\].time_ms: missing"),
        ({"memory_bytes": -1}, "-1 is below 0"),
        ({"more": 1}, "table.more: unknown"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, change, words):
    text = format_step_table(StepTable("d", (StepPoint(1, 1.0),)))
    file = tmp_path / "t.json"
    file.write_text(json.dumps(json.loads(text) | change))
    with pytest.raises(CacheError, match=words):
        load_step_table(file)


run = partial(commands.run, "fleet")


def test_the_command_prints_writes_json_and_draws(tables):
    devices = f"{tables / 'slow.json'},{tables / 'fast.json'}"
    report, result = tables / "r.html", tables / "r.json"
    done = run(
        *("lenet", "--batch", 64, "--devices", devices, "--all-reduce", 2.5),
        *("--report", report, "--json", result),
    )
    assert done.exit_code == 0, done.output
    assert "lenet, 64 samples on 2 devices" in done.output
    data = json.loads(result.read_text())
    assert data["all_reduce_ms"] == 2.5
    assert sum(rank["samples"] for rank in data["ranks"]) == 64
    assert data["speedup_over_equal"] > 1
    assert report.read_text().startswith("<!DOCTYPE html>")


def test_a_batch_that_fits_nowhere_is_an_answer(tables):
    (tables / "tiny.json").write_text(
        format_step_table(StepTable("tiny", (StepPoint(1, 1.0, 5000),)), 3000)
    )
    done = run("lenet", "--batch", 4, "--devices", tables / "tiny.json")
    assert done.exit_code == 4
    assert "at most 0 samples a step, not 4" in done.output
    with pytest.raises(PlanningError):
        study_fleet(STEP, [str(tables / "tiny.json")])


def test_the_picture_shows_who_waits(tables):
    devices = [str(tables / "slow.json"), str(tables / "fast.json")]
    study = study_fleet(STEP, devices, link=Link(all_reduce_ms=3.0))
    chart = ET.fromstring(waiting_chart(study))
    boxes = [box.get("class") for box in chart.iter("rect")]
    # Equal shares: the fast one waits; planned: at most one waits, and little.
    assert boxes.count("box heavy") == 4
    assert boxes.count("box copy-out") == 4
    widths = [
        float(box.get("width"))
        for box in chart.iter("rect")
        if box.get("class") == "box stall"
    ]
    assert widths[0] > 10 * sum(widths[1:])
    assert "slow" in fleet_report(study)
    (_, splits) = fleet_tables(study)
    assert splits.rows[0][0] == "planned"


def test_a_thousand_devices_are_few_rows():
    study = study_fleet(STEP, ["500xp100", "524xk80"])
    ranks, _ = fleet_tables(study)
    assert len(ranks.rows) < 6
    assert ranks.rows[0][0].startswith("p100 0 …")


def test_memory_is_kept_by_smaller_steps_or_by_a_plan():
    step = StepSpec(model="lenet", batch=256)
    free = study_fleet(step, ["p100", "k80"])
    need = max(rank.table.points[-1].nbytes for rank in free.fleet.ranks)
    tight = study_fleet(step, ["p100", "k80"], memory=need // 3)
    assert max(share.passes for share in tight.plan.shares) > 1
    assert tight.plan.step_ms > free.plan.step_ms
    planned = study_fleet(step, ["p100", "k80"], memory=need // 3, planned=True)
    assert free.plan.step_ms <= planned.plan.step_ms <= tight.plan.step_ms
    for rank in planned.fleet.ranks:
        assert rank.memory == need // 3
    with pytest.raises(PlanningError, match="fleet takes at most 0 samples"):
        study_fleet(step, ["p100"], memory=1000, planned=True)


def test_a_recording_is_of_the_device_that_it_is_called_as(tmp_path):
    file = tmp_path / "p100.json.gz"
    words = ("tune", "alexnet", "--backend", "null", "--batch", "8", "--cache", "none")
    words += ("--directions", "all", "--record", str(file))
    commands.done(*words)
    step = StepSpec(model="alexnet", batch=8)
    named, plain = (study_fleet(step, [text]) for text in (str(file), f"p100={file}"))
    assert named.plan == plain.plan
    assert named.plan.step_ms != study_fleet(step, ["p100"]).plan.step_ms
    assert "as recorded in" in named.sources["p100"]
    other = file.rename(tmp_path / "mine.json.gz")
    with pytest.raises(CacheError, match=r"mine\.json\.gz"):
        study_fleet(step, [str(other)])
