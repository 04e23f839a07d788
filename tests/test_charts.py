"""The curve of the best division never rises with more workspace."""

import re
from itertools import pairwise

import pytest
from hypothesis import given

from mucudnn.ir.conv import PerfTable
from mucudnn.passes.microbatch import pareto_plans
from mucudnn.report.conv_charts import curve, drawn_front
from mucudnn.studies.convolutions import LayerResult
from tests.examples import examples
from tests.tables import perf, perf_tables, problem


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


def test_a_shaky_plan_is_no_step_up():
    """By time and noise the larger one is better, by time alone it is not."""
    shaky = perf("SHAKY", 4, 1.0, 0, noise_ms=0.5)
    steady = perf("STEADY", 4, 1.2, 8, noise_ms=0.0)
    table = PerfTable(problem(4), (shaky, steady))
    assert [p.time_ms for p in result(table).front] == pytest.approx([1.0, 1.2])
    check(table)
