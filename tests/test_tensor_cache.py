"""Tensors that leave a pool and come back: who leaves, and with which bits."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bench.baselines.tensor_cache import CacheStatistics, TensorCache
from mucudnn.backends import get_backend
from mucudnn.backends.cpu.device import CpuDevice
from mucudnn.errors import BackendError, OutOfMemoryError
from mucudnn.ir.tensor import TensorSpec
from mucudnn.runtime.executor.arena import Pool
from mucudnn.runtime.executor.tasks import Copies
from mucudnn.runtime.executor.tiers import DiskTier, HostTier
from tests.examples import examples

GRAIN = 512


class LazyCopier:
    """Copies when somebody waits, and no sooner."""

    def __init__(self, device):
        self.jobs = []
        self.device = device

    def out(self, source, target, after=()):
        self.jobs.append((source, target))
        return len(self.jobs) - 1

    def back(self, source, target, after=()):
        if self.device.broken:
            raise BackendError("broken")
        return self.out(source, target)

    def wait(self, ticket):
        np.copyto(self.jobs[ticket][1], self.jobs[ticket][0])

    def finish(self):
        self.jobs.clear()

    close = finish


class Lazy(CpuDevice):
    broken = False

    def copier(self):
        return LazyCopier(self)


def spec(name, nbytes):
    return TensorSpec(name, (nbytes,), "uint8")


def cache_of(nbytes, host=1 << 20, device=None):
    device = device or Lazy()
    pool = Pool(device, nbytes)
    tiers = [HostTier(device, host)] if isinstance(host, int) else host
    return TensorCache(pool, tiers, Copies([device.copier])), pool


def written(cache, name, nbytes, value):
    """Declare a tensor and fill it."""
    cache.declare(spec(name, nbytes))
    with cache.pinned([name]):
        cache.view(name)[:] = value


def read(cache, name):
    with cache.pinned([name]):
        return cache.view(name).copy()


class Model(RuleBasedStateMachine):
    """A cache, and the same tensors in arrays of their own."""

    slots = 6

    def __init__(self):
        super().__init__()
        self.cache, self.pool = cache_of(self.slots * GRAIN)
        self.values = {}
        self.number = 0

    def some(self, data, most):
        names = st.lists(st.sampled_from(sorted(self.values)), unique=True)
        return data.draw(names.filter(lambda found: self.needed(found) <= most))

    def needed(self, names):
        return sum(-(-self.values[name].size // GRAIN) for name in names)

    @rule(nbytes=st.integers(1, slots * GRAIN), value=st.integers(0, 255))
    def write_new(self, nbytes, value):
        name = f"t{self.number}"
        self.number += 1
        written(self.cache, name, nbytes, value)
        self.values[name] = np.full(nbytes, value, np.uint8)

    @precondition(lambda self: self.values)
    @rule(data=st.data(), value=st.integers(0, 255))
    def use(self, data, value):
        names = self.some(data, self.slots)
        changed = [name for name in names if data.draw(st.booleans())]
        with self.cache.pinned(names, changed):
            for name in names:
                assert (self.cache.view(name) == self.values[name]).all()
            for name in changed:
                self.values[name][::2] = value
                self.cache.view(name)[::2] = value

    @precondition(lambda self: self.values)
    @rule(data=st.data())
    def use_within_a_use(self, data):
        outer = self.some(data, self.slots)
        with self.cache.pinned(outer):
            names = self.some(data, self.slots - self.needed(outer))
            try:
                with self.cache.pinned(names):
                    for name in (*outer, *names):
                        assert (self.cache.view(name) == self.values[name]).all()
            except OutOfMemoryError:  # the outer ones lie in the way
                assert len(outer) > 0
            for name in outer:
                assert (self.cache.view(name) == self.values[name]).all()

    @precondition(lambda self: self.values)
    @rule(data=st.data())
    def ask_for_too_much(self, data):
        names = sorted(self.values)
        if self.needed(names) <= self.slots:
            return
        before = self.cache.statistics.repacks
        with pytest.raises(OutOfMemoryError, match="no room for"):
            self.cache.pinned(names).__enter__()
        assert self.cache.statistics.repacks == before + 1

    @precondition(lambda self: self.values)
    @rule(data=st.data())
    def release(self, data):
        name = data.draw(st.sampled_from(sorted(self.values)))
        self.cache.release(name)
        del self.values[name]
        assert name not in self.cache

    @rule()
    def clear(self):
        self.cache.clear()
        self.values.clear()
        assert self.pool.statistics.reserved_bytes == 0

    @invariant()
    def the_pool_holds_what_is_resident_and_no_more(self):
        resident = self.cache.resident
        assert set(resident) <= set(self.values)
        assert self.pool.statistics.blocks == len(resident)
        assert self.pool.statistics.used_bytes == sum(
            self.values[name].size for name in resident
        )

    def teardown(self):
        for name, value in self.values.items():
            assert (read(self.cache, name) == value).all()


TestModel = Model.TestCase
TestModel.settings = examples(80)


class Recency(RuleBasedStateMachine):
    """Tensors of one size: those that are there are those that were used last."""

    slots = 4

    def __init__(self):
        super().__init__()
        self.cache, _ = cache_of(self.slots * GRAIN)
        self.used = []  # the most recent last
        self.number = 0

    @rule()
    def new(self):
        name = f"t{self.number}"
        self.number += 1
        written(self.cache, name, GRAIN, 0)
        self.used.append(name)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def use(self, data):
        names = st.lists(st.sampled_from(self.used), unique=True, max_size=self.slots)
        chosen = data.draw(names)
        with self.cache.pinned(chosen):
            pass
        self.used = [name for name in self.used if name not in chosen] + chosen

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def use_and_start_another(self, data):
        names = st.lists(st.sampled_from(self.used), unique=True, max_size=2)
        chosen = data.draw(names)
        with self.cache.pinned(chosen):
            self.used = [name for name in self.used if name not in chosen] + chosen
            self.new()

    @invariant()
    def the_last_used_are_there_in_their_order(self):
        found = self.cache.resident
        assert list(found) == self.used[max(0, len(self.used) - self.slots) :]
        assert self.cache.statistics.repacks == 0


TestRecency = Recency.TestCase
TestRecency.settings = examples(60)


def test_while_there_is_room_nothing_moves():
    cache, _ = cache_of(4 * GRAIN, host=[])
    for name in "abcd":
        written(cache, name, GRAIN, ord(name))
    for name in "dcbaabcd":
        assert (read(cache, name) == ord(name)).all()
    assert cache.statistics == CacheStatistics(hits=8)


def test_what_was_not_changed_is_not_copied_out_again():
    cache, _ = cache_of(GRAIN)
    written(cache, "a", 100, 1)
    written(cache, "b", 200, 2)
    for _ in range(3):
        assert (read(cache, "a") == 1).all()
        assert (read(cache, "b") == 2).all()
    assert cache.statistics == CacheStatistics(
        misses=6, evictions=7, out_bytes=300, in_bytes=900
    )
    with cache.pinned(["b"], ["b"]):
        cache.view("b")[0] = 9
    assert (read(cache, "a") == 1).all()
    assert read(cache, "b").tolist() == [9] + [2] * 199
    assert cache.statistics.out_bytes == 500


def test_pinned_tensors_stay():
    cache, _ = cache_of(2 * GRAIN)
    written(cache, "a", GRAIN, 1)
    written(cache, "b", GRAIN, 2)
    with cache.pinned(["a"]):
        view = cache.view("a")
        for i in range(4):
            written(cache, f"c{i}", GRAIN, 7)
        assert (view == 1).all()
        assert cache.resident == ("a", "c3")
        with pytest.raises(ValueError, match="'a' is in use; release it afterwards"):
            cache.release("a")
    cache.release("a")
    assert (read(cache, "b") == 2).all()


def test_holes_that_are_too_small_are_joined():
    cache, pool = cache_of(4 * GRAIN)
    for name in "abcd":
        written(cache, name, GRAIN, ord(name))
    cache.release("a")
    cache.release("c")
    cache.declare(spec("big", 2 * GRAIN))
    with cache.pinned(["b", "d", "big"]):
        assert (cache.view("b") == ord("b")).all()
        assert (cache.view("d") == ord("d")).all()
        assert pool.statistics.free_bytes == 0
    assert cache.statistics.repacks == 1


def test_an_error_leaves_every_tensor_as_it_was():
    cache, pool = cache_of(4 * GRAIN)
    written(cache, "a", 3 * GRAIN, 1)
    written(cache, "b", GRAIN, 2)
    cache.declare(spec("new", 2 * GRAIN))
    with pytest.raises(OutOfMemoryError) as error:
        cache.pinned(["b", "new", "a"]).__enter__()
    assert "no room for 'a' of 1.5 KiB in the pool of 2.0 KiB" in str(error.value)
    assert "alive are 'new' (1.0 KiB), 'b' (512 B); freeing 'new'" in str(error.value)
    assert "new" not in cache.resident
    assert (read(cache, "a") == 1).all()
    assert (read(cache, "b") == 2).all()
    written(cache, "fits", 2 * GRAIN, 3)
    assert (read(cache, "fits") == 3).all()
    assert pool.statistics.peak_bytes == 4 * GRAIN


def test_what_could_not_be_copied_back_is_still_at_home():
    device = Lazy()
    cache, _ = cache_of(GRAIN, device=device)
    written(cache, "a", GRAIN, 1)
    written(cache, "b", GRAIN, 2)
    device.broken = True
    with pytest.raises(BackendError, match="broken"):
        cache.pinned(["a"]).__enter__()
    device.broken = False
    assert (read(cache, "b") == 2).all()
    assert (read(cache, "a") == 1).all()


def test_a_full_host_is_an_error_and_nothing_is_lost():
    cache, _ = cache_of(GRAIN, host=2 * GRAIN)
    for name in "abc":
        written(cache, name, GRAIN, ord(name))
    cache.declare(spec("d", GRAIN))
    with pytest.raises(OutOfMemoryError) as error:
        cache.pinned(["d"]).__enter__()
    assert "no room for 'c' of 512 B in host memory of 1.0 KiB" in str(error.value)
    assert "alive are 'a' (512 B), 'b' (512 B)" in str(error.value)
    assert (read(cache, "c") == ord("c")).all()
    cache.release("a")
    assert (read(cache, "b") == ord("b")).all()
    assert (read(cache, "c") == ord("c")).all()
    cache.release("b")
    with cache.pinned(["d"]):
        cache.view("d")[:] = 4
    assert (read(cache, "c") == ord("c")).all()
    assert (read(cache, "d") == 4).all()


def test_a_tensor_on_the_device_gives_up_its_home_to_one_that_leaves():
    cache, _ = cache_of(2 * GRAIN, host=3 * GRAIN)
    for name in "abcd":
        written(cache, name, GRAIN, ord(name))
    for name in "abcdbdcaadcb" * 3:
        assert (read(cache, name) == ord(name)).all()
    assert cache.statistics.repacks == 0


def test_without_a_tier_there_is_nowhere_to_go():
    cache, _ = cache_of(GRAIN, host=[])
    written(cache, "a", GRAIN, 1)
    cache.declare(spec("b", 1))
    with pytest.raises(
        OutOfMemoryError, match=r"'a' of 512 B has to leave .* give a t"
    ):
        cache.pinned(["b"]).__enter__()


def test_what_the_first_tier_has_no_room_for_goes_to_the_next(tmp_path):
    device = get_backend("cpu").device
    tiers = [HostTier(device, 2 * GRAIN), DiskTier(4 * GRAIN, tmp_path)]
    cache, _ = cache_of(GRAIN, host=tiers, device=device)
    for name in "abcdef":
        written(cache, name, GRAIN, ord(name))
    assert (
        tiers[0].view(0, 2 * GRAIN).tolist() == [ord("a")] * GRAIN + [ord("b")] * GRAIN
    )
    assert set(tiers[1].view(0, 3 * GRAIN).tolist()) == set(map(ord, "cde"))
    for name in "fedcbaabcdef":
        assert (read(cache, name) == ord(name)).all()


def test_tensors_are_known_by_one_name():
    cache, _ = cache_of(GRAIN)
    cache.declare(spec("a", 1))
    with pytest.raises(ValueError, match="'a' is there already; release it first"):
        cache.declare(spec("a", 2))
    with pytest.raises(ValueError, match="no tensor 'b' is known; declare it first"):
        cache.pinned(["b"]).__enter__()
    with pytest.raises(ValueError, match="no tensor 'b' is known"):
        cache.release("b")
    with pytest.raises(ValueError, match="'a' has no bytes of the pool"):
        cache.view("a")
    cache.release("a")
    assert "a" not in cache


def test_a_tensor_without_elements_comes_and_goes():
    cache, _ = cache_of(GRAIN)
    written(cache, "none", 0, 1)
    written(cache, "a", GRAIN, 1)
    written(cache, "b", GRAIN, 2)
    assert read(cache, "none").size == 0
    assert cache.statistics.in_bytes == 0
