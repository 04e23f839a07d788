import itertools

from hypothesis import assume, example, given, strategies as st

from mucudnn.passes.placement.packing import Block, in_gaps, live_peak, pack

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
def blocks(draw, most=25):
    """Blocks with names, sizes and lives at random."""
    triples = draw(
        st.lists(
            st.tuples(
                st.integers(0, 9), st.integers(0, MOMENTS), st.integers(0, MOMENTS)
            ),
            min_size=1,
            max_size=most,
        )
    )
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


def overlapping(some, offsets):
    """All pairs that share a moment and a byte, by definition."""
    return [
        (a, b)
        for a, b in itertools.combinations([b for b in some if b.nbytes], 2)
        if a.first <= b.last
        and b.first <= a.last
        and offsets[a.name] < offsets[b.name] + b.nbytes
        and offsets[b.name] < offsets[a.name] + a.nbytes
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


@given(case=partly_fixed(), work=st.sampled_from([0, 3_000, 100_000]))
def test_fixed_blocks_stay_and_the_others_lie_around_them(case, work):
    some, fixed = case
    packing = pack(some, fixed=fixed, work=work)
    assert packing.offsets.keys() == {b.name for b in some}
    assert {name: packing.offsets[name] for name in fixed} == fixed
    assert min(packing.offsets.values()) >= 0
    assert overlapping(some, packing.offsets) == []
    tops = [packing.offsets[b.name] + b.nbytes for b in some if b.nbytes]
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


def test_a_hole_below_and_between_fixed_blocks_is_used():
    fixed = {"a": 4, "b": 12}
    some = [Block("a", 4, 0, 9), Block("b", 4, 0, 9)]
    some += [Block("below", 4, 0, 9), Block("between", 4, 3, 5)]
    packing = pack(some, fixed=fixed)
    assert packing.nbytes == 16
    assert {packing.offsets["below"], packing.offsets["between"]} == {0, 8}


def test_both_ends_of_what_outlives_the_program_keep_their_place():
    """As a storage that is there from one run of a program to the next."""
    some = [Block("end", 6, 80, 99), Block("begin", 6, 0, 20)]
    some += [Block(str(i), 3, i, i + 7) for i in range(90)]
    packing = pack(some, fixed={"end": 0, "begin": 0})
    assert packing.offsets["end"] == packing.offsets["begin"] == 0
    assert packing.nbytes == live_peak(some)
