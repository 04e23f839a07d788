"""The pool against a naive allocator: what is where, what is free, what is said."""

import re
import weakref

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mucudnn.backends import get_backend
from mucudnn.backends.cpu.device import CpuDevice
from mucudnn.backends.virtual import VirtualDevice
from mucudnn.errors import OutOfMemoryError
from mucudnn.ir.tensor import TensorSpec
from mucudnn.runtime.executor.arena import Pool
from tests.doubles import without_collection
from tests.examples import examples

GRAIN = 512
SIZES = st.one_of(
    st.integers(0, 3 * GRAIN),
    st.sampled_from([GRAIN - 1, GRAIN, GRAIN + 1, 4 * GRAIN, 9 * GRAIN]),
)


def pool_of(nbytes, name="the pool"):
    """A pool of a device without memory."""
    return Pool(VirtualDevice(), nbytes, name)


def holes(blocks, nbytes):
    """Free pieces (size, offset) between blocks (offset, reserved) of an arena."""
    found, at = [], 0
    for offset, reserved in sorted(b for b in blocks if b[1]):
        if offset > at:
            found.append((offset - at, at))
        at = offset + reserved
    if at < nbytes:
        found.append((nbytes - at, at))
    return found


class Allocator(RuleBasedStateMachine):
    """A pool and the same blocks in a list that is searched from end to end."""

    nbytes = 20 * GRAIN

    def __init__(self):
        super().__init__()
        self.pool = pool_of(self.nbytes)
        self.blocks = {}
        self.asked = {}
        self.number = 0

    @rule(nbytes=SIZES)
    def allocate(self, nbytes):
        name = f"t{self.number}"
        self.number += 1
        fitting = [
            h for h in holes(self.blocks.values(), self.nbytes) if h[0] >= nbytes
        ]
        if nbytes and not fitting:
            with pytest.raises(OutOfMemoryError, match=f"no room for '{name}'"):
                self.pool.allocate(name, nbytes)
            assert name not in self.pool.blocks
            return
        offset = self.pool.allocate(name, nbytes)
        size, best = min(fitting) if nbytes else (0, offset)
        assert offset == best
        self.blocks[name] = offset, min(-(-nbytes // GRAIN) * GRAIN, size)
        self.asked[name] = nbytes

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data):
        name = data.draw(st.sampled_from(sorted(self.blocks)))
        self.pool.free(name)
        del self.blocks[name], self.asked[name]
        with pytest.raises(ValueError, match=f"'{name}' has no bytes of the pool"):
            self.pool.free(name)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def allocate_twice(self, data):
        name = data.draw(st.sampled_from(sorted(self.blocks)))
        with pytest.raises(ValueError, match=f"'{name}' already has .* free it first"):
            self.pool.allocate(name, 1)

    @invariant()
    def nothing_overlaps_or_leaves_the_arena(self):
        end = 0
        for offset, reserved in sorted(b for b in self.blocks.values() if b[1]):
            assert offset >= end
            assert offset % GRAIN == 0
            end = offset + reserved
        assert end <= self.nbytes

    @invariant()
    def the_accounts_are_right(self):
        free = holes(self.blocks.values(), self.nbytes)
        assert self.pool.nbytes == self.nbytes
        assert self.pool.reserved_bytes == sum(r for _, r in self.blocks.values())
        assert {(size, at) for at, size in self.pool.holes.items()} == {*free}
        assert self.pool.largest_hole == max((size for size, _ in free), default=0)
        assert {
            name: (block.offset, block.reserved, block.nbytes)
            for name, block in self.pool.blocks.items()
        } == {n: (*self.blocks[n], self.asked[n]) for n in self.blocks}

    def teardown(self):
        for name in list(self.blocks):
            self.pool.free(name)
        assert self.pool.holes == {0: self.nbytes}


class OddAllocator(Allocator):
    """The end of the arena is no multiple of anything."""

    nbytes = 13 * GRAIN + 77


TestAllocator = Allocator.TestCase
TestAllocator.settings = examples(60)
TestOddAllocator = OddAllocator.TestCase
TestOddAllocator.settings = examples(60)


def test_the_last_bytes_of_an_odd_arena_can_be_had():
    pool = pool_of(1000)
    pool.allocate("a", 300)
    assert pool.largest_hole == 488
    assert pool.allocate("b", 488) == 512
    assert not pool.holes
    whole = pool_of(1000)
    whole.allocate("all", 1000)


def test_the_report_names_the_largest_alive_and_what_would_do():
    pool = pool_of(100 * GRAIN)
    for i in range(1, 13):
        pool.allocate(f"t{i}", i * GRAIN)
    with pytest.raises(OutOfMemoryError) as error:
        pool.allocate("next", 30 * GRAIN)
    assert str(error.value) == (
        "no room for 'next' of 15.0 KiB in the pool of 50.0 KiB: 11.0 KiB are free, "
        "the largest hole is 11.0 KiB; alive are 't12' (6.0 KiB), 't11' (5.5 KiB), "
        "'t10' (5.0 KiB), 't9' (4.5 KiB), 't8' (4.0 KiB), 't7' (3.5 KiB), "
        "'t6' (3.0 KiB), 't5' (2.5 KiB) and 4 more, 5.0 KiB; "
        "freeing 't12' would make room, "
        f"a pool of {108 * GRAIN} bytes would do"
    )
    pool.free("t12")
    pool.allocate("next", 30 * GRAIN)


def test_the_report_of_holes_that_would_do_together():
    pool = pool_of(6 * GRAIN)
    for name in "abcdef":
        pool.allocate(name, GRAIN)
    for name in "ace":
        pool.free(name)
    with pytest.raises(OutOfMemoryError) as error:
        pool.allocate("x", 3 * GRAIN)
    assert "1.5 KiB are free, the largest hole is 512 B" in str(error.value)
    assert str(error.value).endswith(
        "freeing 'b' would make room, its 3 holes would do if they were one"
    )
    pool.free("b")
    pool.allocate("x", 3 * GRAIN)


def test_the_report_of_an_empty_pool():
    with pytest.raises(
        OutOfMemoryError, match="nothing is alive; a pool of 1024 bytes w"
    ):
        pool_of(100, "a slab").allocate("x", 1000)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=12), st.data())
@examples(100)
def test_what_the_report_says_makes_room_does(sizes, data):
    room = [-(-n // GRAIN) * GRAIN for n in sizes]
    pool = pool_of(sum(room))
    for i, nbytes in enumerate(sizes):
        pool.allocate(f"{i}", nbytes)
    for name in data.draw(st.sets(st.sampled_from(list(pool.blocks)))):
        pool.free(name)
    asked = pool.largest_hole + data.draw(st.integers(1, 4000))
    with pytest.raises(OutOfMemoryError) as error:
        pool.allocate("next", asked)
    said = str(error.value)

    def fits_without(*names):
        """Whether a pool where these were never put would hold what is asked."""
        other = pool_of(pool.nbytes)
        for i, nbytes in enumerate(sizes):
            other.allocate(f"{i}", nbytes)
        for name in {f"{i}" for i in range(len(sizes))} - {*pool.blocks} | {*names}:
            other.free(name)
        return asked <= other.largest_hole

    helpful = [(b.nbytes, n) for n, b in pool.blocks.items() if fits_without(n)]
    freeing = re.search(r"freeing '(\d+)' would make room", said)
    assert (freeing and freeing[1]) == (min(helpful)[1] if helpful else None)
    wanted = pool.reserved_bytes + -(-asked // GRAIN) * GRAIN
    if wanted <= pool.nbytes:
        assert said.endswith("holes would do if they were one")
    else:
        assert said.endswith(f"a pool of {wanted} bytes would do")
    if helpful:
        pool.free(freeing[1])
        pool.allocate("next", asked)


@pytest.mark.parametrize("nbytes", [-1, -GRAIN])
def test_negative_sizes_are_refused(nbytes):
    with pytest.raises(ValueError, match="must be at least 0 bytes"):
        pool_of(nbytes)
    with pytest.raises(ValueError, match=r"size of 'x' must be at least 0"):
        pool_of(GRAIN).allocate("x", nbytes)


class Counted(CpuDevice):
    """The CPU, which remembers what it was asked for."""

    def __init__(self):
        self.asked = []
        self.trims = 0

    def allocate(self, nbytes):
        self.asked.append(nbytes)
        return super().allocate(nbytes)

    def trim(self):
        self.trims += 1


def spec(name, *shape, dtype="float32"):
    return TensorSpec(name, shape, dtype)


def test_the_arena_is_allocated_once_and_is_what_was_asked():
    device = Counted()
    pool = Pool(device, 12345)
    for name in "abc":
        pool.allocate(name, 4000)
    assert device.asked == [12345]
    assert (pool.nbytes, pool.largest_hole) == (12345, 57)
    assert len(pool.blocks) == 3


def test_tensors_of_a_pool_do_not_touch_each_other():
    pool = Pool(get_backend("cpu").device, 8 * GRAIN)
    specs = [
        spec("a", 3, 5),
        spec("b", 700, dtype="uint8"),
        spec("c", 2, dtype="int64"),
    ]
    arrays = []
    for number, s in enumerate(specs):
        pool.allocate(s.name, s.nbytes)
        arrays.append(pool.view(s.name, s))
        arrays[-1][...] = number + 1
    for number, (array, s) in enumerate(zip(arrays, specs, strict=True)):
        assert (array.shape, str(array.dtype)) == (s.shape, s.dtype)
        assert (array == number + 1).all()
        assert (pool.view(s.name, s) == array).all()
    assert pool.buffer("b").tolist() == [2] * 700
    assert np.shares_memory(pool.view("a", spec("flat", 15)), arrays[0])


def test_a_view_cannot_be_larger_than_its_block():
    pool = Pool(get_backend("cpu").device, 8 * GRAIN)
    pool.allocate("a", 100)
    with pytest.raises(
        ValueError, match=r"\(26,\) has 104 bytes, 'a' has 100 of the p"
    ):
        pool.view("a", spec("a", 26))
    with pytest.raises(ValueError, match="'b' has no bytes of the pool; alive are 'a'"):
        pool.view("b", spec("b", 1))


def test_a_tensor_without_elements_takes_nothing():
    pool = Pool(get_backend("cpu").device, 0)
    pool.allocate("a", 0)
    assert pool.view("a", spec("a", 0, 3)).shape == (0, 3)
    pool.free("a")
    with pytest.raises(OutOfMemoryError):
        pool.allocate("b", 1)


def test_a_device_without_room_says_so():
    with pytest.raises(OutOfMemoryError):
        Pool(get_backend("cpu").device, 1 << 62)


def test_closing_frees_the_arena():
    with without_collection():
        device = Counted()
        pool = Pool(device, 1 << 16)
        pool.allocate("a", 100)
        gone = weakref.ref(pool.buffer("a").base)
        assert gone() is not None
        pool.close()
        assert gone() is None
        assert device.trims == 1  # what a device keeps for later is given back, too
    pool.close()
    assert not pool.blocks
    with pytest.raises(ValueError, match="the pool was closed; make another"):
        pool.allocate("a", 100)


def test_a_pool_of_a_device_without_memory_keeps_its_books():
    pool = Pool(get_backend("null").device, 4 * GRAIN, "a null pool")
    pool.allocate("a", 4 * GRAIN)
    assert pool.view("a", spec("a", 512)).shape == (512,)
    with pytest.raises(OutOfMemoryError, match=r"a null pool of 2\.0 KiB"):
        pool.allocate("b", 1)
