import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import get_backend
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.optimizers import Adam, Sgd
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import live_at_end, live_ranges, rounded
from mucudnn.passes.ordering import ORDERS
from tests.graphs import NETWORKS, Symbols, chain, graphs, scratch
from tests.numpy_runner import execute
from tests.plain_schedule import keep_all, memory_curve, peak_bytes
from tests.schedule_oracle import verify


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


def overwritten(before, after):
    """Result -> what it overwrites, for all that the pass put in place."""
    return {
        name: spec.alias
        for name, spec in after.tensors.items()
        if spec.alias is not None and before.tensors[name].alias is None
    }


def keeps_values(graph):
    changed = in_place(graph)
    symbols = Symbols()
    assert symbols.meaning(changed) == symbols.meaning(graph)
    assert peak_bytes(changed) <= peak_bytes(graph)
    verify(keep_all(changed))
    assert in_place(changed) == changed


@given(graphs(most=20))
def test_in_place_changes_no_value(graph):
    keeps_values(graph)


@given(graphs(most=20))
def test_only_what_a_kernel_can_do_and_nobody_else_needs(graph):
    changed = in_place(graph)
    for name, source in overwritten(graph, changed).items():
        node = changed.producers[name]
        at = node.inputs.index(source)
        assert at in node.traits.overwrites
        shared = [
            t for t in node.inputs if changed.storages[t] == changed.storages[name]
        ]
        assert shared == [source]
        assert changed.tensors[source].shape == changed.tensors[name].shape
        owner = changed.tensors[changed.storages[name]]
        assert owner.role in (Role.ACTIVATION, Role.GRADIENT)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name):
    graph = with_updates(NETWORKS[name](), Adam())
    assert len(overwritten(graph, in_place(graph))) > 2
    keeps_values(graph)


def test_bias_and_activation_share_the_bytes_of_the_convolution():
    b = GraphBuilder()
    x = b.input("x", (1, 2, 4, 4))
    y = b.relu(b.conv(x, 2, 3, padding=1))
    graph = in_place(b.build(b.scale(y, 2.0)))
    assert graph.storages[graph.outputs[0]] == graph.nodes[0].outputs[0]


def test_what_must_not_be_overwritten():
    b = GraphBuilder()
    x = b.input("x", (4,))
    from_input = b.relu(x)
    twice = b.add(from_input, from_input)
    output = b.relu(twice)
    beside = b.relu(output)
    view = b.reshape(beside, (2, 2))
    read_later = b.relu(beside)
    other_shape = b.relu(view)
    graph = b.build(output, read_later, other_shape)
    assert overwritten(graph, in_place(graph)) == {output: twice, other_shape: view}


def test_gradients_that_are_asked_for_are_not_overwritten():
    graph = NETWORKS["residual"]()
    changed = in_place(graph)
    asked = {changed.storages[g] for g in graph.gradients.values()}
    assert asked <= live_at_end(changed)
    assert len(asked) == len(graph.gradients)


@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_compute_the_same_bits_in_any_order_and_in_place(name):
    backend = get_backend("cpu")
    rng = np.random.default_rng(0)
    plain = with_updates(NETWORKS[name](), Adam(), when="late")
    feeds = {
        n: np.abs(rng.normal(size=plain.tensors[n].shape)).astype(
            plain.tensors[n].dtype
        )
        for n in plain.inputs
    }

    def run(graph):
        values = execute(backend, graph, {n: v.copy() for n, v in feeds.items()})
        results = (*graph.outputs, *(s.name for s in graph.with_role(*PERSISTENT)))
        return {n: values[n].tobytes() for n in results}

    expected = run(plain)
    early = with_updates(NETWORKS[name](), Adam())
    for order in ORDERS.table.values():
        assert run(in_place(order(early))) == expected
        assert run(order(in_place(early))) == expected
