"""Comparisons and surveys of convolutions: what a study says."""

import dataclasses
import io
import json
import math

import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import Backend, get_backend
from mucudnn.codecs import decode_fields
from mucudnn.errors import BackendError, BackendUnavailableError
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.numerics import Numerics
from mucudnn.passes.microbatch import BATCH_POLICIES
from mucudnn.report.survey import survey_tables
from mucudnn.report.text import write_tables
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.algorithms import Algorithm, SurveyedBatch, survey_algorithms
from mucudnn.studies.convolutions import StudyInterrupted, compare, in_directions
from mucudnn.suites import Layer, parse_problem
from tests.commands import Terminal
from tests.doubles import QUICK, crowded, problem, watched

KIB = 1 << 10


def layer(n=64, k=8, name="conv", count=1):
    problem = parse_problem(f"n={n},c=4,h=9,w=9,k={k},r=3,s=3,pad=1")
    return Layer(name, problem, count)


def null_tuner(**options):
    return Tuner(backend=get_backend("null"), **options)


def failing_tuner(algo=None, interrupt_k=None):
    """A tuner of which one algorithm fails, or all do, or a key is pressed."""

    def before(problem, name):
        if problem.w_shape[0] == interrupt_k:
            raise KeyboardInterrupt
        if algo in (name, "every"):
            raise BackendError("status 3")

    return Tuner(backend=watched(before=before), cache=BenchmarkCache())


def test_limits_open_the_way_to_the_fast_algorithm():
    """FAST takes 1 KiB a sample: 64 samples fit in 64 KiB, 16 at a time in 16 KiB."""
    result = compare(null_tuner(), [layer()], [0, 16 * KIB, 64 * KIB])
    none, some, all_ = result.layers[0].outcomes
    assert none.speedup == 1.0
    assert all_.speedup == 1.0
    assert some.speedup > 2.0
    assert {s.algo for s in some.choice.plan.steps} == {"FAST"}
    assert some.choice.plan.workspace == 16 * KIB
    assert {s.algo for s in some.choice.undivided.steps} == {"SLOW"}


def test_summary_is_over_the_layers_that_have_a_speedup():
    layers = [layer(64, 8, "a"), layer(32, 4, "b", count=3)]
    result = compare(null_tuner(), layers, [16 * KIB])
    (entry,) = result.summary
    speedups = [x.outcomes[0].speedup for x in result.layers]
    assert entry.layers == 2
    assert entry.geomean == pytest.approx(math.sqrt(math.prod(speedups)))
    assert (entry.best, entry.worst) == (max(speedups), min(speedups))
    times = [x.outcomes[0].choice.planned_ms for x in result.layers]
    assert entry.planned_ms == pytest.approx(times[0] + 3 * times[1])


def test_json_has_the_promised_form():
    layers = in_directions([layer()], list(Direction))
    result = compare(null_tuner(), layers, [16 * KIB], total_workspace=48 * KIB)
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert {"schema", "backend", "fingerprint", "layers", "summary"} <= set(data)
    assert data["schema"] == 1
    for entry, asked in zip(data["layers"], layers, strict=True):
        assert entry["name"] == asked.name
        assert entry["direction"] == asked.problem.direction.value
        assert decode_fields("problem", ConvProblem, entry["problem"]) == asked.problem
        for plan in entry["plans"]:
            assert plan["speedup"] == plan["undivided_ms"] / plan["planned_ms"]
            assert sum(s["batch"] for s in plan["steps"]) == asked.problem.batch
            assert plan["workspace"] == max(s["workspace"] for s in plan["steps"])
            assert set(plan["steps"][0]) == {"algo", "batch", "time_ms", "workspace"}
    assert [s["kind"] for s in data["summary"]] == ["per_kernel", "total"]
    expected = {"workspace_limit", "geomean_speedup", "max_speedup", "min_speedup"}
    assert all(expected <= set(entry) for entry in data["summary"])


@pytest.mark.parametrize("total", [0, 10 * KIB, 50 * KIB, 200 * KIB])
def test_total_workspace_is_a_sum(total):
    layers = in_directions([layer(64), layer(16, 4)], list(Direction))
    result = compare(null_tuner(), layers, [], total_workspace=total)
    choices = [x.outcomes[0].choice for x in result.layers]
    assert sum(choice.plan.workspace for choice in choices) <= total
    assert all(choice.speedup >= 1.0 for choice in choices)
    equal = total // len(layers)
    assert all(choice.undivided.workspace <= equal for choice in choices)


def test_failed_algorithms_are_listed_and_never_planned():
    limits = [64 * KIB, 64 * KIB, 65 * KIB]
    result = compare(failing_tuner(algo="FAST"), [layer()], limits)
    assert [limit.nbytes for limit in result.limits] == limits[1:]
    (found,) = result.layers
    assert [algo for algo, _ in found.failures] == ["FAST"]
    assert {s.algo for s in found.outcomes[0].choice.plan.steps} == {"SLOW"}
    assert "status 3" in found.to_json()["excluded"][0]["reason"]


def test_a_layer_that_nothing_can_run_has_a_reason():
    result = compare(
        failing_tuner(algo="every"), [layer()], [64 * KIB], total_workspace=KIB
    )
    (found,) = result.layers
    assert [o.choice for o in found.outcomes] == [None, None]
    assert all("status 3" in o.reason for o in found.outcomes)
    assert [entry.geomean for entry in result.summary] == [None, None]
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert data["layers"][0]["plans"][0]["speedup"] is None
    result = compare(null_tuner(memory_limit=100), [layer()], [64 * KIB])
    (outcome,) = result.layers[0].outcomes
    assert outcome.choice is None
    assert "memory limit" in outcome.reason


def test_interruption_keeps_what_was_done():
    tuner = failing_tuner(interrupt_k=9)
    layers = [layer(64, 8, "done"), layer(64, 9, "not"), layer(64, 7, "never")]
    with pytest.raises(StudyInterrupted) as caught:
        compare(tuner, layers, [16 * KIB], total_workspace=KIB)
    partial = caught.value.found
    assert [x.name for x in partial.layers] == ["done"]
    assert partial.to_json()["interrupted"] is True
    assert len(partial.summary) == 1
    assert tuner.cache.summary()[0].rows > 0


def test_progress_begins_and_ends_every_layer():
    seen = []
    compare(null_tuner(), [layer(k=1), layer(k=2)], [KIB], progress=seen.append)
    assert [(a.index, a.result is not None) for a in seen] == [
        (0, False),
        (0, True),
        (1, False),
        (1, True),
    ]
    assert {a.total for a in seen} == {2}


LAYERS = in_directions([Layer("conv", problem(12))], list(Direction))


def unrunnable(problem, algo):
    raise AssertionError(f"{algo} was run")


def raising(error, at):
    """A null backend that cannot list its algorithms at some batch sizes."""
    real = get_backend("null")

    class Broken(type(real.conv)):
        def algorithms(self, problem):
            if problem.batch in at:
                raise error
            return super().algorithms(problem)

    return Backend("broken", real.device, Broken(real.device))


@st.composite
def batches(draw):
    sizes = draw(st.lists(st.integers(0, 9), max_size=6))
    algorithms = [
        Algorithm(f"A{i}", nbytes, "default", True, ())
        for i, nbytes in enumerate(sizes)
    ]
    return SurveyedBatch(4, tuple(algorithms))


@given(batches(), st.integers(0, 10))
def test_what_fits_is_by_definition(batch, limit):
    fit = batch.within(limit)
    fitting = [a for a in batch.algorithms if a.workspace <= limit]
    assert fit.algorithms == len(fitting)
    assert fit.best == (fitting[0] if fitting else None)
    assert fit.first_choice_fits == (
        bool(batch.algorithms) and batch.algorithms[0].workspace <= limit
    )
    assert (fit.algorithms > 0) == (
        batch.least_workspace is not None and batch.least_workspace <= limit
    )
    if limit >= (batch.greatest_workspace or 0):
        assert fit.best == batch.first_choice


@pytest.mark.parametrize("policy", BATCH_POLICIES.table)
@pytest.mark.parametrize("words", ["tf32", "strict", "strict,deterministic"])
@pytest.mark.parametrize("alignment", [1, 16])
def test_it_lists_exactly_what_a_tuner_would_measure(policy, words, alignment):
    backend = dataclasses.replace(crowded(9), split_alignment=alignment)
    found = survey_algorithms(
        backend, LAYERS, policy, [0], numerics=Numerics.parse(words)
    )
    tuner = Tuner(
        backend=backend, batch_policy=policy, numerics=words, rule=QUICK, prune=False
    )
    for layer in found.layers:
        table = tuner.measure(layer.problem)
        listed = {
            (a.algo, b.batch, a.workspace, a.math_mode, a.deterministic, a.notes)
            for b in layer.batches
            for a in b.algorithms
        }
        failures = {
            (algo, b.batch, reason)
            for b in layer.batches
            for algo, reason in b.failures
        }
        measured = {
            (p.algo, p.batch, p.workspace, p.math_mode, p.deterministic, p.notes)
            for p in table.perfs
            if (p.algo, p.batch, p.error) not in failures
        }
        assert listed == measured
        assert len(table.perfs) == len(listed) + len(failures)


def test_nothing_is_run_or_allocated():
    backend = watched(before=unrunnable)
    found = survey_algorithms(backend, LAYERS, "all", [4 * KIB])
    assert backend.conv.calls == []
    assert [x.direction for x in found.layers] == list(Direction)
    (forward, *_) = found.layers
    assert [b.batch for b in forward.batches] == list(range(1, 13))
    assert [b.within(4 * KIB).algorithms for b in forward.batches] == [2] * 4 + [1] * 8


def test_the_first_choice_reaches_as_far_as_its_workspace():
    limits = [1, 60 * KIB, 240 * KIB, 719 * KIB, 720 * KIB]
    (layer, *_) = survey_algorithms(crowded(60), LAYERS, "all", limits).layers
    assert [layer.largest_batch(limit) for limit in limits] == [None, 1, 4, 11, 12]
    whole = layer.batches[-1]
    assert whole.first_choice.algo == "A0"
    assert whole.within(240 * KIB).best.algo == "A40"
    assert whole.within(240 * KIB).first_choice_fits is False


def test_what_is_not_accepted_is_counted():
    strict = Numerics.parse("strict")
    (layer, *_) = survey_algorithms(
        crowded(60), LAYERS, "undivided", [0], numerics=strict
    ).layers
    (batch,) = layer.batches
    tf32 = [i for i in range(60) if i % 7 != 6 and i % 3 == 2]
    assert batch.refused == len(tf32)
    assert len(batch.failures) - batch.refused == len(range(6, 60, 7))
    assert {a.math_mode for a in batch.algorithms} == {"default"}


def test_json_of_a_survey_has_the_promised_form():
    found = survey_algorithms(
        crowded(8), LAYERS, "powers_of_two", [0, 64 * KIB, 64 * KIB]
    )
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (data["schema"], data["backend"]) == (1, "crowded")
    assert data["fingerprint"] == "null"
    assert data["numerics"] == "tf32"
    assert data["limits"] == [0, 64 * KIB]
    assert data["interrupted"] is False
    for entry, asked in zip(data["layers"], LAYERS, strict=True):
        assert entry["direction"] == asked.problem.direction.value
        assert decode_fields("problem", ConvProblem, entry["problem"]) == asked.problem
        assert [b["batch"] for b in entry["batches"]] == [1, 2, 4, 8, 12]
        for batch in entry["batches"]:
            listed = batch["all"]
            sizes = [a["workspace"] for a in listed]
            assert batch["algorithms"] == len(listed) == 7
            assert batch["least_workspace"] == min(sizes)
            assert batch["greatest_workspace"] == max(sizes)
            assert batch["first_choice"] == listed[0]
            assert [*batch["fits"]] == ["0", str(64 * KIB)]
            assert batch["fits"]["0"]["best"] is None
            fit = batch["fits"][str(64 * KIB)]
            assert fit["algorithms"] == sum(s <= 64 * KIB for s in sizes)
            assert fit["first_choice_fits"] == (sizes[0] <= 64 * KIB)
            assert set(listed[0]) == {
                *("algo", "workspace", "math_mode", "deterministic", "notes")
            }


def test_a_library_that_fails_costs_one_size_only():
    backend = raising(BackendError("status 5"), at=(4,))
    (layer, *_) = survey_algorithms(backend, LAYERS, "powers_of_two", [0]).layers
    counts = {b.batch: len(b.algorithms) for b in layer.batches}
    assert counts == {1: 2, 2: 2, 4: 0, 8: 2, 12: 2}
    (broken,) = (b for b in layer.batches if b.batch == 4)
    assert broken.failures == (("*", "BackendError: status 5"),)
    assert broken.to_json([0])["first_choice"] is None
    text = printed(survey_algorithms(backend, LAYERS, "powers_of_two", [0]))
    assert "no algorithm: BackendError: status 5 (1): conv forward at 4, " in text


def test_a_missing_library_ends_it():
    backend = raising(BackendUnavailableError("no cuDNN"), at=(4,))
    with pytest.raises(BackendUnavailableError, match="no cuDNN"):
        survey_algorithms(backend, LAYERS, "all", [0])


def test_ctrl_c_keeps_what_is_done():
    def interrupt(at):
        if at.index == 2:
            raise KeyboardInterrupt

    with pytest.raises(StudyInterrupted) as caught:
        survey_algorithms(crowded(3), LAYERS, "all", [0], progress=interrupt)
    kept = caught.value.found
    assert [x.direction for x in kept.layers] == list(Direction)[:2]
    assert kept.to_json()["interrupted"] is True
    assert "interrupted: 1 of 3 were not surveyed" in printed(kept)


def test_progress_is_a_begin_and_an_end_a_layer():
    seen = []
    found = survey_algorithms(crowded(3), LAYERS, "all", [0], progress=seen.append)
    assert [at.index for at in seen] == [0, 0, 1, 1, 2, 2]
    assert [at.result for at in seen[1::2]] == list(found.layers)
    assert {at.result for at in seen[::2]} == {None}


def printed(found):
    stream = io.StringIO()
    write_tables(survey_tables(found), stream)
    return stream.getvalue()


def test_tables_have_a_row_a_size_and_limit():
    limits = [1, 120 * KIB, 720 * KIB]
    found = survey_algorithms(
        crowded(60), LAYERS, "powers_of_two", limits, numerics=Numerics(tf32=False)
    )
    sizes, reach = survey_tables(found)
    assert len(sizes.rows) == 3 * 5 * 3
    assert len(reach.rows) == 3 * 3
    row = dict(zip(sizes.columns, sizes.rows[4], strict=True))
    assert row == {
        "layer": "conv",
        "direction": "forward",
        ">batch": "2",
        ">least": "4 KiB",
        ">greatest": "120 KiB",
        "first choice": "A0",
        ">needs": "120 KiB",
        ">limit": "120 KiB",
        ">fit": "34/34",
        "best that fits": "first choice",
        ">workspace": "120 KiB",
    }
    whole = dict(zip(sizes.columns, sizes.rows[13], strict=True))
    assert (whole[">batch"], whole["best that fits"]) == ("12", "A51")
    assert [r[4] for r in reach.rows[:3]] == ["–", "2", "12"]
    assert reach.strong == {1, 4, 7}
    assert "720 KiB: the first choice fits the whole mini-batch in 3 of 3" in (
        printed(found)
    )
    assert len(printed(found).splitlines()) < 45 + 9 + 10
    assert "numerics: strict" in reach.title


@pytest.mark.parametrize("columns", [78, 120])
def test_a_terminal_has_room_for_them(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    write_tables(
        survey_tables(survey_algorithms(crowded(9), LAYERS, "all", [KIB])), stream
    )
    assert "…" not in stream.getvalue()
    assert "first" in stream.getvalue()
