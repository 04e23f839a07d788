"""Training in mapped memory: the same bits within the same budgets, in what it maps."""

from dataclasses import replace

import numpy as np
import pytest

from mucudnn.backends import get_backend
from mucudnn.backends.cpu.mapped_memory import CpuMapper
from mucudnn.errors import OutOfMemoryError, UnsupportedError
from mucudnn.models import get_model
from mucudnn.runtime.profiling.links import mapping_costs
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.trainer import Trainer
from tests.one_algorithm import one_algorithm
from tests.training_cases import trainer, tuner_of

STEPS = 3


def backend(chunk_bytes=4096):
    """The CPU with an algorithm whose workspaces leave gaps that only mapping fills."""
    cpu = one_algorithm("GEMM")
    return replace(cpu, mapper=CpuMapper(cpu.device.available_bytes, chunk_bytes))


def trained(**more):
    """A residual network for a few steps: all that is told of it."""
    graphs = [
        get_model("resnet20")(8, image=16, classes=3, training=training)
        for training in (True, False)
    ]
    tuner = tuner_of(backend())
    rng = np.random.default_rng(0)
    images = rng.standard_normal((8 * STEPS, 3, 16, 16), dtype="f4")
    labels = rng.integers(0, 3, len(images))
    with Trainer(*graphs, tuner=tuner, optimizer="momentum", **more) as made:
        rows = [slice(8 * i, 8 * i + 8) for i in range(STEPS)]
        found = [made.step(images[r], labels[r]).loss for r in rows]
        answers = made.predict(images)
        pages = made.placed and made.placed.layout.pages
        return found, made.state.save(), answers, made.peak_bytes, pages


def same(found, expected):
    assert found[0] == expected[0]
    for name, array in expected[1].items():
        np.testing.assert_array_equal(found[1][name], array, err_msg=name)
    np.testing.assert_array_equal(found[2], expected[2])


def test_every_budget_gives_the_same_bits(short_search):
    expected = trained()
    most, mapped = expected[3], 0
    for share, policy in ((2.0, "lru"), (0.9, "lru"), (0.8, "planned")):
        budget = MemoryBudget(
            nbytes=int(share * most), policy=policy, convolutions="fixed"
        )
        found = trained(budget=budget, placement="virtual")
        assert found[3] <= budget.nbytes
        same(found, expected)
        mapped += found[4] is not None
    assert mapped
    free = trained(placement="virtual")
    assert free[3] <= most
    same(free, expected)


def test_names_and_devices_are_refused_before_anything_is_measured():
    with pytest.raises(ValueError, match="choose one of: static, virtual"):
        trainer(8, placement="dynamic")
    cannot = replace(get_backend("cpu"), mapper=None)
    for budget in (None, "1MiB"):
        with pytest.raises(UnsupportedError, match="'cpu' cannot map memory; use the"):
            trainer(8, backend=cannot, budget=budget, placement="virtual")


def test_mapping_is_timed_in_the_memory_that_there_is():
    costs = mapping_costs(backend())
    assert costs.nbytes == 4096
    assert 0 < costs.map_ms < 1e3
    assert 0 < costs.unmap_ms < 1e3
    assert mapping_costs(backend(), 4095).map_ms == 0.0
    assert mapping_costs(backend(), 4096).map_ms > 0
    full = replace(get_backend("cpu"), mapper=CpuMapper(lambda: 4096, 4096))
    with pytest.raises(OutOfMemoryError, match="are available"):
        mapping_costs(full)
