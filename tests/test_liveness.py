import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import get_backend
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.graph import PERSISTENT, Graph, Node, Phase
from mucudnn.ir.optimizers import Adam, Sgd
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import dependencies, live_at_end, rounded
from mucudnn.passes.ordering import ORDERS, Footprint, depth_first, least_peak
from tests.examples import examples
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


def test_gradients_live_to_the_end_unless_an_update_uses_them():
    for graph in (chain(3), in_place(NETWORKS["residual"]())):
        gradients = {graph.storages[g] for g in graph.gradients.values()}
        assert len(gradients) == len(graph.gradients)
        assert gradients <= live_at_end(graph)
        updated = with_updates(graph, Sgd())
        assert not gradients & live_at_end(updated)
        late = with_updates(graph, Sgd(), when="late")
        assert peak_bytes(updated) <= peak_bytes(late)
    tensors = {
        "w": TensorSpec("w", (3,), role=Role.PARAMETER),
        "left over": TensorSpec("left over", (100,)),
    }
    assert peak_bytes(Graph(tensors, (), ())) == 12
    assert memory_curve(Graph(tensors, (), ())) == ()


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
def test_in_place_changes_no_value_and_only_what_nobody_else_needs(graph):
    keeps_values(graph)
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


def test_bias_and_activation_share_bytes_but_what_is_read_is_not_overwritten():
    b = GraphBuilder()
    x = b.input("x", (1, 2, 4, 4))
    y = b.relu(b.conv(x, 2, 3, padding=1))
    graph = in_place(b.build(b.scale(y, 2.0)))
    assert graph.storages[graph.outputs[0]] == graph.nodes[0].outputs[0]
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
    assert len(overwritten(early, in_place(early))) > 2
    keeps_values(early)
    for order in ORDERS.table.values():
        assert run(in_place(order(early))) == expected
        assert run(order(in_place(early))) == expected


def orders(graph):
    """Every order that computes the same, found by computing it."""
    symbols = Symbols()
    expected, left = symbols.meaning(graph)
    inputs = set(graph.inputs)

    def extend(done, known, memory):
        if len(done) == len(graph.nodes):
            if symbols.left(graph, memory) == left:
                yield tuple(done)
            return
        forward = any(n.phase is Phase.FORWARD and n not in done for n in graph.nodes)
        for node in graph.nodes:
            late = forward and node.phase is not Phase.FORWARD
            if node in done or late or not known.issuperset(node.inputs):
                continue
            then = dict(memory)
            if symbols.run(graph, node, then) == expected[node.name]:
                yield from extend([*done, node], known | {*node.outputs}, then)

    yield from extend([], inputs, symbols.start(graph))


def reordered(graph, seed):
    """Some valid order, drawn at random."""
    chance = random.Random(seed)
    before = dependencies(graph)
    left = set(range(len(graph.nodes)))
    order = []
    while left:
        ready = sorted(n for n in left if left.isdisjoint(before[n]))
        order.append(chance.choice(ready))
        left.remove(order[-1])
    return order


@given(graphs(most=15), st.integers(0, 99))
def test_dependencies_fix_every_value(graph, seed):
    order = reordered(graph, seed)
    other = replace(graph, nodes=tuple(graph.nodes[n] for n in order))
    symbols = Symbols()
    assert symbols.meaning(other) == symbols.meaning(graph)


@given(st.data())
def test_the_footprint_of_an_order_is_that_of_its_graph(data):
    graph = data.draw(graphs(most=15))
    workspaces = data.draw(scratch(graph))
    order = reordered(graph, data.draw(st.integers(0, 99)))
    other = replace(graph, nodes=tuple(graph.nodes[n] for n in order))
    footprint = Footprint.of(graph, workspaces)
    assert footprint.curve(order) == list(memory_curve(other, workspaces))


@examples(150)
@given(st.data())
def test_least_peak_equals_exhaustive_search(data):
    graph = data.draw(graphs(least=2, most=6, phases=True))
    workspaces = data.draw(scratch(graph))
    best = min(
        peak_bytes(replace(graph, nodes=order), workspaces) for order in orders(graph)
    )
    assert peak_bytes(least_peak(graph, workspaces), workspaces) == best


@examples(100)
@given(st.data())
def test_every_order_is_valid_and_the_search_never_worse(data):
    graph = data.draw(graphs(most=25, phases=data.draw(st.booleans())))
    workspaces = data.draw(scratch(graph))
    symbols = Symbols()
    expected = symbols.meaning(graph)
    for order in ORDERS.table.values():
        other = order(graph, workspaces)
        assert symbols.meaning(other) == expected
        verify(keep_all(other, workspaces))
    for limit in (0, 3, 1000):
        other = least_peak(graph, workspaces, state_limit=limit)
        assert symbols.meaning(other) == expected
        assert peak_bytes(other, workspaces) <= peak_bytes(graph, workspaces)


def branches():
    """A wide branch that ends narrow, built after one that stays wide."""
    b = GraphBuilder()
    x = b.input("x", (1, 1, 8, 8))
    ends = []
    for _ in range(4):
        wide = b.conv(x, 16, 1, bias=False)
        ends.append(b.conv(wide, 1, 1, bias=False))
    interleaved = b.build(b.concat(ends))
    nodes = interleaved.nodes
    return replace(interleaved, nodes=(*nodes[:8:2], *nodes[1:8:2], nodes[8]))


def test_branches_one_by_one_need_less_by_each_order():
    graph = branches()
    parameters = sum(s.nbytes for s in graph.with_role(Role.PARAMETER))
    wide, narrow = 16 * 64 * 4, 64 * 4
    assert peak_bytes(graph) == parameters + 4 * wide + narrow
    for order in (least_peak, depth_first):
        assert peak_bytes(order(graph)) == parameters + wide + 4 * narrow
    graph = depth_first(NETWORKS["chain"]())
    back = [node for node in graph.nodes if node.phase is Phase.BACKWARD]
    names = [node.op for node in back if node.op in ("bias_grad", "relu_grad")]
    assert names == ["relu_grad", "bias_grad"] * 4
    b = GraphBuilder()
    x = b.relu(b.input("x", (2,)))
    ends = []
    for name in "abc":
        with b.scope(name):
            ends.append(b.tanh(b.relu(x)))
    graph = b.build(b.add(b.add(ends[0], ends[1]), ends[2]))
    route = [node.name for node in depth_first(graph).nodes]
    walked = ["b/relu", "b/tanh", "c/relu", "c/tanh", "a/relu", "a/tanh"]
    assert route == ["relu", *walked, "add", "add.1"]


def test_state_is_read_before_it_changes():
    tensors = {
        "x": TensorSpec("x", (1,), role=Role.INPUT),
        "s": TensorSpec("s", (1,), role=Role.STATE),
        "a": TensorSpec("a", (9,)),
        "b": TensorSpec("b", (9,)),
    }
    nodes = (
        Node("before", "add", ("x", "s"), ("a",)),
        Node("change", "momentum", ("x", "s"), (), mutates=("s",)),
        Node("after", "add", ("x", "s"), ("b",)),
        Node("again", "momentum", ("a", "s"), (), mutates=("s",)),
    )
    assert dependencies(Graph(tensors, nodes, ("b",))) == ((), (0,), (1,), (0, 1, 2))


def test_ten_thousand_nodes_are_ordered():
    b = GraphBuilder()
    x = b.input("x", (1, 2, 2, 2))
    for _ in range(1000):
        y = b.relu(b.conv(x, 2, 1))
        x = b.add(x, b.tanh(y))
    for _ in range(5000):
        x = b.reshape(b.scale(x, 1.0), (1, 2, 2, 2))
    graph = b.build(x)
    workspaces = {node.name: 7 for node in graph.nodes}
    for order in ORDERS.table.values():
        found = order(graph, workspaces)
        assert len(found.nodes) == len(graph.nodes)
        assert peak_bytes(found) == peak_bytes(graph)
