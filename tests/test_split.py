"""A step cut along the batch computes what the whole one does, and keeps its bits."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import get_backend
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.graph import Phase
from mucudnn.ir.tensor import Role
from mucudnn.ir.traits import OPAQUE
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.rematerialize import Rematerializer
from mucudnn.passes.graph.split import of_whole
from mucudnn.passes.graph.split_axis import along_batch, cuttable
from mucudnn.passes.liveness import live_ranges
from mucudnn.passes.residency import Residency, saved_tensors
from tests.examples import examples
from tests.graphs import split_batch
from tests.model_cases import furthest, narrow_model, random_feeds
from tests.numpy_runner import execute
from tests.race_detector import RaceDetector
from tests.random_graphs import feeds, residencies, training_graphs
from tests.swapping import Bench, same

MODELS = {
    "alexnet": {"image": 67},
    "densenet40": {"image": 8},
    "lenet": {"image": 16},
    "resnet18": {"image": 32},
    "resnet20": {"image": 8},
    "unet2d": {"image": 16},
    "unet2d_bn": {"image": 16},
}
SLOW = ("alexnet", "unet2d", "unet2d_bn", "densenet40", "resnet18")
NORMED = ("densenet40", "resnet18", "resnet20", "unet2d_bn")
BATCHES = {"unet2d": 3, "unet2d_bn": 3}
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
    for name in MODELS
]


def step(name, batch, dtype="float32"):
    forward = narrow_model(name)(batch, classes=3, dtype=dtype, **MODELS[name])
    return training_graph(forward)


def results(graph, values):
    """Outputs, gradients and running statistics."""
    found = {name: values[name] for name in graph.outputs}
    found |= {f"d {w}": values[name] for w, name in graph.gradients.items()}
    states = graph.with_role(Role.STATE)
    return found | {spec.name: values[spec.name] for spec in states}


def computed(graph, given):
    own = {name: array.copy() for name, array in given.items()}
    return results(graph, execute(get_backend("cpu"), graph, own))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_it_computes_what_the_whole_step_does(name, dtype):
    graph = step(name, BATCHES.get(name, 7), dtype)
    given = random_feeds(graph)
    expected = computed(graph, given)
    limit = {"float64": 1e-12, "float32": 1e-4 if name in NORMED else 2e-6}[dtype]
    few = (3,) if dtype == "float64" else (8,)
    for parts in few if name in SLOW else (2, 3, 8):
        found = computed(split_batch(graph, parts), given)
        error, where = furthest(found, expected)
        assert error <= limit, (parts, where)


@examples(60)
@given(data=st.data())
def test_every_node_may_have_parts_of_its_own(data):
    graph = data.draw(training_graphs())
    parts = {node.name: data.draw(st.integers(1, 6)) for node in graph.nodes}
    opaque = data.draw(st.sets(st.sampled_from(sorted(parts)), max_size=2))
    cut = split_batch(
        graph, lambda node: 1 if node.name in opaque else parts[node.name]
    )
    given = feeds(graph)
    error, where = furthest(computed(cut, given), computed(graph, given))
    assert error < 1e-4, where
    assert cut.inputs == graph.inputs
    for name in (*graph.outputs, *graph.gradients.values()):
        assert cut.tensors[name].shape == graph.tensors[name].shape


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "lenet" else pytest.mark.slow)
        for name in MODELS
    ],
)
def test_every_plan_keeps_the_bits_of_the_split_step(name):
    slow = name in SLOW
    for parts in (3,) if slow else (2, 8):
        bench = Bench.of(split_batch(step(name, BATCHES.get(name, 5)), parts))
        kept = bench.run(bench.kept())
        recomputed = 0
        for seed in (2,) if slow else (1, 2, 3):  # the second computes again
            plan = bench.plan(bench.random_residency(seed), part=seed / 4)
            recomputed += sum("~" in n.name for n in plan.schedule.graph.nodes)
            same(bench.run(plan.schedule, watcher=RaceDetector()), kept)
        assert recomputed or name == "lenet"


@examples(30)
@given(data=st.data())
def test_any_slices_may_be_computed_again_within_the_forward_pass(data):
    graph = split_batch(
        data.draw(training_graphs(most=6)), data.draw(st.integers(2, 4))
    )
    again = Rematerializer(graph)(data.draw(residencies(graph)))
    given = feeds(graph)
    found, expected = computed(again, given), computed(graph, given)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_slice_that_waits_for_the_whole_batch_takes_no_memory_until_then():
    graph = split_batch(step("resnet20", 8), 4)
    waiting = next(s for s in saved_tensors(graph) if s.producer.op == "conv")
    slices = [
        s.name
        for s in saved_tensors(graph)
        if of_whole(s.name) == of_whole(waiting.name)
    ]

    def life(mode):
        again = Rematerializer(graph)(dict.fromkeys(slices, mode))
        found = live_ranges(again)
        return max(found[name].last - found[name].first for name in slices)

    assert len(slices) == 4
    assert life(Residency.RECOMPUTE_ALWAYS) == 1
    assert life(Residency.RECOMPUTE_EACH) > 4


def layers(batch):
    g = GraphBuilder()
    x = g.input("image", (batch, 3, 8, 8))
    x = g.relu(g.conv(x, 4, 3, padding=1))
    x = g.dropout(g.flatten(x), 0.5)
    label = g.input("label", (batch,), "int64")
    logits = g.linear(x, 3)
    loss = g.softmax_cross_entropy(logits, label)
    return training_graph(g.build(loss, g.accuracy(logits, label)))


def test_where_nothing_couples_the_batch_forward_and_backward_are_one_phase():
    graph = layers(7)
    cut = split_batch(graph, 3)
    phases = [node.phase for node in cut.nodes if not node.traits.view]
    turns = sum(a != b for a, b in itertools.pairwise(phases))
    assert turns >= 5  # forward and back again, for each slice
    sizes = [
        node.attrs["problem"].batch
        for node in cut.nodes
        if node.traits.convolution and node.phase is Phase.FORWARD
    ]
    assert sizes == [2, 2, 3]


def test_filter_gradients_are_added_up_by_the_convolution_itself():
    cut = split_batch(layers(7), 3)
    last = {len(n.inputs): n for n in cut.nodes if n.name.startswith("conv.grad@")}
    assert set(last) == {2, 3}
    assert cut.tensors[last[3].outputs[0]].alias == last[3].inputs[2]
    assert {cut.storages[name] for name in cut.gradients.values()} < set(cut.tensors)


def test_no_more_parts_than_samples():
    cut = split_batch(layers(2), 8)
    assert cut.nodes == split_batch(layers(2), 2).nodes


def test_what_is_not_known_stays_whole():
    graph = layers(6)
    nodes = tuple(
        replace(n, traits=OPAQUE) if n.name == graph.nodes[1].name else n
        for n in graph.nodes
    )
    cut = split_batch(replace(graph, nodes=nodes), 2)
    assert graph.nodes[1].name in cut.by_name
    assert f"{graph.nodes[0].name}@1" in cut.by_name
    given = random_feeds(graph)
    error, where = furthest(computed(cut, given), computed(graph, given))
    assert error < 1e-6, where


def test_what_follows_from_weights_alone_is_not_cut():
    g = GraphBuilder()
    x = g.conv(g.input("image", (4, 4, 4, 4)), 4, 3, padding=1)
    half = g.scale(g.nodes[0].inputs[1], 0.5)
    x = g.append("conv", (x, half), g.shape(x), **g.nodes[0].attrs)
    graph = training_graph(g.build(g.mean_squared_error(x, g.input("t", g.shape(x)))))
    assert "scale" not in cuttable(graph, along_batch(graph))
    assert "scale" in split_batch(graph, 2).by_name


def test_merged_statistics_are_never_computed_again():
    cut = split_batch(step("resnet20", 4), 2)
    merges = [n for n in cut.nodes if n.name.endswith(":merge")]
    assert merges
    assert not any(n.recomputable for n in merges)
    saved = {s.name for s in saved_tensors(cut)}
    assert {n.outputs[0] for n in merges} <= saved


@pytest.mark.parametrize("parts", [0, -1, {"relu": 0}])
def test_parts_below_one_are_refused(parts):
    with pytest.raises(ValueError, match="parts"):
        split_batch(layers(4), parts)


def test_a_graph_without_a_batch_is_refused():
    g = GraphBuilder()
    graph = g.build(g.relu(g.input("x", ())))
    with pytest.raises(ValueError, match="batch"):
        split_batch(graph, 2)
