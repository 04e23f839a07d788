import errno
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.backends import get_backend
from mucudnn.backends.cpu.device import DiskTier
from mucudnn.errors import OutOfMemoryError
from mucudnn.passes.placement.layout import in_tiers
from mucudnn.passes.placement.packing import Block
from mucudnn.runtime.executor.tiers import HostTier, Tiers, parse_tiers
from mucudnn.runtime.profiling.links import measured_tiers

BLOCK = st.tuples(st.integers(0, 40), st.integers(0, 10), st.integers(0, 10))


def mapped(folder):
    maps = Path("/proc/self/maps")
    return maps.exists() and str(folder) in maps.read_text()


@pytest.fixture(params=["host", "disk"])
def tier(request, tmp_path):
    if request.param == "host":
        return HostTier(get_backend("cpu").device, 4096)
    return DiskTier(4096, tmp_path)


def test_a_tier_keeps_bytes(tier):
    a, b = tier.view(0, 100), tier.view(100, 3996)
    a[:] = 1
    b[:] = 2
    assert tier.view(99, 2).tolist() == [1, 2]
    assert (a.nbytes, b.nbytes) == (100, 3996)
    tier.close()
    assert a.all()  # views outlive it
    tier.close()


def test_the_file_has_no_name_and_goes_with_its_last_view(tmp_path):
    tier = DiskTier(1 << 16, tmp_path)
    view = tier.view(0, 10)
    assert list(tmp_path.iterdir()) == []
    assert mapped(tmp_path)
    tier.close()
    assert mapped(tmp_path)
    del view
    assert not mapped(tmp_path)
    collected = DiskTier(1 << 16, tmp_path)
    assert mapped(tmp_path)
    del collected
    assert not mapped(tmp_path)


def test_the_file_takes_its_room_at_once(tmp_path, monkeypatch):
    found = []
    reserve = os.posix_fallocate

    def watched(file, offset, length):
        reserve(file, offset, length)
        found.append(os.fstat(file))

    monkeypatch.setattr(os, "posix_fallocate", watched)
    DiskTier(1 << 20, tmp_path)
    assert found[0].st_size == 1 << 20
    assert found[0].st_blocks * 512 >= 1 << 20
    assert DiskTier(0, tmp_path).view(0, 0).nbytes == 0
    assert Tiers([]).place([], {}) == {}
    with pytest.raises(OutOfMemoryError, match="no tiers are available"):
        Tiers([]).place([Block("a", 8, 0, 1)], {"a": 8})


def test_a_full_disk_is_an_error_at_the_start(tmp_path, monkeypatch):
    with pytest.raises(OutOfMemoryError, match=r"no room for .* are free"):
        DiskTier(1 << 60, tmp_path)

    def full(file, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemoryError, match=str(tmp_path)):
        DiskTier(100, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not mapped(tmp_path)


@pytest.fixture
def small_files():
    """Files of 64 KiB at most."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield 1 << 16
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_files_is_named_and_kept_to(tmp_path, small_files):
    assert DiskTier(small_files, tmp_path).nbytes == small_files
    with pytest.raises(
        OutOfMemoryError,
        match=r"cannot have 64\.001 KiB: the limit of this process is 64\.000 KiB",
    ):
        DiskTier(small_files + 1, tmp_path)
    (choice,) = parse_tiers(f"disk:{tmp_path}")
    assert choice.room() == small_files
    (tier,) = measured_tiers(get_backend("cpu").device, [choice], 1 << 20)
    assert tier.nbytes == small_files


def test_measuring_a_disk_leaves_room_and_does_not_count_as_used(tmp_path, monkeypatch):
    """A link is measured with a file; that one is gone when tensors come."""
    whole, taken = 1 << 20, []

    def reserve(file, offset, length):
        if sum(taken) + length > whole:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken.append(length)
        os.ftruncate(file, length)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    monkeypatch.setattr(
        "shutil.disk_usage", lambda _: SimpleNamespace(free=whole - sum(taken))
    )
    choices = parse_tiers(f"disk:{tmp_path}")
    (tier,) = measured_tiers(get_backend("cpu").device, choices, 1 << 26)
    assert tier.nbytes == whole
    assert taken == [whole // 2]


@given(st.lists(BLOCK, max_size=10), st.lists(st.integers(0, 120), max_size=3))
def test_tiers_are_filled_in_turn_without_overlap(drawn, capacities):
    blocks = [Block(f"{i}", n, a, a + b) for i, (n, a, b) in enumerate(drawn)]
    found, left = in_tiers(blocks, capacities)
    assert found.keys() | {b.name for b in left} == {b.name for b in blocks}
    assert found.keys().isdisjoint(b.name for b in left)
    for b in blocks:
        if b.name not in found:
            continue
        tier, start = found[b.name]
        assert 0 <= start <= start + b.nbytes <= capacities[tier]
        for other in blocks:
            if other is b or found.get(other.name, (-1,))[0] != tier:
                continue
            apart = other.last < b.first or b.last < other.first
            begin = found[other.name][1]
            assert apart or begin + other.nbytes <= start or start + b.nbytes <= begin
    for b in left:
        for tier, capacity in enumerate(capacities):
            beside = [c for c in blocks if found.get(c.name, (-1,))[0] == tier]
            assert b.nbytes > capacity - sum(c.nbytes for c in beside)


def test_what_fits_the_first_tier_goes_there(tmp_path):
    tiers = Tiers([HostTier(get_backend("cpu").device, 100), DiskTier(150, tmp_path)])
    blocks = [Block("a", 80, 0, 5), Block("b", 80, 1, 5), Block("c", 100, 6, 7)]
    places = tiers.place(blocks, {"a": 77, "b": 80, "c": 100})
    assert {name: place.tier for name, place in places.items()} == {
        "a": 0,
        "b": 1,
        "c": 0,
    }
    assert places["a"].buffer.nbytes == 77
    places["a"].buffer[:] = 1
    places["b"].buffer[:] = 2
    assert np.all(places["a"].buffer == 1)
    with pytest.raises(OutOfMemoryError, match=r"no room for .*80.* of host memory"):
        tiers.place([*blocks, Block("d", 80, 0, 9)], dict.fromkeys("abcd", 80))
