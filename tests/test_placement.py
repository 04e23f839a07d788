import itertools

import pytest
from hypothesis import given, strategies as st

from mucudnn.ir.graph import PERSISTENT
from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import ALIGNMENT, live_ranges, rounded
from mucudnn.passes.ordering import ORDERS
from mucudnn.passes.placement.layout import lay_out
from mucudnn.passes.placement.packing import (
    Block,
    by_time,
    in_gaps,
    live_peak,
    on_top,
    pack,
)
from tests.graphs import NETWORKS, graphs, scratch
from tests.plain_schedule import keep_all, peak_bytes

RULES = {
    "lowest hole": lambda blocks: by_time(blocks, best_fit=False),
    "best hole": lambda blocks: by_time(blocks, best_fit=True),
    "on top": lambda blocks: on_top(blocks, range(len(blocks))),
    "in gaps": lambda blocks: in_gaps(blocks, range(len(blocks))),
}


@st.composite
def blocks(draw):
    """Blocks with names, sizes and lives at random."""
    triples = draw(
        st.lists(
            st.tuples(st.integers(1, 9), st.integers(0, 12), st.integers(0, 12)),
            min_size=1,
            max_size=25,
        )
    )
    return [
        Block(str(i), nbytes, min(a, b), max(a, b))
        for i, (nbytes, a, b) in enumerate(triples)
    ]


def assert_disjoint(spans):
    """No two of (first, last, low, high) share a moment and a byte."""
    for a, b in itertools.combinations(spans, 2):
        together = a[0] <= b[1] and b[0] <= a[1]
        assert not (together and a[2] < b[3] and b[2] < a[3]), (a, b)


def spans_of(some, offsets):
    return [
        (b.first, b.last, offset, offset + b.nbytes)
        for b, offset in zip(some, offsets, strict=True)
    ]


@pytest.mark.parametrize("rule", RULES)
@given(some=blocks())
def test_no_rule_overlaps(rule, some):
    offsets = RULES[rule](some)
    assert min(offsets) >= 0
    assert_disjoint(spans_of(some, offsets))


@given(some=blocks(), work=st.sampled_from([0, 20_000]))
def test_packing_is_valid_and_near_the_bound(some, work):
    packing = pack(some, work=work)
    offsets = [packing.offsets[block.name] for block in some]
    assert_disjoint(spans_of(some, offsets))
    assert packing.nbytes == max(s[3] for s in spans_of(some, offsets))
    bound = max(
        sum(b.nbytes for b in some if b.first <= moment <= b.last)
        for moment in range(13)
    )
    assert live_peak(some) == bound <= packing.nbytes
    assert packing.nbytes <= 1.5 * bound


def test_nested_lives_meet_the_bound():
    some = [Block(str(i), 3 + 7 * i % 5, i, 100 - i) for i in range(40)]
    some += [Block(f"w{i}", 10, i, i) for i in range(100)]
    assert pack(some).nbytes == live_peak(some)


def test_nothing_to_pack():
    assert pack([]).nbytes == 0
    assert pack([Block("empty", 0, 0, 3)]).offsets == {"empty": 0}


def check(graph, workspaces):
    """Brute force: nothing that is needed at the same time overlaps."""
    placement = lay_out(keep_all(graph, workspaces))
    ranges = live_ranges(graph)
    resident = {spec.name for spec in graph.with_role(*PERSISTENT)} & ranges.keys()
    assert placement.offsets.keys() == ranges.keys() - resident
    spans = [
        (r.first, r.last, offset, offset + graph.tensors[name].nbytes)
        for name, r in ranges.items()
        if name not in resident
        for offset in placement.offsets[name]
    ]
    for i, node in enumerate(graph.nodes):
        if nbytes := workspaces.get(node.name, 0):
            offset = placement.workspace_offsets[node.name]
            spans.append((i, i, offset, offset + nbytes))
    assert_disjoint(spans)
    assert all(low % ALIGNMENT == 0 and low >= 0 for _, _, low, _ in spans)
    assert max((high for *_, high in spans), default=0) <= placement.nbytes
    beside = sum(rounded(graph.tensors[name].nbytes) for name in resident)
    peak = peak_bytes(graph, workspaces, granularity=ALIGNMENT) - beside
    assert placement.live_peak == peak <= placement.nbytes
    return placement


@given(st.data())
def test_placement_never_overlaps(data):
    graph = data.draw(graphs(most=20))
    workspaces = data.draw(scratch(graph))
    check(graph, workspaces)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("order", ORDERS.table)
def test_small_networks(name, order):
    graph = in_place(with_updates(NETWORKS[name](), Momentum()))
    workspaces = {node.name: 5000 for node in graph.nodes if node.op == "conv"}
    ordered = ORDERS.resolve(order)(graph, workspaces)
    assert check(ordered, workspaces).fragmentation <= 0.03


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *(("alexnet", "least_peak"), ("googlenet", "least_peak")),
        *(("resnet50", "builder"), ("unet2d", "builder")),
    ],
)
def test_models_stay_within_three_percent_of_the_bound(name, order):
    graph = training_graph(get_model(name)(batch=8))
    graph = in_place(with_updates(graph, Momentum()))
    workspaces = {node.name: 8 << 20 for node in graph.nodes if node.op == "conv"}
    ordered = ORDERS.resolve(order)(graph, workspaces)
    placement = lay_out(keep_all(ordered, workspaces))
    assert 0 <= placement.fragmentation <= 0.03


def test_the_search_goes_on_where_every_rule_falls_short():
    graph = training_graph(get_model("cifar_quick")(batch=32))
    graph = in_place(with_updates(graph, Momentum()))
    ordered = ORDERS.resolve("depth_first")(graph)
    spans = [
        Block(name, -(-graph.tensors[name].nbytes // 512) * 512, r.first, r.last)
        for name, r in live_ranges(ordered).items()
        if graph.tensors[name].role not in PERSISTENT
    ]
    bound = live_peak(spans)
    assert pack(spans, work=0).nbytes > 1.1 * bound
    assert pack(spans).nbytes == bound
