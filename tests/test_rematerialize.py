"""Recomputing changes when values exist, never what they are."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import get_backend
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.graph import PERSISTENT, Graph, Phase
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.fusion import fuse_elementwise
from mucudnn.passes.graph.inplace import in_place, in_place_with_uses
from mucudnn.passes.graph.rematerialize import Rematerializer
from mucudnn.passes.liveness import Touches, touches, uses_of
from mucudnn.passes.residency import RECOMPUTED, Residency, saved_tensors
from mucudnn.passes.scheduling.problem import origin
from tests.examples import examples
from tests.numpy_runner import execute
from tests.random_graphs import feeds, foreign, residencies, training_graphs


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
    graph = data.draw(training_graphs(updates=data.draw(st.booleans())))
    again = Rematerializer(graph)(data.draw(residencies(graph)))
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


@examples(40)
@given(data=st.data())
def test_a_graph_rewritten_time_and_again_is_rewritten_anew(data):
    graph = data.draw(training_graphs())
    rewrite = Rematerializer(graph)
    for _ in range(3):
        residency = data.draw(residencies(graph))
        one, other = rewrite(residency), Rematerializer(graph)(residency)
        assert (one.nodes, dict(one.tensors)) == (other.nodes, dict(other.tensors))


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
def test_a_batch_norm_is_applied_again_by_its_statistics_and_updates_nothing(mode):
    graph = block()
    again = Rematerializer(graph)({saved.name: mode for saved in saved_tensors(graph)})
    (norm,) = (node for node in again.nodes if node.op == "batch_norm")
    copies = [node for node in again.nodes if origin(node.name) == norm.name][1:]
    assert {node.op for node in copies} == {"batch_norm_apply"}
    for node in copies:
        assert not node.mutates
        assert node.inputs[-2:] == norm.outputs[1:]


@pytest.mark.parametrize("mode", RECOMPUTED)
def test_a_fused_batch_norm_that_runs_again_updates_nothing(mode):
    graph = block(fuse=True)
    again = Rematerializer(graph)({saved.name: mode for saved in saved_tensors(graph)})
    norms = [node for node in again.nodes if node.op == "batch_norm_relu"]
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


def test_nothing_to_do_is_the_same_graph():
    graph = block()
    assert Rematerializer(graph)({"conv": Residency.OFFLOAD}) is graph


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
