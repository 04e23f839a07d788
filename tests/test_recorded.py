"""A recording answers as the machine would."""

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
from mucudnn.recording_format import format_recording
from mucudnn.runtime.tuning.timing import StoppingRule, measure

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


def test_it_lists_what_was_measured(recording):
    backend = get_backend(recording)
    assert backend.name == recording
    assert backend.device.fingerprint == "gpu"
    assert dict(backend.conv.algorithms(PROBLEM)) == {"GEMM": 0, "FFT": 4096}
    assert backend.conv.excluded(PROBLEM) == [("WINOGRAD", "illegal address")]
    assert backend.conv.algorithms(PROBLEM.with_batch(2)) == [("GEMM", 0)]


def test_each_machine_is_a_device(recording):
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
    assert conv.algorithms(elsewhere) == []
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


def test_a_layer_was_measured_at_some_sizes(recording):
    conv = get_backend(recording).conv
    assert conv.sizes(PROBLEM.with_batch(5)) == [2, 8]
    assert conv.sizes(PROBLEM.with_direction(Direction.BACKWARD_DATA)) == []


def test_only_a_recording_is_one(recording):
    backend = get_backend(recording)
    assert recording_of(backend) is backend.conv
    assert recording_of(get_backend("null")) is None
    assert recording_of(get_backend("cpu")) is None


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


def test_the_newer_row_counts():
    rows = [row("GEMM", 8, workspace=7, at=2.0), row("GEMM", 8, workspace=5, at=1.0)]
    conv = RecordedConv(VirtualDevice("gpu"), rows)
    assert conv.algorithms(PROBLEM) == [("GEMM", 7)]


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
