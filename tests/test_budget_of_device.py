"""A budget of all that the device has free."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mucudnn.backends import get_backend
from mucudnn.backends.cpu import device as cpu_device
from mucudnn.backends.cuda.device import CudaDevice
from mucudnn.errors import UnsupportedError
from mucudnn.runtime.training.budget import MemoryBudget
from tests.cupy_fake import StrictCupy
from tests.training_cases import examples, trainer


def test_training_within_what_is_free():
    made = trainer(budget="device")
    images, labels = examples(8)
    made.step(images, labels)
    assert made.peak_bytes <= made.budget.nbytes
    assert made.budget.nbytes > 1 << 20


def test_what_is_free_is_read_once_for_a_trainer(monkeypatch):
    cpu = get_backend("cpu").device
    monkeypatch.setattr(type(cpu), "available_bytes", lambda self: 12345)
    assert MemoryBudget.of("device", cpu).nbytes == 12345
    assert MemoryBudget.of("1KiB", cpu).nbytes == 1024


@pytest.mark.parametrize(
    ("limit", "used", "left"),
    [("max", "1", np.inf), ("100", "30", 70), ("100", "130", 0), ("", "", np.inf)],
)
def test_a_container_has_less_than_its_machine(limit, used, left, tmp_path):
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(used + "\n")
    assert cpu_device._free_of_container(tmp_path) == left
    assert cpu_device._free_of_container(tmp_path / "none") == np.inf


def test_a_gpu_counts_what_libraries_take_and_modules_will(monkeypatch):
    cupy = StrictCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    taken = []

    def memory():
        assert taken, "cuBLAS has its workspace first"
        return (1 << 30), (1 << 34)

    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", memory, raising=False)
    monkeypatch.setattr(cupy, "matmul", lambda a, b, out: taken.append(out))
    pool = SimpleNamespace(free_bytes=lambda: 1 << 20)
    monkeypatch.setattr(cupy, "get_default_memory_pool", lambda: pool)
    device = CudaDevice(0, 91900)
    assert device.available_bytes() == (1 << 30) + (1 << 20) - (256 << 20)


def test_a_device_without_memory_says_so():
    with pytest.raises(UnsupportedError, match="give a size, such as 8GiB"):
        trainer(backend="null", budget="device")
