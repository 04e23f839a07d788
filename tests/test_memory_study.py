"""`study_memory`: what it takes, and what it says of what it does not take."""

import re

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
