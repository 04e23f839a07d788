"""What is saved, what policies decide, and recomputation, which changes no value."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import get_backend
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.graph import PERSISTENT, Graph, Phase
from mucudnn.ir.profile import Profile
from mucudnn.models import MODELS
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.fusion import fuse_elementwise
from mucudnn.passes.graph.inplace import in_place, in_place_with_uses
from mucudnn.passes.graph.rematerialize import (
    Rematerializer,
    is_checkpoint,
    recompute_chain,
)
from mucudnn.passes.liveness import Touches, touches, uses_of
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    POLICIES,
    RECOMPUTED,
    Residency,
    saved_tensors,
)
from mucudnn.passes.residency.policies import block_ends
from mucudnn.passes.scheduling.problem import origin
from tests.examples import examples
from tests.numpy_runner import execute
from tests.random_graphs import feeds, foreign, profiles, residencies, training_graphs

NAMES = sorted(POLICIES.table)


def flat_profile(graph, ms=1.0, rate=1e6):
    return Profile(
        node_ms={node.name: ms for node in graph.nodes},
        workspaces={},
        fronts={},
        out_bytes_per_ms=rate,
        in_bytes_per_ms=rate,
    )


def step_of(graph, budget=math.inf):
    return StepRequest(graph, flat_profile(graph), budget)


def alexnet():
    return training_graph(MODELS["alexnet"](2))


@examples(60)
@given(data=st.data())
def test_saved_tensors_are_those_that_both_passes_use(data):
    graph = data.draw(training_graphs(updates=data.draw(st.booleans())))
    found = {saved.name: saved for saved in saved_tensors(graph)}
    for name, spec in graph.tensors.items():
        if spec.alias is not None:
            continue
        writer = graph.producers.get(name)
        uses = [
            i
            for i, node in enumerate(graph.nodes)
            if any(graph.storages[t] == name for t in node.inputs)
        ]
        backward = [i for i in uses if graph.nodes[i].phase is not Phase.FORWARD]
        forward = writer is not None and writer.phase is Phase.FORWARD
        assert (name in found) == bool(forward and backward)
        if name in found:
            saved = found[name]
            assert saved.again == backward[0]
            assert saved.first <= saved.last < saved.again
            assert graph.nodes[saved.first] is saved.producer is writer
            assert saved.nbytes == spec.nbytes


@examples(60)
@given(data=st.data())
def test_a_chain_needs_nothing_that_is_not_there(data):
    graph = data.draw(training_graphs())
    saved = saved_tensors(graph)
    names = {s.name for s in saved}
    for one in saved:
        there = {*graph.inputs, *(names - {one.name})}
        for node in recompute_chain(graph, one.name, names.__contains__):
            assert all(t in there or graph.storages[t] in there for t in node.inputs)
            there.update(node.outputs)
        assert (one.name in there) == one.producer.remakes(one.name)


@examples(60)
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_policies_speak_of_saved_tensors_and_results_of_blocks_only(data, name):
    graph = data.draw(training_graphs())
    step = StepRequest(graph, data.draw(profiles(graph)), data.draw(st.floats(0, 1e6)))
    found = POLICIES.resolve(name)(step)
    groups = {EVERYTHING, PERSISTENTS}
    allowed = {s.name for s in saved_tensors(graph)} | groups
    if "checkpoint" in name:
        allowed |= block_ends(graph)
    assert set(found) <= allowed
    assert all(isinstance(choice, Residency) for choice in found.values())


def offloaded(policy, graph):
    found = POLICIES.resolve(policy)(step_of(graph))
    return {name for name, choice in found.items() if choice is Residency.OFFLOAD}


def test_vdnn_offloads_inputs_of_convolutions_or_all_but_the_classifier():
    graph = alexnet()
    read = {
        graph.storages[node.inputs[0]]
        for node in graph.nodes
        if node.op == "conv" and node.phase is Phase.FORWARD
    }
    everything = offloaded("vdnn_all", graph)
    assert offloaded("vdnn_conv", graph) == read - set(graph.inputs) < everything
    first = next(i for i, node in enumerate(graph.nodes) if node.op == "matmul")
    behind = {s.name for s in saved_tensors(graph) if s.first >= first}
    assert behind
    assert not behind & everything


def test_superneurons_offloads_checkpoints_and_computes_the_rest_again():
    graph = training_graph(MODELS["resnet18"](2))
    names = {s.name for s in saved_tensors(graph)}
    for policy, modes in (
        ("superneurons_speed", {Residency.RECOMPUTE}),
        ("superneurons_memory", {Residency.RECOMPUTE_EACH}),
        ("superneurons", {Residency.RECOMPUTE, Residency.RECOMPUTE_EACH}),
    ):
        found = POLICIES.resolve(policy)(step_of(graph))
        assert found.keys() == names
        for name, choice in found.items():
            moved = is_checkpoint(graph, name, names.__contains__)
            assert (choice is Residency.OFFLOAD) == moved
            assert moved or choice in modes
    assert any(graph.producers[name].traits.expensive for name in names)


def test_checkpointing_keeps_results_of_blocks_and_recomputes_the_rest():
    graph = training_graph(MODELS["resnet18"](2))
    ends = block_ends(graph)
    assert len(ends) == 8
    assert {graph.producers[name].op for name in ends} <= {"add", "relu"}
    step = step_of(graph, 0.0)
    names = {s.name for s in saved_tensors(graph) if s.producer.remakes(s.name)}
    for policy, choice in (
        ("checkpoint_blocks", Residency.KEEP),
        ("offload_checkpoints", Residency.OFFLOAD),
        ("checkpoint_some_blocks", Residency.KEEP),
    ):
        found = POLICIES.resolve(policy)(step)
        assert {n for n, r in found.items() if r is not Residency.RECOMPUTE} == ends
        assert all(found[name] is choice for name in ends)
        assert found.keys() | ends == names | ends
    again = POLICIES.resolve("selective_checkpointing")(step)
    kept = names - {n for n, r in again.items() if r is Residency.RECOMPUTE}
    assert {graph.producers[name].op for name in kept} == {"conv"}
    assert POLICIES.resolve("knapsack")(step).keys() == names
    plain = training_graph(MODELS["vgg16"](2))  # without joins: it has segments
    assert 2 < len(block_ends(plain)) < len(saved_tensors(plain)) / 2


@pytest.mark.parametrize("policy", ["knapsack", "checkpoint_some_blocks"])
def test_checkpointing_recomputes_no_more_than_a_budget_asks_for(policy):
    graph = training_graph(MODELS["resnet18"](2))
    total = sum(s.nbytes for s in graph.tensors.values())
    decide = POLICIES.resolve(policy)
    counts = [
        sum(r is Residency.RECOMPUTE for r in decide(step_of(graph, b)).values())
        for b in (0.0, total / 4, total / 2, 2 * total)
    ]
    assert counts[0] >= counts[1] >= counts[2] >= counts[3] == 0
    assert counts[0] > counts[2]


def test_cost_based_takes_more_as_the_budget_shrinks_and_recomputes_for_a_slow_link():
    graph = alexnet()
    policy = POLICIES.resolve("cost_based")
    total = sum(s.nbytes for s in graph.tensors.values())
    sizes = [len(policy(step_of(graph, total * part / 8))) for part in range(9)]
    assert all(one >= two for one, two in itertools.pairwise(sizes))
    assert sizes[0] == len(saved_tensors(graph))
    assert policy(step_of(graph)) == {}
    for rate, again in ((1e12, False), (1.0, True)):
        found = policy(StepRequest(graph, flat_profile(graph, rate=rate), 0.0))
        assert (Residency.RECOMPUTE in found.values()) == again


@pytest.mark.parametrize("name", ["relu", "bias"])
def test_what_overwrites_a_convolution_counts_for_it(name):
    g = GraphBuilder()
    x = g.conv(g.input("image", (2, 3, 4, 4)), 3, 3, padding=1)
    x = g.relu(x)
    graph = g.build(x)
    (node,) = (n for n in graph.nodes if n.op == name)
    assert is_checkpoint(graph, node.outputs[0], lambda _: False)
    assert not is_checkpoint(graph, node.outputs[0], lambda _: True)


@pytest.fixture(scope="module")
def backend():
    return get_backend("cpu")


def results(backend, graph, seed):
    """Outputs, gradients and what outlives the step, after one step."""
    values = execute(backend, graph, feeds(graph, seed))
    kept = [spec.name for spec in graph.with_role(*PERSISTENT)]
    gradients = [g for g in graph.gradients.values() if graph.readers[g] == ()]
    return {name: values[name] for name in (*graph.outputs, *gradients, *kept)}


@examples(40)
@given(data=st.data())
def test_values_are_identical(backend, data):
    graph = data.draw(training_graphs(updates=data.draw(st.booleans())))
    residency = data.draw(residencies(graph))
    again = in_place(Rematerializer(graph)(residency))
    expected = results(backend, graph, 1)
    found = results(backend, again, 1)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@examples(60)
@given(data=st.data())
def test_what_is_known_of_a_rewritten_graph_is_what_it_would_find_out(data):
    """However often the same rewriter has made others before."""
    graph = data.draw(training_graphs(updates=data.draw(st.booleans())))
    rewrite = Rematerializer(graph)
    assert rewrite({}) is graph
    rewrite(data.draw(residencies(graph)))
    residency = data.draw(residencies(graph))
    again, other = rewrite(residency), Rematerializer(graph)(residency)
    assert (again.nodes, dict(again.tensors)) == (other.nodes, dict(other.tensors))
    for found in (again, in_place(again)):
        checked = Graph(
            found.tensors,
            found.nodes,
            found.outputs,
            found.gradients,
            found.initializers,
        )
        assert found.storages == checked.storages
        assert found.inputs == checked.inputs


@examples(100)
@given(data=st.data())
def test_uses_of_a_rewritten_graph_follow_from_those_of_the_graph(data):
    graph = data.draw(training_graphs(updates=data.draw(st.booleans())))
    if data.draw(st.booleans()):
        graph = data.draw(foreign(graph))
    rewriter, known = Rematerializer(graph), Touches(graph)
    for _ in range(2):
        again, changes = rewriter.rewrite(data.draw(residencies(graph)))
        if changes is None:
            continue
        assert len(again.nodes) == len(graph.nodes) + len(changes.copies)
        found = known.with_nodes(again, changes.copies, changes.rebound)
        expected = touches(again)
        assert found == expected
        assert list(found[0]) == list(expected[0])


@examples(60)
@given(data=st.data())
def test_uses_found_beside_what_is_in_place_are_those_of_the_graph(data):
    graph = data.draw(training_graphs(updates=data.draw(st.booleans())))
    final, uses = in_place_with_uses(
        Rematerializer(graph)(data.draw(residencies(graph)))
    )
    assert uses == uses_of(final)


def block(*, fuse=False):
    g = GraphBuilder()
    x = g.input("image", (3, 4, 4, 4))
    x = g.conv(x, 4, 3, padding=1, bias=False)
    x = g.dropout(g.relu(g.batch_norm(x)), 0.5)
    label = g.input("label", (3,), "int64")
    graph = g.build(g.softmax_cross_entropy(g.linear(g.flatten(x), 3), label))
    return training_graph(fuse_elementwise(graph) if fuse else graph)


@pytest.mark.parametrize("mode", RECOMPUTED)
def test_a_batch_norm_that_runs_again_by_itself_or_fused_updates_nothing(mode):
    """By itself it is applied again by its statistics."""
    graph, fused = block(), block(fuse=True)
    again, fused = (
        Rematerializer(g)({saved.name: mode for saved in saved_tensors(g)})
        for g in (graph, fused)
    )
    (norm,) = (node for node in again.nodes if node.op == "batch_norm")
    copies = [node for node in again.nodes if origin(node.name) == norm.name][1:]
    assert {node.op for node in copies} == {"batch_norm_apply"}
    for node in copies:
        assert not node.mutates
        assert node.inputs[-2:] == norm.outputs[1:]
    norms = [node for node in fused.nodes if node.op == "batch_norm_relu"]
    updates = [node.attrs["update"] for node in norms]
    assert updates == [True] + [False] * (len(norms) - 1)
    assert [bool(node.mutates) for node in norms] == updates
    assert len(norms) > 1


def test_what_nobody_saved_is_computed_again_with_what_needs_it():
    """Else the normalised values would live on instead of the activations."""
    graph = block()
    (relu,) = (n for n in graph.nodes if n.op == "relu")
    again = Rematerializer(graph)({relu.outputs[0]: Residency.RECOMPUTE})
    copies = [n.op for n in again.nodes if "~" in n.name]
    assert copies == ["batch_norm_apply", "relu"]
    (norm,) = (n for n in graph.nodes if n.op == "batch_norm")
    readers = again.readers[norm.outputs[0]]
    assert all(node.phase is Phase.FORWARD for node in readers)


def test_the_modes_differ_in_how_often():
    g = GraphBuilder()
    x = g.conv(g.input("image", (2, 3, 4, 4)), 3, 3, padding=1)
    x = g.sigmoid(x)
    y = g.multiply(g.gelu(x), x)
    graph = training_graph(g.build(g.mean_squared_error(y, g.input("t", g.shape(y)))))
    (saved,) = (s for s in saved_tensors(graph) if s.producer.op == "sigmoid")
    counts = [
        sum(n.op == "sigmoid" for n in Rematerializer(graph)({saved.name: mode}).nodes)
        for mode in RECOMPUTED
    ]
    backward = [n for n in graph.readers[saved.name] if n.phase is Phase.BACKWARD]
    assert counts == [2, 1 + len(backward), 1 + len(backward)]
    assert len(backward) > 1


def test_long_chains_need_no_recursion():
    g = GraphBuilder()
    x = g.input("x", (2, 3))
    x = g.linear(x, 3)
    for _ in range(3000):
        x = g.tanh(x)
    graph = training_graph(g.build(g.mean_squared_error(x, g.input("t", (2, 3)))))
    saved = {s.name: Residency.RECOMPUTE for s in saved_tensors(graph)}
    again = Rematerializer(graph)(saved)
    assert len(again.nodes) >= len(graph.nodes) + 3000
