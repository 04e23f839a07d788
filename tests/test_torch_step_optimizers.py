"""Every optimizer of torch.optim whose update is recorded: its own bits."""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.errors import UnsupportedError
from tests.torch_marks import STEPS_RUN
from tests.torch_steps import train_eagerly

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
}


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


def of_lists(_, group, p, state):
    signs = torch._foreach_sign([p.grad])
    torch._foreach_add_([p], signs, alpha=-group["lr"])


def built(optimizer_of):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    x, y = torch.randn(5, 6), torch.randn(5, 3)
    return model, optimizer_of(model.parameters()), x, y


def eager(optimizer_of):
    model, optimizer, x, y = built(optimizer_of)
    torch.manual_seed(1)
    losses = train_eagerly(model, functional.mse_loss, (x, y), optimizer, STEPS)
    return losses, model, optimizer.state_dict()["state"]


def planned(optimizer_of):
    model, optimizer, x, y = built(optimizer_of)
    step = mt.train_step(model, functional.mse_loss, optimizer)
    torch.manual_seed(1)
    losses = [step(x, y).item() for _ in range(STEPS)]
    return losses, model, optimizer.state_dict()["state"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_an_optimizer_are_its_own(name):
    wanted, model, state = eager(OPTIMIZERS[name])
    losses, mine, my_state = planned(OPTIMIZERS[name])
    assert losses == wanted
    assert all(map(torch.equal, model.parameters(), mine.parameters()))
    assert len(set(wanted)) == STEPS
    for number, of_parameter in state.items():
        assert of_parameter.keys() <= my_state.get(number, {}).keys()
        for key, value in of_parameter.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(my_state[number][key], value), key


@pytest.mark.parametrize("name", ["clipping", "subtracting", "of_lists", "noisy"])
def test_updates_by_tensor_operations_are_planned(name):
    model, optimizer, x, y = built(OPTIMIZERS[name])
    step = mt.train_step(model, functional.mse_loss, optimizer)
    step(x, y)
    assert step.plan.update_reason == ""
    assert step.plan.own_update is None


@pytest.mark.parametrize("name", ["alternating", "sharing", "counting_for_all"])
def test_updates_that_change_what_is_no_state_of_a_parameter_run_eagerly(name):
    model, optimizer, x, y = built(OPTIMIZERS[name])
    step = mt.train_step(model, functional.mse_loss, optimizer)
    for _ in range(3):
        step(x, y)
    assert step.plan.own_update is not None


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.Adagrad])
def test_fused_optimizers_are_run_unfused(kind):
    def of(parameters):
        return kind(parameters, 1e-2, fused=True)

    wanted, model, _ = eager(of)
    losses, mine, _ = planned(of)
    assert losses == pytest.approx(wanted, rel=1e-6)
    for one, other in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_muon_is_planned_where_there_is_one():
    if "Muon" not in dir(optim):
        pytest.skip("this PyTorch has no Muon")

    def of(parameters):
        return optim.Muon([p for p in parameters if p.dim() == 2], 1e-2)

    wanted, model, _ = eager(of)
    losses, mine, _ = planned(of)
    assert losses == wanted
    assert torch.equal(model.weight, mine.weight)


def test_one_that_takes_sparse_gradients_alone_is_refused_by_name():
    model, optimizer, x, y = built(optim.SparseAdam)
    with pytest.raises(UnsupportedError, match=r"SparseAdam.*dense gradients"):
        mt.train_step(model, functional.mse_loss, optimizer)(x, y)


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
