"""The demonstration: three acts, each with its sentence, and a page of all of them."""

import math
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

from mucudnn import PerfTable, Tuner
from mucudnn.ir.conv import AlgoPerf
from mucudnn.report.notebook import demo_page
from mucudnn.runtime.tuning.timing import Timing
from mucudnn.studies import demo as studies_demo
from mucudnn.studies.demo import LAYER, StepAct, slow_layer, small_step, telling_limit
from tests.commands import run

MIB = 1 << 20


def silent(text):
    assert text


def table(*rows):
    perfs = [
        AlgoPerf(algo=algo, batch=batch, time_ms=ms, workspace=size)
        for algo, batch, ms, size in rows
    ]
    return PerfTable(LAYER, tuple(perfs))


def test_the_limit_is_where_parts_gain_most():
    tuner = Tuner(backend="null")
    measured = table(
        *(("DIRECT", 16, 1000.0, 0), ("GEMM", 16, 100.0, 1 * MIB)),
        *(("FFT", 4, 10.0, 5 * MIB), ("FFT", 8, 19.0, 10 * MIB)),
        ("FFT", 16, 30.0, 20 * MIB),
    )
    assert telling_limit(tuner, measured) == 10 * MIB
    # Calls without workspace are beaten only where nothing else is.
    rows = [("DIRECT", 16, 1000.0, 0), ("FFT", 4, 10.0, 5 * MIB)]
    assert telling_limit(tuner, table(*rows)) == 5 * MIB


def test_a_layer_with_nothing_to_gain_says_so():
    tuner = Tuner(backend="null", batch_policy="undivided")
    act = slow_layer(tuner, silent)
    assert act.speedup == 1.0
    assert "it is not divided: " in act.sentence


@pytest.mark.slow
def test_acts_and_their_page(tmp_path):
    tuner = Tuner(cache=None, workspace_limit="8MiB", batch_policy="undivided")
    step = small_step(tuner, silent)
    assert step.same
    assert step.peak_bytes <= step.budget == step.whole_bytes // 3
    assert "bit-identical" in step.sentence
    layer = slow_layer(Tuner(backend="null"), silent)
    page = demo_page([layer, step], "a machine")
    text = "".join(ET.fromstring(page.removeprefix("<!DOCTYPE html>")).itertext())
    assert layer.sentence in text
    assert step.sentence in text


@pytest.mark.torch
def test_the_act_of_pytorch():
    pytest.importorskip("torch")
    from mucudnn.torch.demo import small_torch_step

    act = StepAct(**small_torch_step(silent))
    assert act.same
    assert act.peak_bytes <= act.budget < act.whole_bytes
    assert min(t.samples for t in (act.eager, act.without, act.within)) >= 8


def step_act(within, without, noise=0.0, copied=0):
    def plan(ms):
        prediction = SimpleNamespace(step_ms=ms, out_bytes=copied, in_bytes=copied)
        return SimpleNamespace(prediction=prediction)

    return StepAct(
        name="a network",
        whole=plan(100.0),
        plan=plan(110.0),
        budget=MIB,
        whole_bytes=3 * MIB,
        peak_bytes=MIB,
        without=Timing(without, noise, 9),
        within=Timing(within, noise, 9),
        same=True,
    )


def test_a_prediction_that_is_off_says_which_side_is():
    """One that is near needs no word, and noise is said to be noise."""
    act = step_act(115.0, 100.0)
    assert act.measured == pytest.approx(1.15)
    assert act.sentence.endswith("Losses are bit-identical.")
    act = step_act(150.0, 100.0, copied=MIB)
    assert act.sentence.endswith(
        "Prediction and time differ by 36%: within the budget 150 ms, predicted "
        "110 ms; without 100 ms, predicted 100 ms. "
        "The cores that compute also copied 2.0 MiB in each step."
    )
    assert "copied" not in step_act(80.0, 100.0, copied=MIB).sentence
    act = step_act(150.0, 100.0, noise=20.0)
    assert act.noise == pytest.approx(2 * 1.5 * math.hypot(20 / 150, 20 / 100))
    assert "by no more than single steps vary" in act.sentence


def test_an_interrupted_demonstration_keeps_its_acts(monkeypatch, tmp_path):
    layer = slow_layer(Tuner(backend="null"), silent)
    monkeypatch.setattr(studies_demo, "slow_layer", lambda tuner, say: layer)

    def interrupted(tuner, say):
        raise KeyboardInterrupt

    monkeypatch.setattr(studies_demo, "small_step", interrupted)
    page = tmp_path / "demo.html"
    done = run("demo", "--report", page)
    assert done.exit_code == 130
    assert "interrupted: 1 of 3 parts are finished" in done.stderr
    assert layer.sentence in done.stdout
    assert "A convolution within a workspace limit" in page.read_text(encoding="utf-8")
