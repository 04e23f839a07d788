"""Planned PyTorch steps as `bench/gpu.sh` asks about them, rehearsed on CPU tensors."""

import json
import math
import time

import pytest

from bench.gpu import pytorch, pytorch_steps, torch_guest
from bench.gpu.job import Job
from bench.gpu.sections import UnfinishedError

PLAIN = torch_guest.SECTIONS[:2]


def job(tmp_path, **options):
    defaults = {"out": tmp_path, "backend_name": "cpu", "ends": math.inf, "layers": 1}
    return Job(**{**defaults, **options})


def asked(tmp_path):
    return json.loads((tmp_path / "torch.json").read_text())


def test_without_such_a_device_it_is_left_out(tmp_path):
    report = torch_guest.run(job(tmp_path, backend_name="null"))
    assert report.complete
    assert not report.failures
    assert "no device like null" in report.text
    assert asked(tmp_path)["sections"] == {}


def entry(**changes):
    row = {
        "state": "done",
        "eager_repeats": True,
        "difference": 0.0,
        "eager_difference": 0.0,
        "peak_bytes": 100,
        "planned_bytes": 100,
    }
    return {**row, **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"difference": 1e-9}, "repeats itself bit for bit"),
        ({"difference": math.inf}, "differs from eager mode by inf"),
        ({"eager_repeats": False, "eager_difference": 1e-6, "difference": 5e-6}, None),
        ({"eager_repeats": False, "eager_difference": 1e-6, "difference": 1}, "by 1;"),
        ({"peak_bytes": 106}, "106 bytes in use, 100 planned"),
        ({"state": "failed", "error": "no kernel"}, "no kernel"),
    ],
)
def test_what_must_not_be_is_said(changes, said):
    found = torch_guest._wrong(entry(**changes))
    assert (said is None) == (found == [])
    assert said is None or said in found[0]


@pytest.mark.torch
def test_sections_are_asked_once_and_gone_on_with(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch_guest, "SECTIONS", PLAIN)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        begun = {"gpt train_step": {"state": "begun"}}
        (tmp_path / "torch.json").write_text(json.dumps({"sections": begun}))
        late = torch_guest.run(job(tmp_path, ends=time.monotonic()))
        assert not late.complete
        assert "the process ended during it" in late.failures[0]
        report = torch_guest.run(job(tmp_path))
        assert report.complete
        assert len(report.failures) == 1
        row = asked(tmp_path)["sections"]["gpt backend"]
        assert row["difference"] == 0
        assert 0 < row["peak_bytes"] <= row["planned_bytes"] + row["resident_bytes"]
        assert row["ms"] > 0 < row["eager_ms"]
        again = torch_guest.run(job(tmp_path))
        assert asked(tmp_path)["sections"]["gpt backend"] == row
        assert again.complete
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.slow
@pytest.mark.torch
def test_a_limited_step_is_eagers_in_fewer_bytes(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch_guest, "SECTIONS", (("gpt", "train_step", True),))
    before = torch.are_deterministic_algorithms_enabled()
    try:
        report = torch_guest.run(job(tmp_path))
    finally:
        torch.use_deterministic_algorithms(before)
    assert report.complete, report.text
    assert report.failures == ()
    row = asked(tmp_path)["sections"]["gpt train_step in half"]
    assert row["difference"] == 0
    assert row["planned_bytes"] + row["resident_bytes"] <= row["budget_bytes"]
    assert row["peak_bytes"] < row["eager_bytes"]


# -- the part that comes first


def asks(monkeypatch, answers):
    """Have sections of these names give these answers, or raise them."""
    monkeypatch.setattr(pytorch, "SECTIONS", dict.fromkeys(answers, ()))
    monkeypatch.setattr(pytorch, "missing", lambda name: None)

    def answer(job, name):
        if isinstance(answers[name], Exception):
            raise answers[name]
        return answers[name]

    monkeypatch.setattr(pytorch, "_answer", answer)


def test_the_first_part_says_what_is_wrong_and_goes_on(tmp_path, monkeypatch):
    fails = {"faces": {"wrong": ["backend: no"]}, "trace": RuntimeError("lost")}
    asks(monkeypatch, {**fails, "compiled": {"ms": {}}})
    report = pytorch.run(job(tmp_path))
    assert report.complete
    assert report.failures == ("faces: backend: no", "trace: RuntimeError: lost")
    found = json.loads((tmp_path / "pytorch.json").read_text())["sections"]
    assert [entry["state"] for entry in found.values()] == ["done", "failed", "done"]


def test_a_section_that_was_cut_off_is_asked_again(tmp_path, monkeypatch):
    asks(monkeypatch, {"trace": UnfinishedError()})
    assert not pytorch.run(job(tmp_path)).complete
    asks(monkeypatch, {"trace": {}})
    assert pytorch.run(job(tmp_path)).complete


@pytest.mark.torch
def test_a_section_runs_in_a_process_of_its_own(tmp_path):
    pytest.importorskip("torch")
    found = pytorch._answer(job(tmp_path, ends=time.monotonic() + 500), "trace")
    assert found["host_ms"] > 0
    assert found["launches"] == {"kernels": 0, "copies": 0}


def test_spans_that_overlap_count_once():
    spans = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]
    assert pytorch_steps._covered(spans) == 4.0
