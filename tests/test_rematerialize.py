"""Recomputing changes when values exist, never what they are."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import get_backend
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.graph import PERSISTENT, Phase
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.rematerialize import rematerialize
from mucudnn.passes.residency import RECOMPUTED, Residency, saved_tensors
from tests.examples import examples
from tests.numpy_runner import execute
from tests.random_graphs import feeds, residencies, training_graphs


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
    again = in_place(rematerialize(graph, residency))
    expected = results(backend, graph, 1)
    found = results(backend, again, 1)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def block():
    g = GraphBuilder()
    x = g.input("image", (3, 4, 4, 4))
    x = g.conv(x, 4, 3, padding=1, bias=False)
    x = g.dropout(g.relu(g.batch_norm(x)), 0.5)
    label = g.input("label", (3,), "int64")
    return training_graph(
        g.build(g.softmax_cross_entropy(g.linear(g.flatten(x), 3), label))
    )


@pytest.mark.parametrize("mode", RECOMPUTED)
def test_a_copied_batch_norm_updates_nothing(mode):
    graph = block()
    again = rematerialize(graph, {saved.name: mode for saved in saved_tensors(graph)})
    norms = [node for node in again.nodes if node.op == "batch_norm"]
    assert len(norms) > 1
    assert [node.attrs["update"] for node in norms] == [True] + [False] * (
        len(norms) - 1
    )
    assert [bool(node.mutates) for node in norms] == [True] + [False] * (len(norms) - 1)


def test_a_copied_dropout_draws_the_same_mask():
    graph = block()
    again = rematerialize(
        graph, {saved.name: Residency.RECOMPUTE for saved in saved_tensors(graph)}
    )
    forward = [n for n in again.nodes if n.op == "dropout" and "dropout" in n.name]
    assert len({(n.attrs["seed"], n.inputs[1]) for n in forward}) == 1
    assert len(forward) > 1


def test_what_nobody_saved_is_computed_again_with_what_needs_it():
    """Else the normalised values would live on instead of the activations."""
    graph = block()
    (relu,) = (n for n in graph.nodes if n.op == "relu")
    again = rematerialize(graph, {relu.outputs[0]: Residency.RECOMPUTE})
    copies = [n.op for n in again.nodes if "~" in n.name]
    assert copies == ["batch_norm", "relu"]
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
        sum(n.op == "sigmoid" for n in rematerialize(graph, {saved.name: mode}).nodes)
        for mode in RECOMPUTED
    ]
    backward = [n for n in graph.readers[saved.name] if n.phase is Phase.BACKWARD]
    assert counts == [2, 1 + len(backward)]
    assert len(backward) > 1


def test_nothing_to_do_is_the_same_graph():
    graph = block()
    assert rematerialize(graph, {"conv": Residency.OFFLOAD}) is graph


def test_long_chains_need_no_recursion():
    g = GraphBuilder()
    x = g.input("x", (2, 3))
    x = g.linear(x, 3)
    for _ in range(3000):
        x = g.tanh(x)
    graph = training_graph(g.build(g.mean_squared_error(x, g.input("t", (2, 3)))))
    saved = {s.name: Residency.RECOMPUTE for s in saved_tensors(graph)}
    again = rematerialize(graph, saved)
    assert len(again.nodes) >= len(graph.nodes) + 3000
