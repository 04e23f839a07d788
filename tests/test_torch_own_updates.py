"""Optimizers whose updates cannot be recorded make them themselves, within a budget."""

import pytest

from mucudnn.errors import PlanningError, UnsupportedError

torch = pytest.importorskip("torch")

from torch import nn, optim  # noqa: E402
from torch.nn import functional  # noqa: E402

import mucudnn.torch as mt  # noqa: E402
from mucudnn.torch.optimizer_update import state_bytes  # noqa: E402
from tests.torch_marks import STEPS_RUN  # noqa: E402
from tests.torch_own_updates import (  # noqa: E402
    CLOSURES,
    OPTIMIZERS,
    STEPS,
    CountingInAttribute,
    CountingInState,
    Remembering,
    built,
    eager,
    step_within,
)
from tests.torch_steps import real_peak  # noqa: E402

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


def test_schedules_clipping_and_what_comes_back_beside():
    def trained(ours):
        model, optimizer, (x, y) = built(lambda p: optim.Adafactor(p, 0.1))
        schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        def loss_fn(out, y):
            return functional.mse_loss(out, y), out

        step = mt.train_step(model, loss_fn, optimizer, clip_norm=0.1, cache=None)
        for _ in range(3):
            if ours:
                _, out = step(x, y)
            else:
                optimizer.zero_grad()
                loss, out = loss_fn(model(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            schedule.step()
        return [out, *model.parameters()]

    assert all(map(torch.equal, trained(ours=True), trained(ours=False)))


def test_a_scaler_skips_an_own_update():
    model, optimizer, (x, y) = built(CountingInState)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step = mt.train_step(
        model, functional.mse_loss, optimizer, scaler=scaler, cache=None
    )
    before = [p.clone() for p in model.parameters()]
    step(x, y * float("inf"))
    assert all(map(torch.equal, before, model.parameters()))
    assert scaler.get_scale() == 2.0
    step(x, y)
    assert not any(map(torch.equal, before, model.parameters()))
    assert [state["count"] for state in optimizer.state.values()] == [1] * 8


def test_gradients_that_share_memory_are_apart():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.zeros(3)) for _ in range(2))

        def forward(self, x):
            return x + (self.a + self.b)

    class Changing(CountingInState):
        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                p.grad.mul_(0.5)
            super().step()

    def trained(ours):
        model, (x, y) = Twice(), (torch.ones(4, 3), torch.zeros(4, 3))
        optimizer = Changing(model.parameters())
        step = mt.train_step(model, functional.mse_loss, optimizer, cache=None)
        for _ in range(2):
            if ours:
                step(x, y)
            else:
                optimizer.zero_grad()
                functional.mse_loss(model(x), y).backward()
                optimizer.step()
        return list(model.parameters())

    assert all(map(torch.equal, trained(ours=True), trained(ours=False)))
