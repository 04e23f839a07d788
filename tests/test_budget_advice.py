"""Training within a budget: what a refusal advises works, measuring included."""

import itertools
import re

import pytest

from mucudnn.errors import OutOfMemoryError, PlanningError
from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.residency import policy_names
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.tuner import Tuner
from tests.doubles import QUICK

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
]
"""What the refusals themselves promise is tested in `test_least_budget.py`."""


@pytest.mark.parametrize(("policy", "convolutions"), WAYS)
def test_training_fits_the_advised_budget(policy, convolutions):
    options = {"policy": policy, "convolutions": convolutions}
    _, least = advised(1024, **options)  # too little to measure in
    assert train(least, **options).peak_bytes <= least
    text, again = advised(least - 1, **options)
    assert train(again, **options).peak_bytes <= again
    if CLAIM in text:
        advised(again - 1, **options)


@pytest.mark.parametrize("scheduler", ["on_demand", "adaptive_window"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_schedulers_and_parts_fit_the_advised_budget(scheduler, accumulate):
    options = {"scheduler": scheduler, "policy": "lru", "accumulate": accumulate}
    least = 1024
    for asked in (0, -1):
        _, least = advised(least + asked, **options)
        assert train(least, **options).peak_bytes <= least


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet", "cifar_quick"])
def test_measured_steps_fit_the_advised_budget(name):
    options = {"backend": "cpu", "name": name, "batch": 4}
    _, least = advised(4096, **options)
    assert train(least, **options).peak_bytes <= least
