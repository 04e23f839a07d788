"""Mapped memory of a GPU: the driver's calls, over a strict stand-in and on a GPU."""

import gc
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mucudnn.backends.cuda.mapped_memory import CudaMapper
from mucudnn.errors import BackendError, OutOfMemoryError, UnsupportedError
from mucudnn.passes.placement.layout import PageTable, PlacedStep, lay_out
from mucudnn.passes.planning import place_step
from mucudnn.runtime.profiling.links import mapping_costs
from mucudnn.runtime.training.budget import MemoryBudget
from tests.cuda_emulator import COMPILER
from tests.cupy_fake import StrictCupy
from tests.test_cuda_training import losses, stand_in
from tests.vmm_fake import StrictDriver, installed

CHUNK = 2 << 20


def with_driver(monkeypatch, driver):
    bindings = SimpleNamespace(driver=driver)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    return CudaMapper(0, lambda: 0)


@pytest.fixture
def driver(monkeypatch):
    driver = StrictDriver(CHUNK, room=16 * CHUNK)
    cupy = installed(StrictCupy(), driver)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    yield driver
    gc.collect()
    assert not driver.wrong


@pytest.fixture
def mapper(monkeypatch, driver):
    return with_driver(monkeypatch, driver)


def test_pieces_are_one_array_and_share_their_bytes(mapper, driver):
    assert mapper.chunk_bytes == CHUNK
    memory = mapper.allocate(4)
    whole, pieces = memory.map(range(4)), memory.map([3, 0, 3])
    whole.host[:] = np.repeat(np.arange(4, dtype=np.uint8), CHUNK)
    assert [int(pieces.host[i * CHUNK]) for i in range(3)] == [3, 0, 3]
    pieces[:CHUNK] = 9
    assert int(whole.host[-1]) == int(pieces.host[-1]) == 9
    assert (pieces.nbytes, pieces.dtype) == (3 * CHUNK, np.uint8)
    assert memory.map([]).nbytes == 0
    with pytest.raises(ValueError, match="chunk 4 of 4 cannot be mapped"):
        memory.map([4])


def test_everything_is_given_back_once_nobody_has_an_array_over_it(mapper, driver):
    memory = mapper.allocate(3)
    part = memory.map([2, 0])[CHUNK : CHUNK + 8]
    other = memory.map([1])
    del memory, other
    gc.collect()
    assert len(driver.handles) == 3
    assert len(driver.mapped) == 2
    part[:] = 1
    del part
    gc.collect()
    assert not driver.handles
    assert not driver.mapped
    assert not driver.reserved
    assert driver.calls[-6:-3] == ["synchronize", "unmap", "free"]
    assert driver.calls[-3:] == ["release"] * 3


def test_too_little_memory_gives_back_what_was_had(mapper, driver):
    with pytest.raises(OutOfMemoryError, match=r"of which 32\.0 MiB .* were had"):
        mapper.allocate(17)
    gc.collect()
    assert not driver.handles
    assert mapper.allocate(16).map(range(16)).nbytes == 16 * CHUNK


def test_what_the_driver_refuses_is_one_error_and_leaves_nothing(mapper, driver):
    memory = mapper.allocate(3)
    honest, count = driver.cuMemMap, iter(range(3))

    def refusing(*arguments):
        return (999,) if next(count) == 2 else honest(*arguments)

    driver.cuMemMap = refusing
    with pytest.raises(BackendError, match="mapping a chunk failed: 999"):
        memory.map([0, 1, 2])
    gc.collect()
    assert not driver.mapped
    assert not driver.reserved
    driver.cuMemMap = honest
    driver.cuMemSetAccess = lambda *_: (1,)
    with pytest.raises(BackendError, match="accessible failed: 1"):
        memory.map([0])
    gc.collect()
    assert not driver.mapped
    assert not driver.reserved


def test_nothing_is_mapped_during_a_capture(mapper, driver):
    memory = mapper.allocate(1)
    driver.capturing = True
    with pytest.raises(BackendError, match="while a graph is captured"):
        memory.map([0])
    driver.capturing = False
    assert memory.map([0]).nbytes == CHUNK


def test_an_old_device_and_missing_bindings_say_what_would_work(mapper, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[cuda13\]'"):
        CudaMapper(0, lambda: 0).allocate(1)
    old = StrictDriver()
    old.supported = False
    with pytest.raises(UnsupportedError, match="GPU 0 cannot map its memory"):
        _ = with_driver(monkeypatch, old).chunk_bytes


def scattered(request, plan):
    """A step as it is planned, every chunk of its memory elsewhere."""
    layout, size = lay_out(plan.schedule), request.profile.mapping_costs.nbytes
    count = -(-layout.nbytes // size)
    pages = PageTable(size, tuple(reversed(range(count))))
    return PlacedStep(plan, replace(layout, nbytes=count * size, pages=pages))


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")
def test_training_in_mapped_memory_gives_the_same_bits(monkeypatch):
    cupy, gpu = stand_in(monkeypatch)
    expected, free = losses(gpu)
    driver = StrictDriver(4096)
    installed(cupy, driver)
    gpu = replace(gpu, mapper=with_driver(monkeypatch, driver))
    monkeypatch.setattr(place_step, "_least_arena", scattered)
    found, made = losses(gpu, placement="virtual")
    assert np.array_equal(found, expected)
    assert made.peak_bytes < free.peak_bytes + 4096
    budget = MemoryBudget(nbytes=int(0.8 * free.peak_bytes), convolutions="fixed")
    found, made = losses(gpu, budget=budget, placement="virtual")
    assert np.array_equal(found, expected)
    assert made.peak_bytes <= budget.nbytes
    assert "map" in driver.calls
    assert not driver.wrong


def test_the_bindings_have_every_name_that_is_used():
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    for name, known in vars(StrictDriver).items():
        if name.startswith(("cu", "CU")):
            for attribute in vars(known) if isinstance(known, SimpleNamespace) else ():
                assert hasattr(getattr(driver, name), attribute), attribute
            assert hasattr(driver, name), name


@pytest.mark.gpu
def test_a_gpu_maps_its_memory(cuda):
    import cupy

    size = cuda.mapper.chunk_bytes
    memory = cuda.mapper.allocate(3)
    whole, pieces = memory.map(range(3)), memory.map([2, 0, 2])
    whole[:] = cupy.repeat(cupy.arange(3, dtype="uint8"), size)
    assert [int(pieces[i * size]) for i in range(3)] == [2, 0, 2]
    pieces[-1:] = 9
    assert int(whole[-1]) == 9
    assert mapping_costs(cuda).map_ms > 0
