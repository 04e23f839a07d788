"""Optimizers whose updates cannot be recorded make them themselves, within a budget."""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.errors import PlanningError, UnsupportedError
from mucudnn.torch.optimizer_update import state_bytes
from tests.torch_marks import STEPS_RUN
from tests.torch_own_updates import (
    CLOSURES,
    OPTIMIZERS,
    STEPS,
    CountingInAttribute,
    Remembering,
    built,
    eager,
    step_within,
)
from tests.torch_steps import least_bytes, real_peak

pytestmark = STEPS_RUN


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_eager_ones_within_the_least_budget(name):
    optimizer_of = OPTIMIZERS[name]
    wanted, model = eager(optimizer_of, name in CLOSURES)
    step, *_, batch = step_within(optimizer_of, 0)
    with pytest.raises(PlanningError, match="updates eagerly") as caught:
        step.prepare(*batch)
    least = caught.value.least_bytes
    step, mine, optimizer, batch = step_within(optimizer_of, least)
    plan = step.prepare(*batch)
    assert plan.peak_bytes <= least
    assert "update: eager, after the planned passes" in str(plan)
    losses, found = [], []
    for _ in range(STEPS):
        state = state_bytes(optimizer)
        parameters = sum(p.nbytes for p in mine.parameters())
        added = real_peak(lambda: found.append(step(*batch)))
        assert state + parameters + added <= step.plan.peak_bytes
        losses.append(found.pop().item())
    assert losses == wanted
    assert all(map(torch.equal, model.parameters(), mine.parameters()))
    assert all(parameter.grad is None for parameter in mine.parameters())
    assert len(set(wanted)) == STEPS
    step, *_, batch = step_within(optimizer_of, least - 1)
    with pytest.raises(PlanningError):
        step.prepare(*batch)


def test_a_step_that_fails_says_with_what():
    class Failing(optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self, closure=None):
            raise KeyError("beta")

    step, model, _, batch = step_within(Failing, None)
    with pytest.raises(UnsupportedError, match=r"Failing\.step\(\) fails.*'beta'"):
        step(*batch)
    assert all(parameter.grad is None for parameter in model.parameters())


MANY = 2048
"""Samples, so that activations are more than gradients."""


def studied(optimizer_of, count=MANY, **options):
    model, optimizer, batch = built(optimizer_of, count)
    return mt.memory(model, functional.mse_loss, batch, optimizer, **options)


def promised(optimizer_of, budget=None, count=MANY):
    step, *_, batch = step_within(optimizer_of, budget, count)
    return step.prepare(*batch)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_what_train_step_promises(name):
    optimizer_of = OPTIMIZERS[name]
    study = studied(optimizer_of, device="cpu")
    plan = promised(optimizer_of)
    assert study.unlimited_bytes == plan.peak_bytes
    assert study.plan().own_update == plan.own_update
    least = least_bytes(promised, optimizer_of, 0)
    assert study.least_budget == least < study.unlimited_bytes
    plan = study.plan(least)
    assert plan.peak_bytes <= least
    assert "update: eager, after the planned passes" in str(plan)
    assert list(study.curve)[-1] == study.least_budget
    with pytest.raises(PlanningError, match="updates eagerly"):
        study.plan(study.least_budget - 1)


def test_nothing_is_done_to_model_and_optimizer_before_a_step():
    step, model, optimizer, batch = step_within(CountingInAttribute, None)
    before = [p.clone() for p in model.parameters()]
    step.prepare(*batch)
    assert optimizer.count == 0
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert all(map(torch.equal, before, model.parameters()))
    model, optimizer, batch = built(OPTIMIZERS["adafactor"])
    before = [p.clone() for p in model.parameters()]
    drawn = torch.get_rng_state()
    study = mt.memory(model, functional.mse_loss, batch, optimizer)
    assert study.least_budget
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


def test_a_trained_optimizer_has_its_state_counted():
    model, optimizer, (x, y) = built(OPTIMIZERS["by_values"])
    functional.mse_loss(model(x), y).backward()
    optimizer.step()
    study = mt.memory(model, functional.mse_loss, (x, y), optimizer)
    assert study.plan().own_update.state >= sum(p.nbytes for p in model.parameters())


def test_other_devices_have_kernels_over_many_tensors():
    """As PyTorch takes them there where an optimizer leaves it open."""
    model, _, batch = built(OPTIMIZERS["adafactor"])

    def most(device, foreach):
        optimizer = optim.Adafactor(model.parameters(), 0.1, foreach=foreach)
        study = mt.memory(model, functional.mse_loss, batch, optimizer, device=device)
        return study.plan().own_update.peak

    assert most("h200", None) == most("cpu", True) > most("cpu", None)
    assert most("h200", False) == most("cpu", None)


def test_the_largest_batch_fits_and_the_next_does_not():
    optimizer_of = OPTIMIZERS["adafactor"]
    study = studied(optimizer_of, 8, device="cpu")
    budget = 3 * study.least_budget
    most = study.max_batch(budget)
    assert promised(optimizer_of, budget, most).peak_bytes <= budget
    with pytest.raises(PlanningError):
        promised(optimizer_of, budget, most + 1)


def test_what_cannot_be_measured_is_refused():
    step, *_, batch = step_within(Remembering, None)
    with pytest.raises(UnsupportedError, match=r"while its state grows.*mt\.backend"):
        step(*batch)
    with pytest.raises(UnsupportedError, match="while its state grows"):
        _ = studied(Remembering).least_budget
    with torch.device("meta"):
        model = nn.Linear(1 << 24, 1 << 24)
        x = torch.empty(4, 1 << 24)
    optimizer = optim.Adafactor(model.parameters())
    study = mt.memory(model, lambda y: y.square().mean(), (x,), optimizer)
    with pytest.raises(UnsupportedError, match=r"measured by running it.*AdamW"):
        _ = study.least_budget
