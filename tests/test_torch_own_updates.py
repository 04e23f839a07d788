"""Optimizers whose updates cannot be recorded make them themselves, within a budget."""

import pytest
import torch
from torch import optim

from mucudnn.errors import PlanningError, UnsupportedError
from mucudnn.torch.optimizer_update import state_bytes
from tests.torch_marks import STEPS_RUN
from tests.torch_own_updates import (
    CLOSURES,
    OPTIMIZERS,
    STEPS,
    CountingInAttribute,
    Remembering,
    eager,
    step_within,
)
from tests.torch_steps import real_peak

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


def test_preparing_a_step_leaves_the_optimizer_as_it_was():
    step, model, optimizer, batch = step_within(CountingInAttribute, None)
    before = [p.clone() for p in model.parameters()]
    step.prepare(*batch)
    assert optimizer.count == 0
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert all(map(torch.equal, before, model.parameters()))


def test_a_state_that_grows_with_every_step_is_refused():
    step, *_, batch = step_within(Remembering, None)
    with pytest.raises(UnsupportedError, match=r"while its state grows.*mt\.backend"):
        step(*batch)


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
