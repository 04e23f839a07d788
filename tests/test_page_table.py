"""Tensors in pieces: free bytes become one tensor by address, and nothing overlaps."""

from itertools import pairwise

from hypothesis import given, strategies as st

from mucudnn.passes.placement.layout import Extent, PageTable, with_addresses
from mucudnn.passes.placement.paging import FreeMemory

CHUNK = 8


@st.composite
def extents(draw):
    """Bytes that are taken, apart from one another."""
    marks = draw(st.lists(st.integers(0, 10 * CHUNK), unique=True, max_size=12))
    ends = sorted(marks)[: len(marks) // 2 * 2]
    return [Extent(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True)]


def bytes_of(pieces):
    return [i for piece in pieces for i in range(piece.start, piece.stop)]


def largest(free):
    """By trying every byte to begin at, every order of chunks that can follow."""
    whole = [c for c in range(10) if set(range(c * CHUNK, (c + 1) * CHUNK)) <= free]
    ends = [
        sum(1 for _ in iter_while(free, range(c * CHUNK - 1, -1, -1), CHUNK - 1))
        for c in range(1, 11)
        if c - 1 not in whole
    ]
    starts = [
        sum(1 for _ in iter_while(free, range(c * CHUNK, 10 * CHUNK), CHUNK - 1))
        for c in range(10)
        if c not in whole
    ]
    runs, best = 0, 0
    for at in range(10 * CHUNK + 1):
        runs = runs + 1 if at in free else 0
        best = max(best, runs)
    pieces = max(ends, default=0) + len(whole) * CHUNK + max(starts, default=0)
    return max(best, pieces)


def iter_while(free, numbers, most):
    for count, number in enumerate(numbers):
        if number not in free or count == most:
            return
        yield number


@given(extents())
def test_the_largest_tensor_is_all_that_chunks_can_make_one_of(taken):
    free = set(range(10 * CHUNK)) - set(bytes_of(taken))
    memory = FreeMemory(taken, 10 * CHUNK, CHUNK)
    assert memory.most == largest(free)
    assert memory.find(memory.most + 1) is None
    if memory.most:
        assert sum(p.stop - p.start for p in memory.find(memory.most)) == memory.most


@given(extents(), st.integers(1, 10 * CHUNK))
def test_what_is_found_is_free_and_in_a_row_by_address(taken, nbytes):
    free = set(range(10 * CHUNK)) - set(bytes_of(taken))
    memory = FreeMemory(taken, 10 * CHUNK, CHUNK)
    found = memory.find(nbytes)
    assert (found is None) == (nbytes > memory.most)
    if found is None:
        return
    mine = bytes_of(found)
    assert len(mine) == len(set(mine)) == nbytes
    assert free.issuperset(mine)
    for one, other in pairwise(found):
        assert one.stop % CHUNK == 0 == other.start % CHUNK
        assert one.stop != other.start
    offsets, pages = with_addresses({"a": found, "b": found}, CHUNK)
    assert offsets["a"] == offsets["b"]
    if len(found) == 1:
        assert pages is None
        assert offsets["a"] == found[0].start
        return
    assert pages.extents(offsets["a"], offsets["a"] + nbytes) == found
    assert max(pages.chunks) == (max(mine)) // CHUNK  # no more memory than is used
    whole = len(set(pages.chunks)) * CHUNK
    assert pages.extents(0, whole) == (Extent(0, whole),)


def test_a_table_says_where_bytes_are():
    pages = PageTable(10, (0, 1, 2, 2, 0))
    assert pages.extents(5, 25) == (Extent(5, 25),)
    assert pages.extents(35, 45) == (Extent(25, 30), Extent(0, 5))
    assert pages.extents(20, 40) == (Extent(20, 30), Extent(20, 30))
