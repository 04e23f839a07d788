"""Training within a budget: what a refusal advises works, measuring included."""

import itertools
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mucudnn.backends import get_backend
from mucudnn.backends.cpu import device as cpu_device
from mucudnn.backends.cuda.device import CudaDevice
from mucudnn.errors import OutOfMemoryError, PlanningError, UnsupportedError
from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.residency import policy_names
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.tuner import Tuner
from tests.cupy_fake import StrictCupy
from tests.doubles import QUICK
from tests.training_cases import examples, trainer

CLAIM = "the least budget that works is "


def train(nbytes, backend="null", name="digits", batch=8, accumulate=1, **budget):
    """A trainer within a budget; closed, for nothing is trained."""
    model = get_model(name)
    trainer = Trainer(
        model(batch, training=True),
        model(batch, training=False),
        tuner=Tuner(backend=backend, rule=QUICK, validate=False),
        optimizer=Momentum(),
        gradient_accumulation=accumulate,
        budget=MemoryBudget(nbytes=nbytes, **budget),
    )
    trainer.close()
    return trainer


def advised(nbytes, **options):
    with pytest.raises((PlanningError, OutOfMemoryError)) as caught:
        train(nbytes, **options)
    text = str(caught.value)
    return text, int(re.findall(r"\((\d+) bytes\)", text)[-1])


WAYS = [
    *itertools.product(("keep_all", "paging", "vdnn_dyn"), ("fastest", "least")),
    *(("keep_all", "dynamic"), ("lru", "dynamic"), ("superneurons", "fixed")),
    *(
        pytest.param(policy, convolutions, marks=pytest.mark.slow)
        for policy in policy_names()
        for convolutions in ("dynamic", "fixed")
    ),
    *(
        ("lru", {"scheduler": scheduler, "accumulate": parts})
        for scheduler in ("on_demand", "adaptive_window")
        for parts in (1, 2)
    ),
]
"""What the refusals themselves promise is tested in `test_least_budget.py`."""


@pytest.mark.parametrize(("policy", "more"), WAYS)
def test_training_fits_the_advised_budget(policy, more):
    more = more if isinstance(more, dict) else {"convolutions": more}
    options = {"policy": policy, **more}
    _, least = advised(1024, **options)  # too little to measure in
    assert train(least, **options).peak_bytes <= least
    text, again = advised(least - 1, **options)
    assert train(again, **options).peak_bytes <= again
    if CLAIM in text:
        advised(again - 1, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet", "cifar_quick"])
def test_measured_steps_fit_the_advised_budget(name):
    options = {"backend": "cpu", "name": name, "batch": 4}
    _, least = advised(4096, **options)
    assert train(least, **options).peak_bytes <= least


# A budget of all that the device has free.


def test_training_within_what_is_free(monkeypatch):
    made = trainer(budget="device")
    images, labels = examples(8)
    made.step(images, labels)
    assert made.peak_bytes <= made.budget.nbytes
    assert made.budget.nbytes > 1 << 20
    cpu = get_backend("cpu").device
    monkeypatch.setattr(type(cpu), "available_bytes", lambda self: 12345)
    assert MemoryBudget.of("device", cpu).nbytes == 12345
    assert MemoryBudget.of("1KiB", cpu).nbytes == 1024
    with pytest.raises(UnsupportedError, match="give a size, such as 8GiB"):
        trainer(backend="null", budget="device")


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
