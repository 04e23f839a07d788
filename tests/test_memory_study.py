"""`study_memory`: what it takes, and what it says of what it does not take."""

import math
import re
from dataclasses import replace

import pytest

from mucudnn.ir.builder import GraphBuilder
from mucudnn.models import get_model
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.residency import PLANNED, policy_names
from mucudnn.report.memory import memory_tables
from mucudnn.studies import memory
from mucudnn.studies.memory import study_memory
from mucudnn.studies.memory_results import StepSpec

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("short_searches")


def test_a_graph_is_studied_as_its_network_is():
    graph = get_model("lenet")(4)
    found = study_memory(graph, device="null", policies=("keep_all",), budget=8 * MIB)
    named = study_memory(
        StepSpec(model="lenet", batch=4, device="null"),
        policies=("keep_all",),
        budget=8 * MIB,
    )
    data, expected = found.to_json(), named.to_json()
    assert (data.pop("model"), expected.pop("model")) == ("graph", "lenet")
    assert data == expected
    assert memory_tables(found)[0].title.startswith("graph, batch 4, 1×28×28, momentum")


def test_a_graph_is_planned_by_every_policy_our_search_last():
    found = study_memory(get_model("lenet")(4), budget=8 * MIB)
    tried = [technique.policy for technique in found.techniques]
    assert sorted(tried) == sorted(policy_names())
    assert tried[-1] == PLANNED
    assert found.spec.device == "h200"


def headless(batch):
    g = GraphBuilder()
    return g.build(g.relu(g.input("pixels", (batch, 3))))


@pytest.mark.parametrize(
    ("step", "options", "error", "message"),
    [
        ("lenet", {}, TypeError, "a Graph or a StepSpec, got 'lenet'; create networks"),
        (get_model, {}, TypeError, "a Graph or a StepSpec, got <function get_model"),
        (headless(2), {}, ValueError, "has the inputs pixels; it must have 'image'"),
        (
            training_graph(get_model("lenet")(2)),
            {},
            ValueError,
            "computes gradients already; pass the network with its loss",
        ),
        (
            get_model("lenet")(2),
            {"max_batch": True},
            ValueError,
            "other batch sizes than 2, and a graph has only one; pass StepSpec",
        ),
        (get_model("lenet")(2), {"device": "h9"}, ValueError, "h9"),
        (get_model("lenet")(2), {"device": "cpu"}, ValueError, "pass a profile"),
        (get_model("lenet")(2), {"budget": "much"}, ValueError, "much"),
        (get_model("lenet")(2), {"policies": ["best"]}, ValueError, "unknown policy"),
        (get_model("lenet")(2), {"slowdown": 0.9}, ValueError, "at least 1, got 0.9"),
        (get_model("lenet")(2), {"slowdown": math.nan}, ValueError, "got nan"),
        (get_model("lenet")(2), {"slowdown": "5%"}, TypeError, "must be a number"),
    ],
    ids=lambda x: None if not isinstance(x, str) else x[:12],
)
def test_what_cannot_be_studied_is_said(step, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        study_memory(step, **options)


def test_the_search_takes_any_scheduler_where_none_is_named(monkeypatch):
    asked = []
    usual = memory.try_technique

    def noted(request):
        asked.append((request.policy, request.scheduler))
        return usual(request)

    monkeypatch.setattr(memory, "try_technique", noted)
    found = study_memory(
        get_model("lenet")(2), policies=("lru", PLANNED), device="null", budget="6MiB"
    )
    assert asked == [("lru", None), (PLANNED, None)]
    best = found.best
    assert best.scheduler == best.plan.scheduler
    assert found.placed is not None
    asked.clear()
    study_memory(
        get_model("lenet")(2),
        policies=(PLANNED,),
        schedulers=("timed",),
        device="null",
        budget="6MiB",
    )
    assert asked == [(PLANNED, "timed")]


def test_a_study_says_what_no_plan_beats():
    graph = get_model("lenet")(256)
    spec = {"policies": ("lru", PLANNED), "device": "p100"}
    most = study_memory(graph, budget="1GiB", **spec).unbounded.peak_bytes
    found = study_memory(graph, budget=int(0.6 * most), curve=True, **spec)
    least = found.least_ms[found.budget]
    assert found.unbounded_ms * 0.999 <= least <= found.best.step_ms
    assert found.gap(found.best) == pytest.approx(found.best.step_ms / least - 1)
    (ours,) = (t for t in found.techniques if t.policy == PLANNED)
    assert ours.plan.least_ms == least
    assert ours.plan.gap == found.gap(ours)
    assert "above the best" in repr(ours.plan)
    assert set(found.least_ms) == {found.budget, *(t.budget for t in found.curve)}
    rows = found.to_json()["rows"]
    assert [row["least_ms"] for row in rows] == [least] * 2
    assert [row["gap"] for row in rows] == [found.gap(t) for t in found.techniques]
    techniques, curve = memory_tables(found)
    assert f"{found.gap(found.best):.1%}" in techniques.rows[-1]
    assert any("no plan within the budget takes less" in n for n in techniques.notes)
    assert curve.rows[-1][0] == "(lower bound)"


def studied(slowdown, policies=(PLANNED,), **options):
    network = get_model("lenet")(256)
    options = {"policies": policies, "slowdown": slowdown, "device": "p100", **options}
    return study_memory(network, **options)


def test_the_budget_for_a_slowdown_keeps_it_and_the_minimum_does_not():
    found = studied(1.05)
    kept = found.for_slowdown.technique
    assert found.minimum < kept.budget < found.unbounded.peak_bytes
    again = studied(None, policies=("lru", PLANNED), budget=kept.budget)
    assert again.slowdown(again.best) == found.slowdown(kept) <= 1.05
    finest = (found.unbounded.peak_bytes - found.minimum) // 32
    less = studied(1.05, budget=kept.budget - finest)
    assert less.slowdown(less.best) > 1.05
    row = found.to_json()["for_slowdown"]
    assert (row["slowdown"], row["budget_bytes"]) == (1.05, kept.budget)
    (line,) = [n for n in memory_tables(found)[0].notes if "a slowdown of" in n]
    assert line.startswith("within a slowdown of 1.05: ")
    assert f"({kept.budget} bytes), where planned takes 1.0" in line


def test_no_slowdown_at_all_takes_as_much_as_without_a_budget():
    found = studied(1, policies=("keep_all",))
    kept = found.for_slowdown.technique
    assert kept.budget >= found.unbounded.peak_bytes
    assert found.slowdown(kept) == pytest.approx(1)
    assert any(
        "as much as without a budget" in n for n in memory_tables(found)[0].notes
    )


def test_a_policy_that_is_always_slow_has_no_budget_for_a_slowdown():
    found = studied(1.01, policies=("superneurons_memory",))
    assert found.for_slowdown.technique is None
    assert found.to_json()["for_slowdown"]["budget_bytes"] is None
    assert any(
        "no budget keeps a slowdown of 1.01" in n for n in memory_tables(found)[0].notes
    )


def test_the_best_batch_is_one_of_those_up_to_the_largest():
    spec = StepSpec(model="lenet", batch=256, device="p100")
    found = study_memory(
        spec, policies=("lru", PLANNED), budget="24MiB", max_batch=True
    )
    most = found.max_batch[PLANNED]
    assert max(found.by_batch) == most
    assert len(found.by_batch) == 4
    rates = found.samples_per_s
    assert rates[found.best_batch] == max(rates.values()) > 0
    for batch, technique in found.by_batch.items():
        assert technique.peak_bytes <= found.budget
        again = study_memory(
            replace(spec, batch=batch), policies=(PLANNED,), budget="24MiB"
        )
        assert 1e3 * batch / again.best.step_ms == rates[batch]
    rows = found.to_json()["throughput"]
    assert [row["batch"] for row in rows if row["best"]] == [found.best_batch]
    _, table, _ = memory_tables(found)
    assert [row[0] for row in table.rows] == [str(batch) for batch in rates]
    assert [row[0] for row in table.rows if row[-1]] == [str(found.best_batch)]
