"""Our steps beside PyTorch's: a section a process, whatever ends it."""

import json
import math
import sys
import time

import pytest

from bench.gpu import sections, step_section, steps
from bench.gpu.job import Job
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


def test_without_such_a_device_it_is_left_out(tmp_path):
    report = steps.run(job(tmp_path, backend_name="null"))
    assert (report.complete, report.failures) == (True, ())
    assert "no device like null" in report.text


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


def test_a_loss_that_is_no_number_is_told():
    entry = {
        "state": "done",
        "errors": {},
        "rivals": {"ours": {"losses": {"ours": None}}},
    }
    assert steps._wrong(entry) == ["the loss of ours is no number"]


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


def test_without_time_none_is_begun(tmp_path):
    late = job(tmp_path, ends=time.monotonic())
    assert sections.asked(late, "some.json", {"a": dict}, worth_s=1.0) == {}


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
