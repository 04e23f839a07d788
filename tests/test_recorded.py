"""A recording answers as the machine would; fronts of a step out of recordings."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import device_count, get_backend
from mucudnn.backends.recorded import RecordedConv, recording_of
from mucudnn.backends.virtual import VirtualDevice
from mucudnn.errors import BackendError, BackendUnavailableError, UnsupportedError
from mucudnn.ir.conv import AlgoPerf, ConvProblem, Direction
from mucudnn.ir.measurement import Measurement, Recording, Verdict
from mucudnn.ir.numerics import TF32, Numerics
from mucudnn.passes.estimate import estimate
from mucudnn.passes.microbatch import pareto_plans
from mucudnn.recording_format import format_recording
from mucudnn.runtime.store.recordings import (
    RecordedFronts,
    read_fronts,
    record_run,
    write_recording,
)
from mucudnn.runtime.tuning.timing import StoppingRule, measure
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.memory_results import StepSpec
from mucudnn.studies.step_costs import Coverage, StepCosts
from tests.doubles import problem
from tests.examples import examples
from tests.shaky import shaky

PROBLEM = ConvProblem(
    direction=Direction.FORWARD, x_shape=(8, 3, 9, 9), w_shape=(4, 3, 3, 3)
)


def row(algo, batch, time_ms=1.0, *, fingerprint="gpu", at=0.0, **fields):
    return Measurement(
        fingerprint=fingerprint,
        problem=PROBLEM.with_batch(batch),
        perf=AlgoPerf(
            algo=algo,
            batch=batch,
            time_ms=math.inf if "error" in fields else time_ms,
            **{"workspace": 0, **fields},
        ),
        measured_at=at,
        version="0",
    )


@pytest.fixture(params=["r.json", "r.json.gz"])
def recording(tmp_path, request):
    rows = [
        row("GEMM", 8, 2.5),
        row("FFT", 8, 1.25, workspace=4096),
        row("WINOGRAD", 8, error="illegal address", workspace=9),
        row("GEMM", 2, 0.7),
        row("GEMM", 8, 9.0, fingerprint="other gpu"),
    ]
    file = tmp_path / request.param
    file.write_bytes(
        format_recording(Recording(measurements=rows), compress=file.suffix == ".gz")
    )
    return f"recorded:{file}"


def operands(backend, problem):
    device = backend.device
    return [device.view(device.allocate(s.nbytes), 0, s) for s in problem.operands()]


def run(backend, algo, workspace=0, problem=PROBLEM):
    scratch = backend.device.allocate(workspace)
    backend.conv.run(problem, algo, *operands(backend, problem), scratch)


def test_it_lists_what_was_measured_on_each_machine(recording):
    backend = get_backend(recording)
    assert recording_of(backend) is backend.conv
    assert recording_of(get_backend("null")) is recording_of(get_backend("cpu")) is None
    assert backend.name == recording
    assert backend.device.fingerprint == "gpu"
    assert dict(backend.conv.algorithms(PROBLEM)) == {"GEMM": 0, "FFT": 4096}
    assert backend.conv.excluded(PROBLEM) == [("WINOGRAD", "illegal address")]
    assert backend.conv.algorithms(PROBLEM.with_batch(2)) == [("GEMM", 0)]
    assert backend.conv.sizes(PROBLEM.with_batch(5)) == [2, 8]
    assert device_count(recording) == 2
    other = get_backend(recording, device=1)
    assert other.device.fingerprint == "other gpu"
    assert other.conv.algorithms(PROBLEM) == [("GEMM", 0)]
    with pytest.raises(ValueError, match="devices 0 to 1, not 2"):
        get_backend(recording, device=2)


def test_what_was_not_recorded_is_said(recording):
    conv = get_backend(recording).conv
    unknown = PROBLEM.with_batch(5)
    assert conv.algorithms(unknown) == []
    ((_, reason),) = conv.excluded(unknown)
    assert reason == "not recorded at micro-batch 5; recorded: 2, 8"
    with pytest.raises(UnsupportedError, match="not recorded at micro-batch 5"):
        run(get_backend(recording), "GEMM", problem=unknown)
    elsewhere = PROBLEM.with_direction(Direction.BACKWARD_DATA)
    assert conv.algorithms(elsewhere) == conv.sizes(elsewhere) == []
    ((_, reason),) = conv.excluded(elsewhere)
    assert "not recorded on gpu" in reason


def test_run_checks_what_a_library_checks(recording):
    backend = get_backend(recording)
    with pytest.raises(UnsupportedError, match="'DIRECT' was not recorded"):
        run(backend, "DIRECT")
    with pytest.raises(UnsupportedError, match="illegal address"):
        run(backend, "WINOGRAD", 9)
    with pytest.raises(BackendError, match="needs 4096 bytes"):
        run(backend, "FFT", 4095)
    assert backend.device.now_ms == 0
    run(backend, "FFT", 4096)
    assert backend.device.now_ms == 1.25


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8))
def test_measuring_finds_the_recorded_medians_exactly(times):
    device = VirtualDevice("gpu")
    rows = [row(f"A{i}", 8, time_ms) for i, time_ms in enumerate(times)]
    conv = RecordedConv(device, rows)
    for i, time_ms in enumerate(times):
        timing = measure(
            lambda name=f"A{i}": conv.run(PROBLEM, name, None, None, None, None),
            device,
            StoppingRule(),
        )
        assert timing.time_ms == time_ms
        assert timing.noise_ms == 0


def test_math_modes_are_algorithms_of_their_own():
    rows = [row("GEMM", 8, 2.0), row("GEMM", 8, 1.0, math_mode="tf32", noise_ms=0.5)]
    conv = RecordedConv(VirtualDevice("gpu"), rows)
    assert {name for name, _ in conv.algorithms(PROBLEM)} == {"GEMM", "GEMM[tf32]"}
    found = conv.row(PROBLEM, "GEMM[tf32]")
    assert found == replace(rows[1].perf, algo="GEMM[tf32]")


def test_devices_have_their_own_verdicts_and_alignments(tmp_path):
    file = tmp_path / "r.json"
    known = [
        Verdict(fingerprint=name, problem=PROBLEM, signature="a / b", ratio=ratio)
        for name, ratio in (("gpu", 0.5), ("gpu", 0.25), ("other gpu", 1.0))
    ]
    rows = [row("GEMM", 8, fingerprint=name) for name in ("gpu", "other gpu")]
    recording = Recording(
        measurements=rows, alignments={"other gpu": 16}, verdicts=known
    )
    data = format_recording(recording)
    file.write_bytes(data)
    for device, ratio, alignment in ((0, 0.25, 1), (1, 1.0, 16)):
        backend = get_backend(f"recorded:{file}", device)
        assert backend.conv.verdict(PROBLEM, "a / b") == ratio
        assert backend.conv.verdict(PROBLEM, "b / a") is None
        assert backend.conv.verdict(PROBLEM.with_batch(4), "a / b") is None
        assert backend.split_alignment == alignment


def test_bad_files_are_one_clear_line(tmp_path):
    garbage = tmp_path / "garbage.json"
    garbage.write_bytes(b"\x1f\x8b not gzip")
    wrong = tmp_path / "wrong.json"
    data = format_recording(Recording(measurements=[row("GEMM", 8)]))
    wrong.write_bytes(data.replace(b'"workspace": 0', b'"workspace": "none"'))
    empty = tmp_path / "empty.json"
    empty.write_bytes(format_recording(Recording()))
    for name, message in (
        ("recorded", "needs a file"),
        ("recorded:", "needs a file"),
        (f"recorded:{tmp_path / 'missing.json'}", "missing.json cannot be read: No"),
        (f"recorded:{tmp_path}", "cannot be read"),
        (f"recorded:{garbage}", "garbage.json is not a usable recording: damaged"),
        (f"recorded:{wrong}", r"rows\[0\].workspace: 'none'"),
        (f"recorded:{empty}", "no measurements"),
    ):
        with pytest.raises(BackendUnavailableError, match=message) as caught:
            get_backend(name)
        assert "\n" not in str(caught.value)


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


def test_files_of_one_device_are_one_and_the_newer_row_counts(tmp_path):
    ways = [problem(8, direction) for direction in Direction]
    files = [recorded(tmp_path / f"{i}.json", [one]) for i, one in enumerate(ways)]
    assert {*read_fronts(files, ways).fronts(ways)} == {*ways}
    assert {*read_fronts(files[:2], ways).fronts(ways)} == {*ways[:2]}
    files = [tmp_path / "new.json", tmp_path / "old.json"]
    for file, at, ms in zip(files, (2.0, 1.0), (5.0, 4.0), strict=True):
        write_recording(file, Recording(measurements=[row("GEMM", 8, ms, at=at)]))
    for order in (files, files[::-1]):
        fronts = read_fronts([*map(str, order)], [PROBLEM]).fronts([PROBLEM])
        assert [plan.time_ms for plan in fronts[PROBLEM]] == [5.0]


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


def test_what_is_measured_takes_no_recording_and_without_one_all_is_estimated():
    graph, convs = step()
    profile = estimate(graph, "null")
    costs = StepCosts(graph, "null")
    assert costs.profile == profile
    assert costs.coverage == Coverage(0, len(convs))
    assert "convolutions" not in costs.figures
    assert StepCosts(graph, "cpu", profile).coverage == Coverage(len(convs), 0)
    with pytest.raises(ValueError, match="the CPU is measured: recordings are for"):
        StepCosts(graph, "cpu", profile, ["r.json"])
    with pytest.raises(ValueError, match="pass a profile"):
        StepCosts(graph, "cpu")
