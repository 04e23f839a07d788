"""Fronts of a step's convolutions out of recordings, the rest out of estimates."""

import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import get_backend
from mucudnn.errors import BackendUnavailableError
from mucudnn.ir.conv import Direction
from mucudnn.ir.measurement import Recording
from mucudnn.ir.numerics import TF32, Numerics
from mucudnn.passes.estimate import estimate
from mucudnn.passes.microbatch import pareto_plans
from mucudnn.runtime.store.recordings import (
    RecordedFronts,
    read_fronts,
    record_run,
    write_recording,
)
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.memory_results import StepSpec
from mucudnn.studies.step_costs import Coverage, StepCosts
from tests.doubles import problem
from tests.examples import examples
from tests.shaky import shaky
from tests.test_recorded import row

NO_LIMIT = 1 << 62


def recorded(file, problems, seed=0, **options):
    """A recording of some convolutions; returns its name."""
    here = Tuner(backend=shaky(seed, alignment=8), **options)
    tables = [here.measure(one) for one in problems]
    record_run(file, here, problems, tables, since=0.0)
    return str(file)


@given(
    measured=st.sets(st.integers(1, 12), min_size=1, max_size=3),
    batch=st.integers(1, 14),
    seed=st.integers(0, 3),
)
@examples(25)
def test_a_front_is_that_of_a_tuner_that_replays_everything(
    tmp_path_factory, measured, batch, seed
):
    file = tmp_path_factory.mktemp("r") / "r.json"
    name = recorded(file, [problem(n) for n in measured], seed)
    there = Tuner(backend=f"recorded:{name}", batch_policy="all")
    expected = pareto_plans(there.measure(problem(batch)), NO_LIMIT)
    found = read_fronts([name], [problem(n) for n in measured])
    assert found.fronts([problem(batch)]).get(problem(batch), ()) == expected
    assert found.device == f"shaky {seed}"


def test_numerics_are_those_of_a_tuner(tmp_path):
    file = tmp_path / "r.json"
    rows = [
        row("GEMM", 8, 2.0),
        row("TENSOR", 8, 1.0, math_mode=TF32),
        row("NARROW", 8, 0.5, math_mode="down_convert"),
    ]
    write_recording(file, Recording(measurements=rows))
    one = rows[0].problem

    def fastest(numerics=None):
        conv = get_backend(f"recorded:{file}").conv
        fronts = RecordedFronts("gpu", conv, numerics=numerics).fronts([one])
        return fronts[one][-1].steps[0].algo

    assert fastest() == "TENSOR"
    assert fastest(Numerics(tf32=False)) == "GEMM"
    assert fastest(Numerics(down_convert=True)) == "NARROW"


def test_what_the_sizes_do_not_make_up_has_no_front(tmp_path):
    name = recorded(tmp_path / "r.json", [problem(8)], batch_policy="undivided")
    found = read_fronts([name], [problem(16)])
    fronts = found.fronts([problem(n) for n in (4, 8, 12, 16)])
    assert [one.batch for one in fronts] == [8, 16]
    assert {s.batch for plan in fronts[problem(16)] for s in plan.steps} == {8}


def test_files_of_one_device_are_one(tmp_path):
    ways = [problem(8, direction) for direction in Direction]
    files = [recorded(tmp_path / f"{i}.json", [one]) for i, one in enumerate(ways)]
    assert {*read_fronts(files, ways).fronts(ways)} == {*ways}
    assert {*read_fronts(files[:2], ways).fronts(ways)} == {*ways[:2]}


def test_the_newer_of_two_files_counts(tmp_path):
    files = [tmp_path / "new.json", tmp_path / "old.json"]
    for file, at, ms in zip(files, (2.0, 1.0), (5.0, 4.0), strict=True):
        write_recording(file, Recording(measurements=[row("GEMM", 8, ms, at=at)]))
    one = row("GEMM", 8).problem
    for order in (files, files[::-1]):
        (plan,) = read_fronts([*map(str, order)], [one]).fronts([one])[one]
        assert plan.time_ms == 5.0


def test_two_devices_do_not_add_up_to_a_step(tmp_path):
    ways = [problem(8, direction) for direction in Direction]
    files = [recorded(tmp_path / f"{i}.json", [ways[i]], seed=i) for i in range(2)]
    with pytest.raises(ValueError, match="measured on 'shaky 0' and 'shaky 1', but"):
        read_fronts(files, ways)
    assert read_fronts(files, ways[1:]).device == "shaky 1"


def test_a_recording_of_other_things_is_refused(tmp_path):
    name = recorded(tmp_path / "r.json", [problem(8)])
    with pytest.raises(ValueError, match="none of this step's 1 different conv"):
        read_fronts([name], [problem(8, dilation=2)])
    empty = tmp_path / "empty.json"
    write_recording(empty, Recording())
    with pytest.raises(ValueError, match=r"empty.json: none of .* its 0 measured"):
        read_fronts([str(empty)], [problem(8)])
    with pytest.raises(BackendUnavailableError, match="gone"):
        read_fronts([str(tmp_path / "gone.json")], [problem(8)])


def step(batch=8):
    graph = StepSpec(model="lenet", batch=batch, device="null").graph()
    return graph, [node for node in graph.nodes if node.op == "conv"]


def test_what_is_recorded_is_not_estimated_and_all_else_is(tmp_path):
    graph, convs = step()
    known = [node.attrs["problem"] for node in convs[::2]]
    name = recorded(tmp_path / "r.json", known)
    costs = StepCosts(graph, "null", recordings=[name])
    fronts, estimated = (
        read_fronts([name], known).fronts(known),
        estimate(graph, "null"),
    )
    for node in graph.nodes:
        one = node.attrs.get("problem")
        if one in fronts:
            assert costs.profile.fronts[node.name] == fronts[one]
            least = min(plan.time_ms for plan in fronts[one])
            assert costs.profile.node_ms[node.name] == least
            continue
        assert costs.profile.node_ms[node.name] == estimated.node_ms[node.name]
        if one is not None:
            assert costs.profile.fronts[node.name] == estimated.fronts[node.name]
    among = sum(node.attrs["problem"] in fronts for node in convs)
    assert 0 < among < len(convs)
    assert costs.coverage == Coverage(among, len(convs) - among, "shaky 0")
    share = f"{among} of {len(convs)} measured on shaky 0"
    assert costs.figures["convolutions"].startswith(share)


def test_another_batch_is_made_up_of_the_same_measurements(tmp_path):
    graph, convs = step()
    name = recorded(tmp_path / "r.json", [node.attrs["problem"] for node in convs])
    costs = StepCosts(graph, "null", recordings=[name])
    larger, larger_convs = step(20)
    profile = costs.at_another_batch(larger)
    algorithms = {
        part.algo
        for node in larger_convs
        for plan in profile.fronts[node.name]
        for part in plan.steps
    }
    assert "DIRECT" in algorithms
    assert "IMPLICIT_GEMM" not in algorithms


def test_without_a_recording_all_is_estimated():
    graph, convs = step()
    costs = StepCosts(graph, "null")
    assert costs.profile == estimate(graph, "null")
    assert costs.coverage == Coverage(0, len(convs))
    assert "convolutions" not in costs.figures


def test_what_is_measured_takes_no_recording(tmp_path):
    graph, convs = step()
    profile = estimate(graph, "null")
    assert StepCosts(graph, "cpu", profile).coverage == Coverage(len(convs), 0)
    with pytest.raises(ValueError, match="the CPU is measured: recordings are for"):
        StepCosts(graph, "cpu", profile, ["r.json"])
    with pytest.raises(ValueError, match="pass a profile"):
        StepCosts(graph, "cpu")
