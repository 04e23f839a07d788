"""Few words for many failures, in every place that names them."""

import math

import pytest
from hypothesis import given, strategies as st

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import AlgoPerf, PerfTable
from mucudnn.ir.numerics import NUMERICS, Numerics, RowStatus, Traits
from mucudnn.passes.convolution.explain import counted, explain, left_out
from mucudnn.passes.microbatch import undivided
from mucudnn.report.comparison import html_report
from mucudnn.report.text import comparison_tables
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.convolutions import compare
from mucudnn.suites import Layer
from tests.doubles import QUICK, crowded, problem


def refused(perf):
    return perf.status is RowStatus.REFUSED


def failed(algo, error, batch=8):
    return AlgoPerf(algo=algo, batch=batch, time_ms=math.inf, workspace=0, error=error)


names = st.sampled_from([f"A{i}" for i in range(20)])
errors = st.one_of(
    st.sampled_from([RowStatus.REFUSED.text(f"it is {x}") for x in "abc"]),
    st.sampled_from([f"status {x}" for x in range(12)]),
)


@given(st.lists(st.builds(failed, names, errors)))
def test_every_algorithm_is_counted_once_a_reason(perfs):
    entries = left_out(perfs)
    assert len(entries) <= 1 + 6
    kept_out = {p.algo for p in perfs if refused(p)}
    others = {(p.algo, p.error) for p in perfs if not refused(p)}
    if kept_out:
        (who, why), *entries = entries
        assert who.split()[0] == str(len(kept_out))
        numbers = [int(part.split(")")[0]) for part in why.split("(")[1:]]
        assert sum(numbers) == len({(p.algo, p.error) for p in perfs if refused(p)})
    if len(others) <= 6:
        assert set(entries) == others
    else:
        assert entries[0][0].split()[0] == str(len({algo for algo, _ in others}))


def test_algorithms_with_one_reason_share_it():
    table = PerfTable(problem(8), tuple(failed(a, "no float16") for a in ("B", "A")))
    with pytest.raises(PlanningError, match=r"w \(.*, float32 \(A, B: no float16\)$"):
        undivided([table], 0)


def test_reasons_are_by_number_and_shortened():
    text = counted([("A", "x" * 200), ("B", "no\nroom"), ("C", "no room")])
    first, second = text.split(", ")
    assert first == "no room (2)"
    assert second == "x" * 99 + "… (1)"
    many = counted((f"A{i}", f"r{i}") for i in range(9))
    assert many.endswith("(1), 3 more reasons")


def test_words_and_policies_are_the_same():
    for text in (*NUMERICS, "strict,deterministic", "tf32,down_convert,float32_sums"):
        policy = Numerics.parse(text)
        assert Numerics.parse(policy.words) == policy
        assert {*text.split(",")} <= {*policy.words.split(",")} | {"tf32"}


def tuner(words):
    return Tuner(
        backend=crowded(60), numerics=words, rule=QUICK, batch_policy="powers_of_two"
    )


def test_an_explanation_names_the_refused_in_one_line():
    strict = tuner("strict,deterministic")
    table = strict.measure(problem(8))
    text = explain(table, undivided([table], 1 << 30)[0], 1 << 30)
    (line,) = (line for line in text.splitlines() if "not accepted" in line)
    number = len({p.algo for p in table.perfs if refused(p)})
    assert line.startswith(f"- {number} algorithms not accepted: it rounds float32 to")
    assert "it is not deterministic (" in line
    assert len(text.splitlines()) < 25


@pytest.mark.parametrize("limit", [0, 100 << 10])
def test_tables_and_pages_are_not_flooded(limit):
    result = compare(tuner("strict"), [Layer("conv", problem(8))], [limit])
    layers, _ = comparison_tables(result)
    assert len(layers.notes) <= 1
    assert all(len(note) < 300 for note in layers.notes)
    (layer,) = result.layers
    assert len(layer.left_out) <= 2
    assert len(layer.to_json()["excluded"]) == len(layer.failures) > 20
    assert html_report(result, "x").count("not accepted") <= 1


def test_where_nothing_is_accepted_the_reason_is_one_short_line():
    backend = crowded(60)
    backend.conv.traits = lambda problem, algo: Traits(deterministic=False)
    strict = Tuner(backend=backend, numerics="deterministic", rule=QUICK)
    result = compare(strict, [Layer("conv", problem(8))], [1 << 30])
    (note,) = comparison_tables(result)[0].notes
    assert "52 algorithms: not accepted: it is not deterministic (52)" in note
    assert "8 algorithms: needs 13 banks (1)" in note
    assert len(note) < 250


def test_few_failures_keep_their_names():
    rows = (failed("FFT", "stride 2"), failed("WINOGRAD", "5 taps"))
    table = PerfTable(problem(8), rows)
    assert left_out(table.perfs) == (("FFT", "stride 2"), ("WINOGRAD", "5 taps"))
