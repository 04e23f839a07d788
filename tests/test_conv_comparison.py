"""Comparisons on the null backend, whose times are known in advance."""

import json
import math

import pytest

from mucudnn.backends import get_backend
from mucudnn.codecs import decode_fields
from mucudnn.errors import BackendError
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.runtime.store.measurements import BenchmarkCache
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.convolutions import StudyInterrupted, compare, in_directions
from mucudnn.suites import Layer, parse_problem
from tests.doubles import watched

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
