"""Whole or in parts: chosen by what is predicted, and said why."""

from dataclasses import replace

import pytest

from mucudnn.errors import PlanningError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.optimizers import Sgd
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.split_axis import largest_rows, parts_by_bytes
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.planning import split_search
from mucudnn.passes.planning.cutting import (
    Cutting,
    SplitStep,
    check_split,
    couples_batch,
    cuttings,
)
from mucudnn.passes.planning.plan_step import minimum_budget
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.split_search import plan_splitting
from mucudnn.studies.memory import IN_PARTS, study_memory
from mucudnn.studies.memory_results import StepSpec

pytestmark = pytest.mark.usefixtures("short_searches")


def network(batch, *, norm):
    g = GraphBuilder()
    x = g.input("image", (batch, 4, 64, 64))
    for channels in (16, 8):
        x = g.conv(x, channels, 3, padding=1)
        x = g.relu(g.batch_norm(x) if norm else x)
    x = g.flatten(g.global_avg_pool(x))
    label = g.input("label", (batch,), "int64")
    return training_graph(g.build(g.softmax_cross_entropy(g.linear(x, 3), label)))


def step(budget, *, norm=True, batch=4):
    return SplitStep(
        network(batch, norm=norm),
        lambda graph: with_updates(graph, Sgd(0.1)),
        lambda graph: estimate(graph, "h200"),
        lambda graph, profile: StepRequest(graph, profile, budget=budget),
    )


@pytest.mark.parametrize("norm", [True, False])
def test_parts_need_less_and_are_chosen_where_whole_does_not_fit(norm):
    roomy = plan_splitting(step(1 << 40, norm=norm))
    assert roomy.chosen.parts == 1
    assert len(roomy.tried) == 1
    least = roomy.tried[0].least_bytes
    tight = plan_splitting(step(0.6 * least, norm=norm))
    assert tight.chosen.parts > 1
    assert tight.tried[0].plan is None
    assert tight.chosen.plan.peak_bytes <= 0.6 * least
    assert "whole it does not fit" in tight.reason
    assert {s.parts for s in tight.chosen.segments} >= {tight.chosen.parts}
    assert tight.fused is not norm
    assert tight.to_json()["parts"] == tight.chosen.parts
    said = 1 + len(tight.tried) + len(tight.chosen.segments)
    assert len(tight.lines) == said + bool(tight.chosen.kept_whole)


def test_parts_are_tried_where_there_is_no_room_to_measure_the_whole():
    whole = step(1 << 40)
    nodes = len(whole.in_parts(1).nodes)

    def costs(graph):
        return None if len(graph.nodes) == nodes else estimate(graph, "h200")

    found = plan_splitting(replace(whole, costs=costs))
    assert found.chosen.parts > 1
    assert found.tried[0].least_bytes is None


def test_a_number_of_parts_is_taken_and_none_is_whole():
    assert plan_splitting(step(1 << 40), 2).chosen.parts == 2
    assert plan_splitting(step(1 << 40), 99).chosen.parts == 4
    assert plan_splitting(step(1 << 40), "none").chosen.parts == 1


def test_what_fits_no_way_names_the_least_budget_of_all():
    with pytest.raises(PlanningError, match="neither whole nor in parts") as refused:
        plan_splitting(step(1000, norm=False, batch=2))
    found = plan_splitting(step(refused.value.least_bytes, norm=False, batch=2))
    assert found.chosen.plan.peak_bytes <= refused.value.least_bytes


def test_parts_follow_sizes_where_the_batch_is_coupled():
    coupled, free = network(16, norm=True), network(16, norm=False)
    assert couples_batch(coupled)
    assert not couples_batch(free)
    assert Cutting(4).parts_of(free) == 4
    parts = parts_by_bytes(coupled, largest_rows(coupled) / 4, most=4)
    assert set(parts.values()) == {4} or {1, 4} <= set(parts.values())
    with pytest.raises(ValueError, match="limit"):
        parts_by_bytes(coupled, 0)


def test_a_network_that_answers_may_be_cut_throughout():
    """That takes longer and never needs more."""
    g = GraphBuilder(training=False)
    x = skip = g.conv(g.input("image", (1, 4, 64, 64)), 8, 3, padding=1)
    for _ in range(2):
        x = g.relu(g.conv(g.max_pool(x, 2), 8, 3, padding=1))
    graph = g.build(g.conv(g.add(skip, g.upsample_nearest(x, 4)), 8, 1))
    ways = list(cuttings(graph, "height"))
    assert [str(way) for way in ways[1:4]] == ["2 tiles", "4 tiles", "8 tiles"]
    largest, throughout = cuttings(graph, "height:4")
    assert (largest.throughout, throughout.throughout) == (False, True)
    assert len(throughout.cut(graph).nodes) > len(largest.cut(graph).nodes)
    few, many = (estimate(way.cut(graph), "h200") for way in (largest, throughout))
    assert sum(few.node_ms.values()) < sum(many.node_ms.values())
    requests = [
        StepRequest(way.cut(graph), costs)
        for way, costs in ((largest, few), (throughout, many))
    ]
    most, least = map(minimum_budget, requests)
    made = SplitStep(
        graph,
        lambda graph: graph,
        lambda graph: estimate(graph, "h200"),
        lambda graph, profile: StepRequest(graph, profile, budget=least),
    )
    found = plan_splitting(made, "height:4")
    assert least <= most
    assert found.chosen.plan.peak_bytes <= least
    assert "instead" not in found.reason  # whole was not asked for


def test_strips_are_tried_where_there_are_few_images():
    one = network(1, norm=True)
    tried = [str(cutting) for cutting in cuttings(one, "auto")]
    assert tried == ["whole", *(f"{k} tiles" for k in (2, 4, 8, 16))]
    assert {c.along for c in cuttings(network(4, norm=True), "auto")} == {"batch"}
    assert [str(c) for c in cuttings(network(4, norm=True), "height:3")] == ["3 tiles"]
    free = plan_splitting(step(1 << 40, batch=1))
    assert free.chosen.parts == 1
    least = free.tried[0].least_bytes
    tight = plan_splitting(step(0.6 * least, batch=1), "height:4")
    assert tight.chosen.cutting.along == "height"
    assert tight.chosen.plan.peak_bytes <= 0.6 * least
    assert "tiles" in tight.reason
    assert "tiles" in str(tight.chosen.segments[0])
    assert tight.to_json()["along"] == "height"
    assert "rows of images: " in tight.lines[-1]
    assert "matmul" in tight.lines[-1]
    assert "conv" not in tight.lines[-1]


def test_strips_of_what_has_no_images_are_refused():
    g = GraphBuilder()
    x, label = g.input("image", (4, 6)), g.input("label", (4,), "int64")
    dense = training_graph(g.build(g.softmax_cross_entropy(g.linear(x, 3), label)))
    assert [c.along for c in cuttings(dense, "auto")] == ["batch"] * 3
    with pytest.raises(ValueError, match="no images"):
        list(cuttings(dense, "height"))


@pytest.mark.parametrize(
    "split", ["height:0", "height:", "height:x", "width", "auto:2"]
)
def test_what_is_no_split_is_refused(split):
    with pytest.raises(ValueError, match="height:N"):
        check_split(split)


def test_the_memory_study_has_steps_in_parts_as_one_more_technique():
    spec = StepSpec(model="lenet", batch=512)
    least = study_memory(spec, policies=["planned"], budget="64MiB").minimum
    study = study_memory(spec, policies=["planned"], budget=int(0.8 * least), split=2)
    assert [t.policy for t in study.techniques] == ["planned", IN_PARTS]
    assert study.best.policy == IN_PARTS
    assert study.minimum < least
    assert study.placed is not None
    assert study.to_json()["splitting"]["parts"] > 1


def test_the_least_budget_counts_parts_that_need_no_plan():
    """Within plenty of memory the whole step is as fast as can be, and alone tried."""
    spec = StepSpec(model="unet2d", batch=1, image=256, inference=True)
    asked = {"policies": ["planned"], "budget": "1GiB", "min_budget": True}
    study = study_memory(spec, split="height", **asked)
    assert len(study.splitting.tried) == 1
    whole, parts = (study.min_budget[name] for name in ("planned", IN_PARTS))
    assert parts == study.minimum < 0.6 * whole
    # Times of the one way that was asked for are held against itself.
    spec = StepSpec(model="lenet", batch=1, inference=True)
    study = study_memory(spec, policies=["planned"], budget="1GiB", split="height:4")
    assert "1.00x of 4 tiles unbounded" in study.splitting.reason
    with pytest.raises(ValueError, match="measured"):
        study_memory(StepSpec(model="lenet", batch=4, device="cpu"), split="auto")


def test_a_deep_network_is_planned_in_parts_only_where_whole_it_does_not_fit(
    monkeypatch,
):
    least = minimum_budget(StepRequest(*_whole()))
    assert len(plan_splitting(step(least)).tried) > 1
    monkeypatch.setattr(split_search, "_MOST_NODES", 1)
    found = plan_splitting(step(least))
    assert len(found.tried) == 1
    assert "too deep" in found.reason
    tight = plan_splitting(step(0.6 * least))
    assert tight.chosen.parts > 1


def _whole():
    whole = step(1 << 40)
    graph = whole.in_parts(1)
    return graph, whole.costs(graph)
