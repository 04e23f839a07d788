import itertools

import pytest
from hypothesis import assume, example, given, strategies as st

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
from tests.graphs import graphs, scratch
from tests.plain_schedule import keep_all, peak_bytes

RULES = {
    "lowest hole": lambda blocks: by_time(blocks, best_fit=False),
    "best hole": lambda blocks: by_time(blocks, best_fit=True),
    "on top": lambda blocks: on_top(blocks, range(len(blocks))),
    "in gaps": lambda blocks: in_gaps(blocks, range(len(blocks))),
}


MOMENTS = 12
EMPTY_ONES_BELOW = (
    [Block("0", 0, 0, 0), Block("1", 0, 0, 0), Block("2", 2, 0, 0)],
    {"0": 0, "1": 1},
)
"""An empty block fixed in the midst of a free one is in nobody's way."""

FIRST_IS_WRONG = (
    [Block("0", 3, 0, 1), Block("fixed", 2, 0, 0), Block("late", 3, 1, 1)],
    {"fixed": 0},
)
"""Every rule places the longest life first; the optimum has it last."""


@st.composite
def blocks(draw, most=25, least=0):
    """Blocks with names, sizes and lives at random."""
    moments = st.integers(0, MOMENTS)
    sizes = st.tuples(st.integers(least, 9), moments, moments)
    triples = draw(st.lists(sizes, min_size=1, max_size=most))
    return [
        Block(str(i), nbytes, min(a, b), max(a, b))
        for i, (nbytes, a, b) in enumerate(triples)
    ]


@st.composite
def partly_fixed(draw, most=25):
    """Blocks, and offsets of some that do not overlap, with holes between them."""
    some = draw(blocks(most))
    chosen = draw(st.sets(st.integers(0, len(some) - 1)))
    padded = [
        Block(b.name, b.nbytes + draw(st.integers(0, 3)), b.first, b.last)
        for i, b in enumerate(some)
        if i in chosen
    ]
    offsets = in_gaps(padded, range(len(padded)))
    return some, {b.name: o for b, o in zip(padded, offsets, strict=True)}


def assert_disjoint(spans):
    """No two of (first, last, low, high) share a moment and a byte."""
    for a, b in itertools.combinations(spans, 2):
        together = a[0] <= b[1] and b[0] <= a[1]
        assert not (together and a[2] < b[3] and b[2] < a[3]), (a, b)


def spans_of(some, offsets):
    return [
        (b.first, b.last, offset, offset + b.nbytes)
        for b, offset in zip(some, offsets, strict=True)
        if b.nbytes
    ]


def smallest_arena(some, fixed):
    """Exhaustive search over blocks that take bytes; empty ones lie anywhere.

    Take the blocks of the best arena in order of their offsets: placed as low as
    possible one after the other, none comes to lie higher than there. So one of all
    orders gives the best arena.
    """
    some = [b for b in some if b.nbytes]
    places = {i: fixed[b.name] for i, b in enumerate(some) if b.name in fixed}
    free = [i for i in range(len(some)) if i not in places]
    return min(
        max(o + b.nbytes for o, b in zip(offsets, some, strict=True))
        for order in itertools.permutations(free)
        for offsets in [in_gaps(some, order, fixed=places)]
    )


@pytest.mark.parametrize("rule", RULES)
@given(some=blocks(least=1))
def test_no_rule_overlaps(rule, some):
    offsets = RULES[rule](some)
    assert min(offsets) >= 0
    assert_disjoint(spans_of(some, offsets))


@given(some=blocks(least=1), work=st.sampled_from([0, 20_000]))
def test_packing_is_near_the_bound(some, work):
    bound = max(
        sum(b.nbytes for b in some if b.first <= moment <= b.last)
        for moment in range(MOMENTS + 1)
    )
    assert live_peak(some) == bound <= pack(some, work=work).nbytes <= 1.5 * bound


@given(case=partly_fixed(), work=st.sampled_from([0, 3_000, 100_000]))
def test_fixed_blocks_stay_and_the_others_lie_around_them(case, work):
    some, fixed = case
    packing = pack(some, fixed=fixed, work=work)
    assert packing.offsets.keys() == {b.name for b in some}
    assert {name: packing.offsets[name] for name in fixed} == fixed
    assert min(packing.offsets.values()) >= 0
    spans = spans_of(some, [packing.offsets[b.name] for b in some])
    assert_disjoint(spans)
    tops = [high for *_, high in spans]
    assert packing.nbytes == max(tops, default=0) >= live_peak(some)


@given(case=partly_fixed(most=6))
@example(case=EMPTY_ONES_BELOW)
@example(case=FIRST_IS_WRONG)
def test_a_few_blocks_around_fixed_ones_are_near_the_optimum(case):
    some, fixed = case
    assume(any(b.nbytes for b in some))
    best = smallest_arena(some, fixed)
    assert best <= pack(some, fixed=fixed, work=50_000).nbytes <= 1.2 * best


@given(some=blocks(), work=st.sampled_from([0, 3_000, 100_000]))
def test_fixing_all_blocks_where_they_were_put_changes_nothing(some, work):
    packing = pack(some, work=work)
    assert pack(some, fixed=packing.offsets, work=work) == packing


def test_both_ends_of_what_outlives_the_program_keep_their_place():
    """As a storage that is there from one run of a program to the next."""
    some = [Block("end", 6, 80, 99), Block("begin", 6, 0, 20)]
    some += [Block(str(i), 3, i, i + 7) for i in range(90)]
    packing = pack(some, fixed={"end": 0, "begin": 0})
    assert packing.offsets["end"] == packing.offsets["begin"] == 0
    assert packing.nbytes == live_peak(some)


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
