"""`mucudnn fleet` and what it computes: tables, recordings, estimates, the picture."""

import json
import xml.etree.ElementTree as ET
from functools import partial

import pytest

from mucudnn.errors import CacheError, PlanningError
from mucudnn.ir.fleet import StepPoint, StepTable
from mucudnn.passes.load_balancing import measured_table
from mucudnn.recording_format import format_step_table, read_step_table
from mucudnn.report.fleet import fleet_report, fleet_tables, waiting_chart
from mucudnn.runtime.store.recordings import load_step_table, save_step_table
from mucudnn.studies.fleet import Link, study_fleet
from mucudnn.studies.memory_results import StepSpec
from tests import commands
from tests.tables import step_times

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
