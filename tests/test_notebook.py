"""What notebooks show: one well-formed piece each, with the figures of its value."""

import math
import re
from xml.etree import ElementTree as ET

import pytest

from mucudnn.backends import get_backend
from mucudnn.ir.conv import AlgoPerf, ConvPlan, Direction
from mucudnn.passes.estimate import estimate
from mucudnn.passes.planning.plan_step import unbounded
from mucudnn.report.notebook import scoped
from mucudnn.report.page import styles
from mucudnn.report.text import bytes_text, ms_text
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.algorithms import survey_algorithms
from mucudnn.studies.convolutions import compare, in_directions
from mucudnn.studies.memory import study_memory
from mucudnn.studies.memory_results import StepSpec
from mucudnn.suites import Layer, load_suite, parse_problem
from tests.commands import run_code

PROBLEM = parse_problem("n=7,c=2,h=9,w=9,k=4,r=3,s=3")
SPEC = StepSpec(model="lenet", batch=64)


def conv_plan():
    steps = [AlgoPerf(algo="FFT", batch=3, time_ms=1.5, workspace=2048)] * 2
    steps.append(AlgoPerf(algo="<&>", batch=1, time_ms=1.0, workspace=512))
    return ConvPlan(PROBLEM, tuple(steps)).under(4096)


@pytest.fixture(scope="module")
def study():
    return study_memory(SPEC, policies=["planned"], budget="5500KiB", curve=True)


@pytest.fixture(scope="module")
def values(study):
    layers = in_directions(load_suite("alexnet")[:2], list(Direction))
    null = get_backend("null")
    odd = [Layer('<b>&"', PROBLEM), *layers]
    return {
        "conv_plan": conv_plan(),
        "step_plan": study.best.plan,
        "placed_step": study.placed,
        "memory_study": study,
        "comparison": compare(Tuner(backend=null), odd, [8 << 10, 64 << 10]),
        "survey": survey_algorithms(null, odd, "powers_of_two", [1 << 10, 64 << 20]),
    }


NAMES = ("conv_plan", "step_plan", "placed_step", "memory_study", "comparison")


@pytest.fixture(params=(*NAMES, "survey"))
def html(request, values):
    return values[request.param]._repr_html_()


def words(html):
    root = ET.fromstring(html)
    root.remove(root.find("style"))
    return " ".join(text.strip() for text in root.itertext() if text.strip())


def test_a_piece_is_well_formed_and_needs_nothing_else(html):
    root = ET.fromstring(html)
    assert (root.tag, root.get("class")) == ("div", "mucudnn")
    assert not re.search(r"https?:|<script|<link|@import|url\(|src=", html)


def test_nothing_in_a_piece_has_a_name_that_another_has(html):
    assert not [e for e in ET.fromstring(html).iter() if e.get("id") or e.get("href")]


def test_its_style_holds_for_the_piece_only(html):
    rules = re.sub(r"@media[^{]*", "", ET.fromstring(html).findtext("style"))
    selectors = re.findall(r"([^{};]+)\{[^{}]*[:;]", rules)
    assert len(selectors) > 50
    for selector in selectors:
        for one in selector.split(","):
            assert one.strip().startswith(".mucudnn"), one


def test_styles_keep_their_declarations_in_light_and_dark():
    sheet = styles("style.css", "memory.css")
    assert re.findall(r"\{([^{}]*)\}", scoped(sheet)) == re.findall(
        r"\{([^{}]*)\}", sheet
    )
    dark = scoped(sheet).split("prefers-color-scheme: dark) {")[1]
    assert dark.lstrip().startswith(".mucudnn {\n    --page:")


def test_a_plan_shows_its_micro_batches_to_scale():
    html = conv_plan()._repr_html_()
    bar = ET.fromstring(html).find("svg")
    boxes = [(float(r.get("x")), float(r.get("width")) + 1) for r in bar.iter("rect")]
    assert [width / boxes[2][1] for _, width in boxes] == pytest.approx([1.5, 1.5, 1])
    assert sum(width for _, width in boxes) == pytest.approx(712)
    assert [t.text for t in bar.iter("title")] == ["2 × FFT(3)", "<&>(1)"]
    shown = words(html)
    assert shown.startswith("2 × FFT(3) + <&>(1) forward, N = 7")
    assert "planned within 4 KiB of workspace" in shown
    assert "FFT 3 2 1.50 2 KiB <&> 1 1 1.00 512 B" in shown


def test_a_step_shows_its_peak_what_leaves_and_what_runs_again(study):
    plan = study.best.plan
    shown = words(plan._repr_html_())
    assert f"Peak memory {bytes_text(plan.peak_bytes)}" in shown
    assert f"Predicted slowdown {study.slowdown(study.best):.2f}×" in shown
    assert f"{ms_text(plan.prediction.step_ms)} ms a step" in shown
    assert f"Offloaded {bytes_text(plan.prediction.out_bytes)}" in shown
    assert f"Recomputed {plan.recomputed}" in shown
    assert plan.recomputed or plan.prediction.out_bytes
    assert "budget 5.4 MiB" in shown


def test_a_step_without_a_budget_is_not_slower_and_moves_nothing():
    graph = SPEC.graph()
    plan = unbounded(graph, estimate(graph, "h200"))
    assert math.isinf(plan.budget)
    shown = words(plan._repr_html_())
    assert "Predicted slowdown 1.00×" in shown
    assert "nothing is offloaded" in shown
    assert "nothing is recomputed" in shown
    assert "budget" not in shown.split("Peak memory")[0]


def test_a_placed_step_shows_its_arena(study):
    placed = study.placed
    shown = words(placed._repr_html_())
    assert f"With fixed offsets {bytes_text(placed.nbytes)}" in shown
    assert f"an arena of {bytes_text(placed.layout.nbytes)}" in shown


def test_a_study_shows_the_reports_pictures(study):
    root = ET.fromstring(study._repr_html_())
    headings = [h.text for h in root.iter("h2")]
    assert headings[1:4] == [
        "Memory over the step",
        "Tensors in memory",
        "Compute and copies",
    ]
    assert "Speed against budget" in headings
    assert "lenet, batch 64" in words(study._repr_html_())


def test_a_comparison_and_a_survey_show_every_layer(values):
    for name in ("comparison", "survey"):
        shown = words(values[name]._repr_html_())
        assert '<b>&"' in shown
        assert "conv1" in shown
        assert "conv2" in shown


def test_values_know_nothing_of_the_report():
    code = (
        "import sys, mucudnn.studies.memory, mucudnn.studies.algorithms;"
        "print([m for m in sys.modules if m.startswith('mucudnn.report')])"
    )
    assert run_code(code) == "[]\n"
