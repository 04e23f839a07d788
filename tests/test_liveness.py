import pytest
from hypothesis import given, strategies as st

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.optimizers import Sgd
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import live_at_end, live_ranges, rounded
from tests.graphs import NETWORKS, chain, graphs, scratch
from tests.plain_schedule import memory_curve, peak_bytes


def alive(graph, storage, at):
    """By definition: there already, and needed now, later, or by the caller."""
    touched = [
        i
        for i, node in enumerate(graph.nodes)
        if storage in [graph.storages[name] for name in node.tensors]
    ]
    role = graph.tensors[storage].role
    asked = storage in [graph.storages[name] for name in graph.outputs]
    if role in PERSISTENT:
        return True
    if not touched:
        return role is Role.INPUT
    there = role is Role.INPUT or touched[0] <= at
    return there and (asked or at <= touched[-1])


@given(st.data())
def test_the_curve_is_the_sum_of_what_is_alive(data):
    graph = data.draw(graphs())
    workspaces = data.draw(scratch(graph))
    grain = data.draw(st.sampled_from([1, 7, 512]))
    owners = [name for name in graph.tensors if graph.storages[name] == name]
    expected = [
        sum(
            rounded(graph.tensors[s].nbytes, grain)
            for s in owners
            if alive(graph, s, i)
        )
        + rounded(workspaces.get(node.name, 0), grain)
        for i, node in enumerate(graph.nodes)
    ]
    curve = memory_curve(graph, workspaces, granularity=grain)
    assert list(curve) == expected
    assert peak_bytes(graph, workspaces, granularity=grain) == max(expected)


def test_a_graph_without_nodes():
    tensors = {
        "w": TensorSpec("w", (3,), role=Role.PARAMETER),
        "left over": TensorSpec("left over", (100,)),
    }
    assert peak_bytes(Graph(tensors, (), ())) == 12
    assert memory_curve(Graph(tensors, (), ())) == ()


def test_views_keep_the_storage_alive():
    b = GraphBuilder()
    x = b.input("x", (2, 3))
    y = b.scale(x, 2.0)
    view = b.reshape(y, (6,))
    z = b.scale(x, 3.0)
    graph = b.build(b.scale(view, 2.0), z)
    ranges = live_ranges(graph)
    assert view not in ranges
    assert (ranges[y].first, ranges[y].last) == (0, 3)
    assert (ranges[x].first, ranges[x].last) == (0, 2)
    assert ranges[z].last == len(graph.nodes)


def test_gradients_live_to_the_end_unless_an_update_uses_them():
    graph = chain(3)
    gradients = {graph.storages[g] for g in graph.gradients.values()}
    assert gradients <= live_at_end(graph)
    updated = with_updates(graph, Sgd())
    assert not gradients & live_at_end(updated)
    late = with_updates(graph, Sgd(), when="late")
    assert peak_bytes(updated) <= peak_bytes(late)


@pytest.mark.parametrize("name", NETWORKS)
def test_liveness_saves_memory(name):
    graph = NETWORKS[name]()
    total = sum(graph.tensors[name].nbytes for name in live_ranges(graph))
    assert peak_bytes(graph) < total


def test_ten_thousand_nodes():
    b = GraphBuilder()
    x = b.input("x", (4,))
    for _ in range(10_000):
        x = b.reshape(b.scale(x, 1.0), (4,))
    assert peak_bytes(b.build(x)) == 32
