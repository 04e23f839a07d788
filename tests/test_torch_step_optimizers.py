"""Every optimizer of torch.optim whose update is recorded: its own bits."""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.errors import UnsupportedError
from tests.torch_marks import STEPS_RUN
from tests.torch_programs import (
    Program,
    Training,
    built,
    compare,
    eager_step,
    new_step,
)
from tests.torch_steps import least_bytes

pytestmark = STEPS_RUN

STEPS = 8
"""RAdam and ASGD decide something else after a few."""

OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.05, 0.9, nesterov=True, weight_decay=0.1),
    "sgd_dampened": lambda p: optim.SGD(p, 0.05, 0.9, dampening=0.1),
    "sgd_maximizing": lambda p: optim.SGD(p, 0.01, maximize=True, foreach=True),
    "adam_rate": lambda p: optim.Adam(p, torch.tensor(1e-2), weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, 1e-2, amsgrad=True, maximize=True),
    "rmsprop": lambda p: optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, 1e-2, lr_decay=0.1),
    "adadelta": lambda p: optim.Adadelta(p, weight_decay=0.1),
    "adamax": lambda p: optim.Adamax(p, weight_decay=0.1),
    "nadam": lambda p: optim.NAdam(p, 1e-2, decoupled_weight_decay=True),
    "radam": lambda p: optim.RAdam(p, 1e-2, weight_decay=0.1),
    "asgd": lambda p: optim.ASGD(p, 1e-2, t0=3),
    "rprop": lambda p: optim.Rprop(p, 1e-2),
    "clipping": lambda p: Clipping(p),
    "of_ones_own": lambda p: Lion(p, {"lr": 1e-2}),
    "swapping": lambda p: Own(p, swapping),
    "alternating": lambda p: Own(p, alternating),
    "sharing": lambda p: Own(p, sharing),
    "noisy": lambda p: Own(p, noisy),
    "counting_for_all": lambda p: Own(p, counting_for_all),
    "slowing": lambda p: Own(p, slowing),
    "subtracting": lambda p: Own(p, subtracting),
    "of_lists": lambda p: Own(p, of_lists),
    "undecayed": lambda p: Own(p, undecayed),
}
if hasattr(optim, "Muon"):
    OPTIMIZERS["muon"] = lambda p: optim.Muon(
        [one for one in p if one.dim() == 2], 1e-2
    )


class Clipping(optim.Optimizer):
    """Clips by a number that its first steps have none of, as ADOPT does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["step"] = torch.tensor(0.0)
            if state["step"].item() > 0:
                limit = (state["step"].item() - 0.5) ** 0.25
                p.sub_(p.grad.clamp(-limit, limit), alpha=self.param_groups[0]["lr"])
            else:
                p.mul_(0.9)
            state["step"] += 1


class Lion(optim.Optimizer):
    """An optimizer that makes its state in its first step, and replaces it."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                p.sub_(group["lr"] * (0.9 * state["mean"] + 0.1 * p.grad).sign())
                state["mean"] = 0.99 * state["mean"] + 0.01 * p.grad


class Own(optim.Optimizer):
    """An optimizer whose update is a function of itself and of one parameter."""

    def __init__(self, parameters, update):
        super().__init__(parameters, {"lr": 1e-2})
        self.update = update

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(self, group, p, self.state[p])


def swapping(_, group, p, state):
    if not state:
        state["a"], state["b"] = torch.ones_like(p), torch.zeros_like(p)
    state["a"], state["b"] = state["b"], state["a"]
    p.sub_(p.grad + 0.1 * state["a"], alpha=group["lr"])


def alternating(_, group, p, state):
    """Has one of two keys at a time."""
    old = state.pop("a", None)
    if old is None:
        state["a"] = p.grad.clone()
    p.add_(p.grad if old is None else old, alpha=-group["lr"])


def sharing(_, group, p, state):
    """Stores what is a parameter's memory."""
    if not state:
        state["same"] = p.detach()
    p.add_(p.grad, alpha=-group["lr"]).add_(state["same"], alpha=0.01)


def noisy(_, group, p, state):
    p.add_(p.grad, alpha=-group["lr"]).add_(torch.randn_like(p), alpha=0.01)


def counting_for_all(optimizer, group, p, state):
    every = optimizer.state["all"]
    every["step"] = every.get("step", torch.tensor(0.0)) + 1
    p.add_(p.grad, alpha=-group["lr"]).mul_(1 - 0.01 * every["step"])


def slowing(_, group, p, state):
    group["lr"] *= 0.9
    p.add_(p.grad, alpha=-group["lr"])


def subtracting(_, group, p, state):
    p.sub_(p.grad, alpha=group["lr"])


def undecayed(_, group, p, state):
    p.mul_(1 - group["lr"] * 0.0).sub_(p.grad, alpha=group["lr"])


def of_lists(_, group, p, state):
    signs = torch._foreach_sign([p.grad])
    torch._foreach_add_([p], signs, alpha=-group["lr"])


EAGER = "alternating", "sharing", "counting_for_all", "slowing"
"""Those that change what is no state of a parameter: they update behind the passes."""


def training_of(optimizer_of):
    def build():
        model = nn.Linear(6, 3)
        return Training(
            model,
            optimizer_of(model.parameters()),
            [(torch.randn(5, 6), torch.randn(5, 3))],
            functional.mse_loss,
            steps=STEPS,
        )

    return Program(build)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_an_optimizer_are_its_own(name, caplog):
    report = compare(training_of(OPTIMIZERS[name]))
    assert not report.differences
    assert report.was_planned()
    for plan in report.plans[2:]:
        assert (plan.own_update is not None) == (name in EAGER)
        assert bool(plan.update_reason) == (name in EAGER)
    assert ("the optimizer updates in eager mode" in caplog.text) == (name in EAGER)


def test_an_update_that_fails_is_told_with_its_line():
    def unknown(_, group, p, state):
        p.mul_(p.decay)

    model, batch = nn.Linear(6, 3), (torch.randn(5, 6), torch.randn(5, 3))
    own = Own(model.parameters(), unknown)
    step = mt.train_step(model, functional.mse_loss, own, cache=None)
    says = r"has no attribute 'decay' \(.*test_torch_step_optimizers.*, in unknown\)"
    with pytest.raises(UnsupportedError, match=says):
        step(*batch)


@pytest.mark.parametrize("name", ["of_ones_own", "swapping"])
def test_the_least_budget_has_room_for_state_that_the_first_step_makes(name):
    def step_of(budget):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        own = OPTIMIZERS[name](list(model.parameters()))
        loss = functional.mse_loss
        return mt.train_step(model, loss, own, budget=budget, cache=None), own

    batch = torch.randn(48, 16), torch.randn(48, 16)
    step, own = step_of(2000)
    budget = least_bytes(step.prepare, *batch)
    assert not own.state
    step, _ = step_of(budget)
    losses = [step(*batch).item() for _ in range(3)]
    free, _ = step_of(None)
    assert losses == [free(*batch).item() for _ in range(3)]
    assert step.plan.peak_bytes <= budget


@pytest.mark.parametrize("eager_steps", [0, 1])
def test_a_plan_made_before_the_first_step_serves_no_later_one(eager_steps):
    losses = []
    for ours in (False, True):
        with built(training_of(OPTIMIZERS["sgd_dampened"]), 0) as training:
            step, batch = new_step(training, {}), training.batches[0]
            if ours:
                step.prepare(*batch)
            for number in range(4):
                run = step if ours and number >= eager_steps else None
                loss = run(*batch) if run else eager_step(training, batch)
                losses.append(loss.item())
    assert losses[:4] == losses[4:]


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad])
def test_fused_optimizers_update_by_their_own_kernels(kind):
    outcomes = []
    for ours in (False, True):
        with built(training_of(lambda p: kind(p, 1e-2, fused=True)), 0) as training:
            step = new_step(training, {}) if ours else None
            for _ in range(STEPS):
                batch = training.batches[0]
                step(*batch) if ours else eager_step(training, batch)
            outcomes.append(list(training.model.parameters()))
    assert all(map(torch.equal, *outcomes))


def test_one_that_takes_sparse_gradients_alone_is_refused_by_name():
    with built(training_of(optim.SparseAdam), 0) as training:
        step = new_step(training, {})
        with pytest.raises(UnsupportedError, match=r"SparseAdam.*dense gradients"):
            step(*training.batches[0])


def test_momentum_of_a_parameter_of_a_class_of_its_own_is_a_plain_tensor():
    class Named(torch.Tensor):
        pass

    model = nn.Linear(4, 2)
    model.weight = nn.Parameter(model.weight.detach().as_subclass(Named))
    own = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = mt.train_step(model, functional.mse_loss, own, cache=None)
    step(torch.randn(3, 4), torch.randn(3, 2))
    kinds = {type(own.state[p]["momentum_buffer"]) for p in model.parameters()}
    assert kinds == {torch.Tensor}
