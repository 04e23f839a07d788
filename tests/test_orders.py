import random
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.graph import Graph, Node, Phase
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import dependencies
from mucudnn.passes.ordering import ORDERS, Footprint, depth_first, least_peak
from tests.examples import examples
from tests.graphs import NETWORKS, Symbols, graphs, scratch
from tests.plain_schedule import keep_all, memory_curve, peak_bytes
from tests.schedule_oracle import verify


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


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("limit", [10, 20_000])
def test_networks(name, limit):
    graph = in_place(with_updates(NETWORKS[name](), Momentum()))
    workspaces = {node.name: 5000 for node in graph.nodes if node.op == "conv"}
    symbols = Symbols()
    expected = symbols.meaning(graph)
    built = peak_bytes(graph, workspaces)
    for order in ORDERS.table.values():
        assert symbols.meaning(order(graph, workspaces)) == expected
    other = least_peak(graph, workspaces, state_limit=limit)
    assert symbols.meaning(other) == expected
    assert peak_bytes(other, workspaces) <= built
    turn = [node.phase is Phase.FORWARD for node in other.nodes]
    assert turn == sorted(turn, reverse=True)


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


def test_branches_one_by_one_need_less():
    graph = branches()
    parameters = sum(s.nbytes for s in graph.with_role(Role.PARAMETER))
    wide, narrow = 16 * 64 * 4, 64 * 4
    assert peak_bytes(graph) == parameters + 4 * wide + narrow
    for order in (least_peak, depth_first):
        assert peak_bytes(order(graph)) == parameters + wide + 4 * narrow


def test_depth_first_walks_the_first_branch_last():
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


def test_gradients_of_weights_come_with_their_layer():
    graph = depth_first(NETWORKS["chain"]())
    back = [node for node in graph.nodes if node.phase is Phase.BACKWARD]
    names = [node.op for node in back if node.op in ("bias_grad", "relu_grad")]
    assert names == ["relu_grad", "bias_grad"] * 4


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


def test_ten_thousand_nodes():
    b = GraphBuilder()
    x = b.input("x", (1, 2, 2, 2))
    for _ in range(1000):
        y = b.relu(b.conv(x, 2, 1))
        x = b.add(x, b.tanh(y))
    graph = b.build(x)
    workspaces = {node.name: 7 for node in graph.nodes}
    for order in ORDERS.table.values():
        assert len(order(graph, workspaces).nodes) == len(graph.nodes)


def test_unknown_orders_list_the_known():
    with pytest.raises(ValueError, match="builder, depth_first, least_peak"):
        ORDERS.resolve("random")
