"""Reports and pieces of notebooks: every number that goes in comes out."""

import io
import math
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import get_backend
from mucudnn.ir.conv import AlgoPerf, ConvPlan, Direction
from mucudnn.passes.estimate import estimate
from mucudnn.passes.microbatch import pareto_plans
from mucudnn.passes.planning.plan_step import unbounded
from mucudnn.report.comparison import curve, drawn_front, html_report, timeline
from mucudnn.report.notebook import scoped
from mucudnn.report.page import styles
from mucudnn.report.svg import Frame, Label, byte_scale, labels, tag, time_scale
from mucudnn.report.text import (
    Table,
    bytes_text,
    check_deepbench,
    comparison_tables,
    deepbench_tables,
    ms_text,
    plan_text,
    problem_text,
    write_tables,
)
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.algorithms import survey_algorithms
from mucudnn.studies.convolutions import LayerResult, compare, in_directions
from mucudnn.studies.memory import study_memory
from mucudnn.studies.memory_results import StepSpec
from mucudnn.suites import Layer, load_suite, parse_problem
from tests.commands import Terminal, run_code
from tests.examples import examples
from tests.tables import perf_tables

KIB = 1 << 10


@pytest.fixture(scope="module")
def comparison():
    layers = in_directions(load_suite("alexnet"), list(Direction))
    tuner = Tuner(backend=get_backend("null"))
    return compare(tuner, layers, [8 * KIB, 64 * KIB], total_workspace=100 * KIB)


@pytest.fixture(scope="module")
def page(comparison):
    text = html_report(comparison, "alexnet <&> friends")
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>"))


def texts(element):
    return [t.strip() for t in element.itertext() if t.strip()]


def test_html_escapes_its_title_and_needs_nothing_from_elsewhere(page, comparison):
    assert "alexnet <&> friends" in page.findtext(".//h1")
    text = html_report(comparison, "x")
    assert not re.search(r"https?:|<script[^>]*src|<link|@import|url\(|src=", text)


def test_html_has_every_layer_direction_and_limit(page, comparison):
    sections = page.findall(".//details[@class='layer']")
    assert [s.find(".//h2").text for s in sections] == [f"conv{i}" for i in range(1, 6)]
    for section in sections:
        headings = [h.text for h in section.iter("h3")]
        assert headings == ["Forward", "Backward data", "Backward filter"]
        assert len(section.findall(".//figure")) == 6
    cards = page.findall(".//div[@class='card']")
    assert len(cards) == len(comparison.limits) == 3


def test_html_links_lead_somewhere(page):
    ids = [e.get("id") for e in page.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    links = {a.get("href").removeprefix("#") for a in page.iter("a")}
    assert links
    assert links <= set(ids)


def test_html_says_what_its_pictures_show(page):
    for svg in page.iter("svg"):
        assert svg.get("role") == "img"
        assert svg.get("aria-label") is not None
    styles = page.findtext(".//style")
    assert "prefers-color-scheme: dark" in styles


def test_html_speedups_are_the_measured_ones(page, comparison):
    (table,) = page.findall(".//section[@class='map']//table")
    cells = [td.text for row in table.find("tbody") for td in row.findall("td")]
    expected = [f"{o.speedup:.2f}×" for x in comparison.layers for o in x.outcomes]
    assert cells == expected


def test_curve_points_are_where_the_axes_say(comparison):
    layer = comparison.layers[0]
    svg = ET.fromstring(curve(layer, {"SLOW": 0, "FAST": 1}))
    ticks = [t for t in svg.iter("text") if t.get("class") == "tick end"]
    values = [float(t.text) for t in ticks]
    heights = [float(t.get("y")) - 3.5 for t in ticks]
    slope = (heights[-1] - heights[0]) / (values[-1] - values[0])
    knees = list(svg.iter("circle"))
    assert len(knees) == len(layer.front)
    for knee, plan in zip(knees, layer.front, strict=True):
        expected = heights[0] + slope * (plan.time_ms - values[0])
        assert float(knee.get("cy")) == pytest.approx(expected, abs=0.1)
    across = [float(knee.get("cx")) for knee in knees]
    assert across == sorted(across)
    lines = [x for x in svg.iter("line") if x.get("class") == "limit"]
    assert len(lines) == 2


def test_timeline_bars_are_as_long_as_the_times(comparison):
    layer = comparison.layers[0]
    svg = ET.fromstring(timeline(layer, {"SLOW": 0, "FAST": 1}))
    rows = svg.findall("g")
    per_ms = set()
    for row, outcome in zip(rows, layer.outcomes, strict=True):
        tops = {}
        for box in row.iter("rect"):
            end = float(box.get("x")) + float(box.get("width"))
            y = box.get("y")
            tops[y] = max(tops.get(y, 0.0), end)
        lengths = [tops[y] - 56 + 1 for y in sorted(tops, key=float)]
        times = [outcome.choice.undivided_ms, outcome.choice.planned_ms]
        per_ms |= {
            round(length / ms, 1) for length, ms in zip(lengths, times, strict=True)
        }
    assert max(per_ms) - min(per_ms) <= 0.11


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9))
def test_time_scale_keeps_order_and_range(values):
    scale = time_scale(values, 200.0, 20.0)
    assert scale.ticks
    for value in values:
        assert 19.9 <= scale(value) <= 200.1
    for low, high in zip(sorted(values), sorted(values)[1:], strict=False):
        assert scale(low) >= scale(high)
    assert all(19.9 <= scale(tick) <= 200.1 for tick in scale.ticks)


@given(st.lists(st.integers(0, 2**45), max_size=9))
def test_byte_scale_keeps_order_and_range(values):
    scale = byte_scale(values, 40.0, 350.0)
    places = [scale(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(39.9 <= place <= 350.1 for place in places)
    assert len(scale.ticks) <= 7


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc"])))
def test_markup_round_trips_any_text(text):
    element = ET.fromstring(tag("p", text, title=text))
    assert (element.text or "") == text
    assert element.get("title") == text


def test_plain_text_is_aligned_and_whole(comparison):
    stream = io.StringIO()
    write_tables(comparison_tables(comparison), stream)
    head, *rows = stream.getvalue().splitlines()[:46]
    assert "\x1b" not in stream.getvalue()
    assert not set("│┃━─┏") & set(stream.getvalue())
    start = head.index("plan", head.index("planned ms") + 4)
    outcomes = [o for layer in comparison.layers for o in layer.outcomes]
    for row, outcome in zip(rows, outcomes, strict=False):
        assert row[start:] == plan_text(outcome.choice.plan)
        assert row[start - 1] == " "


def test_a_terminal_gets_a_drawing(comparison, monkeypatch):
    monkeypatch.setenv("COLUMNS", "78")
    stream = Terminal()
    write_tables(comparison_tables(comparison), stream)
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert drawn != stream.getvalue()
    assert "conv5" in drawn
    assert "2.4" in drawn
    assert "…" not in drawn
    assert max(map(len, drawn.splitlines())) <= 78


def test_deepbench_has_its_columns_in_microseconds(comparison):
    tables = deepbench_tables(comparison)
    assert len(tables) == 3
    columns = [column.removeprefix(">") for column in tables[0].columns]
    assert columns == [
        *("w", "h", "c", "n", "k", "f_w", "f_h", "pad_w", "pad_h"),
        *("stride_w", "stride_h", "precision", "fwd_time"),
        *("bwd_inputs_time", "bwd_params_time", "total_time"),
    ]
    first = dict(zip(columns, tables[0].rows[0], strict=True))
    assert (first["w"], first["c"], first["n"], first["k"]) == ("224", "3", "256", "64")
    assert first["precision"] == "float"
    times = [x.outcomes[0].choice.planned_ms for x in comparison.layers[:3]]
    assert int(first["fwd_time"]) == round(times[0] * 1e3)
    assert int(first["total_time"]) == round(sum(times) * 1e3)


def test_deepbench_writes_width_before_height():
    problem = parse_problem("n=1,c=2,h=8,w=9,k=3,r=1,s=2,pad_h=3,pad_w=4,stride_h=5")
    tuner = Tuner(backend=get_backend("null"))
    result = compare(tuner, [Layer("a", problem)], [0])
    row = deepbench_tables(result)[0].rows[0]
    assert row[:11] == ("9", "8", "2", "1", "3", "2", "1", "4", "3", "1", "5")
    assert row[13:15] == ("-", "-")


@pytest.mark.parametrize(
    "text",
    [
        "n=1,c=2,w=9,k=4,s=3",
        "n=1,c=2,h=9,w=9,k=4,r=3,s=3,groups=2",
        "n=1,c=2,h=9,w=9,k=4,r=3,s=3,dilation=2",
    ],
)
def test_deepbench_refuses_what_it_has_no_column_for(text):
    with pytest.raises(ValueError, match="columns for ungrouped, undilated 2-D"):
        check_deepbench([parse_problem(text)])


def test_problems_mention_what_is_out_of_the_ordinary():
    plain = problem_text(parse_problem("n=7,c=2,w=9,k=4,s=3"))
    assert plain == "N = 7, 2×9 → 4, 3 filters, float32, NCHW"
    odd = problem_text(parse_problem("n=7,c=2,h=9,w=9,k=4,r=3,s=3,pad_h=1,groups=2"))
    assert "padding 1×0" in odd
    assert "2 groups" in odd


@given(st.floats(1e-6, 1e9))
def test_times_keep_three_digits(time_ms):
    shown = float(ms_text(time_ms).replace(",", ""))
    assert shown == pytest.approx(time_ms, rel=0.006 if time_ms >= 1e-3 else 0.51)


def cut_down(comparison, keep, reason):
    """The comparison with a choice in the first `keep` layers only."""
    none = replace(comparison.layers[0].outcomes[0], choice=None, reason=reason)
    layers = [
        layer
        if i < keep
        else replace(
            layer, outcomes=tuple(replace(none, limit=o.limit) for o in layer.outcomes)
        )
        for i, layer in enumerate(comparison.layers)
    ]
    return replace(comparison, layers=tuple(layers))


def cards(comparison):
    text = html_report(comparison, "x").removeprefix("<!DOCTYPE html>")
    return [texts(e) for e in ET.fromstring(text).iter() if e.get("class") == "card"]


@pytest.mark.parametrize("keep", [0, 1, 14])
@pytest.mark.parametrize("how", ["time limit", "interrupted"])
def test_no_mean_stands_for_layers_that_there_was_no_time_for(comparison, keep, how):
    if how == "interrupted":
        short = replace(comparison, layers=comparison.layers[:keep])
    else:
        short = cut_down(comparison, keep, "not compared: the time limit was reached")
    said = f"{keep} of 15 layers compared"
    why = f"{15 - keep} not measured: {how}"
    for card in cards(short):
        assert card[1:] == [said, why]
    _, summary = comparison_tables(short)
    assert {row[2:5] for row in summary.rows} == {("–", "–", "–")}
    assert len(summary.notes) == len(short.limits)
    assert all(note.endswith(f": {said}; {why}") for note in summary.notes)
    missing = short.to_json()["summary"][0]["missing"]
    assert missing == {how: 15 - keep}


def test_many_rows_without_results_are_one_line(comparison):
    short = cut_down(comparison, 3, "not compared: the time limit was reached")
    layers, _ = comparison_tables(short)
    assert len(layers.rows) == 15 * len(short.limits)
    stream = io.StringIO()
    write_tables([layers], stream)
    _, *lines = stream.getvalue().splitlines()
    missing = 12 * len(short.limits)
    assert f"{missing} rows without results are not listed: " in lines[-2]
    assert f"time limit ({missing})" in lines[-2]
    assert lines[-1].endswith("6 more")
    assert len(lines) == 3 * len(short.limits) + 2
    unmeasured = [replace(layer, front=()) for layer in short.layers[3:]]
    page = html_report(replace(short, layers=(*short.layers[:3], *unmeasured)), "x")
    assert "4 layers without results are not listed: time limit (4)" in page
    assert page.count('<details class="layer"') == 1
    table = Table("", ("layer", ">ms"), (("a", "1"), ("b", "–")), empty={1: "no time"})
    write_tables([table], stream := io.StringIO())
    assert stream.getvalue() == "layer  ms\na       1\nb       –\n"


def test_a_mean_stands_where_no_time_would_help(comparison):
    short = cut_down(comparison, 13, "nothing fits; the smallest needs 3 MiB")
    counted = "13 of 15 layers compared; 2 without a speed-up: nothing fits"
    for card in cards(short):
        assert any("geometric mean" in text for text in card)
        assert any(text.endswith(counted) for text in card)
    assert all(note.endswith(counted) for note in comparison_tables(short)[1].notes)
    short = cut_down(comparison, 3, "not compared: the time limit was reached")
    for card in cards(replace(short, layers=short.layers[:10])):
        assert card[2] == "12 not measured: time limit (7), interrupted (5)"
    whole = replace(comparison, limits=comparison.limits[1:2])
    layers = tuple(replace(x, outcomes=x.outcomes[1:2]) for x in whole.layers)
    whole = replace(whole, layers=layers)
    assert [entry.missing for entry in whole.summary] == [()]
    assert comparison_tables(whole)[1].notes == ()
    assert cards(whole)[0][-1].endswith("15 of 15 layers compared")


@pytest.mark.parametrize(
    ("width", "left_out"), [(100, []), (46, ["bound ms"]), (40, ["bound ms", "peak"])]
)
def test_a_narrow_terminal_leaves_out_columns_and_cuts_no_cell(
    monkeypatch, width, left_out
):
    monkeypatch.setenv("COLUMNS", str(width))
    cells = ("superneurons_memory", "556.7 MiB", "1234.5", "1.2 GiB short")
    columns = ("policy", ">peak", ">bound ms", "remark")
    terminal = Terminal()
    write_tables([Table("", columns, (cells,), spare=("bound ms", "peak"))], terminal)
    gone = {"peak": "556.7 MiB", "bound ms": "1234.5"}
    for cell in cells:
        kept = cell not in {gone[name] for name in left_out}
        assert (cell in terminal.getvalue()) == kept
    words = f"left out: {', '.join(left_out)};"
    assert (words in terminal.getvalue()) == bool(left_out)


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_cuts_no_cell_of_a_comparison(monkeypatch, comparison, width):
    monkeypatch.setenv("COLUMNS", str(width))
    layers, summary = comparison_tables(comparison)
    plan = (*("n=8,c=16,h=14,w=14,k=16,r=3", "backward data", "64 MiB", "0.185"),)
    plan += ("0.185", "1.00×", "720 KiB", "IMPLICIT_PRECOMP_GEMM(8)")
    write_tables([replace(layers, rows=(plan,), empty={})], terminal := Terminal())
    for words in ("IMPLICIT_PRE", "COMP_GEMM(8)", "1.00×"):
        assert words in terminal.getvalue()
    assert ("left out: workspace" in terminal.getvalue()) == (width == 40)
    write_tables([summary], terminal := Terminal())
    for row in summary.rows:
        assert row[1] in terminal.getvalue()


# The curve of the best division never rises with more workspace.


def result(table):
    return LayerResult(
        name="conv",
        count=1,
        problem=table.problem,
        table=table,
        front=pareto_plans(table, 1 << 30),
        outcomes=(),
    )


def heights(markup):
    """The heights that the curve goes through, from little workspace to much."""
    found = re.search(r'class="front" d="([^"]*)"', str(markup))
    if found is None:
        return []
    path = found[1]
    start = re.match(r"M[\d.]+ ([\d.]+)", path)[1]
    return [float(start), *map(float, re.findall(r"V([\d.]+)", path))]


def check(table):
    layer = result(table)
    colours = {row.algo: i for i, row in enumerate(table.perfs)}
    drawn = drawn_front(layer.front)
    assert all(a.workspace < b.workspace for a, b in pairwise(drawn))
    assert all(a.time_ms > b.time_ms for a, b in pairwise(drawn))
    for plan in layer.front:  # nothing faster is left out
        assert any(
            p.workspace <= plan.workspace and p.time_ms <= plan.time_ms for p in drawn
        )
    ys = heights(curve(layer, colours))
    assert len(ys) == len(drawn)
    assert all(b >= a for a, b in pairwise(ys))  # downwards on the page


@given(perf_tables(max_batch=6, noisy=True, integers=False))
@examples(100)
def test_the_curve_falls_whatever_the_noise(table):
    check(table)


# Names beside marks: none is lost, none covers another, all are within the frame.


FRAME = Frame(left=0.0, right=400.0, top=10.0, bottom=200.0)
POINTS = st.tuples(st.floats(20, 380), st.floats(20, 190), st.sampled_from("abcdef"))


@given(st.lists(POINTS, max_size=6))
def test_names_are_apart(points):
    wanted = [Label(x, y, name * 5) for x, y, name in points]
    drawn = [ET.fromstring(one) for one in labels(wanted, FRAME)]
    assert sorted(one.text for one in drawn) == sorted(one.text for one in wanted)
    heights = [float(one.get("y")) for one in drawn]
    assert all(FRAME.top <= y <= FRAME.bottom for y in heights)
    spans = [_span(one) for one in drawn]
    for i, (left, right) in enumerate(spans):
        assert FRAME.left - 0.1 <= left
        assert right <= FRAME.right + 0.1
        for j in range(i):
            apart = abs(heights[i] - heights[j]) >= 10.9
            assert apart or spans[j][1] <= left + 0.1 or right <= spans[j][0] + 0.1


def _span(one):
    x, width = float(one.get("x")), len(one.text) * 5.6
    return (x - width, x) if one.get("class").endswith("end") else (x, x + width)


@given(st.lists(POINTS, max_size=4, unique_by=lambda point: round(point[1] / 60)))
def test_names_are_not_on_marks_where_there_is_room(points):
    wanted = [Label(x, y - 6, name * 3, 6.0) for x, y, name in points]
    marks = [(x, y) for x, y, _ in points]
    for one in map(ET.fromstring, labels(wanted, FRAME, marks)):
        left, right = _span(one)
        base = float(one.get("y"))
        for x, y in marks:
            beside = right <= x - 5 or x + 5 <= left
            assert beside or base + 2 <= y - 5 or y + 5 <= base - 8


def test_a_name_that_would_lie_on_another_mark_moves():
    wanted = [Label(100.0, 94.0, "FFT", 6.0)]
    (one,) = labels(wanted, FRAME, [(100.0, 100.0), (112.0, 95.0)])
    assert float(ET.fromstring(one).get("y")) == 87.0  # right above the other


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
