"""Our steps and PyTorch's as `bench/gpu.sh` asks about them, a section a process."""

import json
import math
import sys
import time

import pytest

from bench.gpu import pytorch, pytorch_steps, sections, step_section, steps, torch_guest
from bench.gpu.job import Job
from bench.gpu.sections import UnfinishedError
from bench.gpu.step_section import Case, Section, TorchStep
from mucudnn.runtime.tuning.timing import StoppingRule

PUT = """
import os, time

def put():
    with open(FILE + ".part", "w") as file:
        file.write(FOUND)
    os.rename(FILE + ".part", FILE)
"""
FOUND = {"rivals": {"ours": {"ms": 2.0, "losses": {"ours": 1.0}}}, "errors": {}}


def job(tmp_path, **options):
    defaults = {"out": tmp_path, "backend_name": "cpu", "ends": math.inf}
    return Job(**{**defaults, **options})


def result(tmp_path, name="steps.json"):
    return json.loads((tmp_path / name).read_text())["sections"]


@pytest.mark.parametrize(("part", "file"), [(steps, ""), (torch_guest, "torch.json")])
def test_without_such_a_device_it_is_left_out(part, file, tmp_path):
    report = part.run(job(tmp_path, backend_name="null"))
    assert (report.complete, report.failures) == (True, ())
    assert "no device like null" in report.text
    assert not file or result(tmp_path, file) == {}


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Sections whose processes run a text each, which puts FOUND into FILE."""

    def run(*texts, is_late=lambda ends: False):
        chosen = steps.SECTIONS[: len(texts)]
        monkeypatch.setattr(steps, "SECTIONS", chosen)
        monkeypatch.setattr(steps, "_is_late", is_late)
        monkeypatch.setattr(steps, "missing", lambda backend: None)
        todo = iter(texts)

        def command(job, case, file, seconds, *, compiled):
            values = f"FILE, FOUND = {str(file)!r}, {json.dumps(FOUND)!r}"
            return [sys.executable, "-c", f"{values}\n{PUT}\n{next(todo)}"]

        monkeypatch.setattr(steps, "_command", command)
        report = steps.run(job(tmp_path))
        return report, list(result(tmp_path).values())

    return run


def test_what_a_process_found_before_it_crashed_is_kept(scripted):
    write = "put()"
    report, (crashed, silent, whole) = scripted(
        f"{write}; os.abort()", "os._exit(3)", write
    )
    assert report.complete
    assert crashed["rivals"]["ours"]["ms"] == 2
    assert crashed["errors"]["the process"] == "it ended with -6"
    assert (silent["state"], silent["error"]) == (
        "failed",
        "BackendError: it ended with 3",
    )
    assert (whole["state"], whole["errors"]) == ("done", {})
    assert len(report.failures) == 2
    assert "resnet50 float32 NCHW compiled" in report.text


def test_one_that_never_ends_is_ended_and_the_next_one_asked(scripted, tmp_path):
    """Late is the first at once, the second when it has written, the third never."""
    write = "put()"
    texts = ["time.sleep(600)", f"{write}; time.sleep(600)", write]

    def is_late(ends):
        written = (tmp_path / "steps-section.json").exists()
        asked = len(result(tmp_path))
        return asked == 1 or (asked == 2 and written)

    report, (hung, late, whole) = scripted(*texts, is_late=is_late)
    assert not report.complete  # it may end another time: what it measured is kept
    assert hung == {"state": "cut off", "times": 1}
    assert late["errors"]["the process"].startswith("it took ")
    assert whole["state"] == "done"


def test_what_was_cut_off_is_asked_once_more(tmp_path):
    def cut_off():
        raise KeyboardInterrupt

    def ask(first):
        asks = {"a": first, "b": lambda: {"answer": 1}}
        return sections.asked(job(tmp_path), "some.json", asks, worth_s=1.0)

    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            ask(cut_off)
        entry = result(tmp_path, "some.json")["a"]
        assert entry == {"state": "cut off", "times": times}
    found = ask(cut_off)
    assert found["a"]["error"] == "it was cut off 2 times"
    assert found["b"]["answer"] == 1
    assert sections.all_answered(found, "ab")
    assert not sections.all_answered(found, "abc")
    late = job(tmp_path, ends=time.monotonic())  # without time none is begun
    assert sections.asked(late, "other.json", {"a": dict}, worth_s=1.0) == {}


@pytest.mark.slow
@pytest.mark.torch
def test_a_section_times_ours_beside_pytorch(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    once = StoppingRule(min_samples=1, max_samples=1)
    for rule in ("RULE", "_RULE"):
        monkeypatch.setattr(step_section, rule, once)
    case = Case("resnet18", 2, 32, "float32", "NCHW")
    soon = job(tmp_path, ends=time.monotonic())
    found = Section(soon, case, tmp_path / "section.json").run(compiled=False)
    assert found["errors"] == {}
    assert [*found["rivals"]] == ["ours", "ours_graph"]
    for name, row in found["rivals"].items():
        assert row["ms"] > 0 < row["eager_ms"]
        assert {*row["losses"]} == {name, "torch_eager"}
        assert all(map(math.isfinite, row["losses"].values()))
    assert json.loads((tmp_path / "section.json").read_text()) == found


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_what_cannot_be_computed_here_is_told_and_pytorchs_step_runs(
    precision, tmp_path
):
    pytest.importorskip("torch")
    case = Case("resnet18", 2, 32, precision, "NHWC")
    soon = job(tmp_path, ends=time.monotonic())
    found = Section(soon, case, tmp_path / "section.json").run(compiled=False)
    assert found["rivals"] == {}
    assert "no algorithm is usable" in found["errors"]["ours"]
    step = TorchStep(case, "cpu", compiled=False)
    assert all(math.isfinite(float(step())) for _ in range(2))


PLAIN = torch_guest.SECTIONS[:2]


def small(tmp_path, **options):
    return job(tmp_path, layers=1, **options)


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
    lost = {"rivals": {"ours": {"losses": {"ours": None}}}, "errors": {}}
    assert steps._wrong(entry(**lost)) == ["the loss of ours is no number"]
    spans = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]  # those that overlap count once
    assert pytorch_steps._covered(spans) == 4.0


@pytest.mark.torch
def test_sections_are_asked_once_and_gone_on_with(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch_guest, "SECTIONS", PLAIN)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        begun = {"gpt train_step": {"state": "begun"}}
        (tmp_path / "torch.json").write_text(json.dumps({"sections": begun}))
        late = torch_guest.run(small(tmp_path, ends=time.monotonic()))
        assert not late.complete
        assert "the process ended during it" in late.failures[0]
        report = torch_guest.run(small(tmp_path))
        assert report.complete
        assert len(report.failures) == 1
        row = result(tmp_path, "torch.json")["gpt backend"]
        assert row["difference"] == 0
        assert 0 < row["peak_bytes"] <= row["planned_bytes"] + row["resident_bytes"]
        assert row["ms"] > 0 < row["eager_ms"]
        again = torch_guest.run(small(tmp_path))
        assert result(tmp_path, "torch.json")["gpt backend"] == row
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
        report = torch_guest.run(small(tmp_path))
    finally:
        torch.use_deterministic_algorithms(before)
    assert report.complete, report.text
    assert report.failures == ()
    row = result(tmp_path, "torch.json")["gpt train_step in half"]
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
    report = pytorch.run(small(tmp_path))
    assert report.complete
    assert report.failures == ("faces: backend: no", "trace: RuntimeError: lost")
    found = result(tmp_path, "pytorch.json")
    assert [entry["state"] for entry in found.values()] == ["done", "failed", "done"]


def test_a_section_that_was_cut_off_is_asked_again(tmp_path, monkeypatch):
    asks(monkeypatch, {"trace": UnfinishedError()})
    assert not pytorch.run(small(tmp_path)).complete
    asks(monkeypatch, {"trace": {}})
    assert pytorch.run(small(tmp_path)).complete


@pytest.mark.torch
def test_a_section_runs_in_a_process_of_its_own(tmp_path):
    pytest.importorskip("torch")
    found = pytorch._answer(small(tmp_path, ends=time.monotonic() + 500), "trace")
    assert found["host_ms"] > 0
    assert found["launches"] == {"kernels": 0, "copies": 0}
