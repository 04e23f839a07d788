"""Optimizers whose updates cannot be recorded, and a step with them."""

from itertools import pairwise

import torch
from torch import nn, optim
from torch.nn import functional

import mucudnn.torch as mt

STEPS = 4


class OfValues(optim.Optimizer):
    """Decides by a norm, which only a run knows."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].mul_(0.9).add_(p.grad)
                if state["mean"].norm() > 0.05:
                    p.sub_(state["mean"] * group["lr"])
                else:
                    p.mul_(0.99)


class CountingInState(optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
            p.sub_(p.grad * (0.1 / count))


class CountingInGroup(optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "step": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] / group["step"]))


class CountingInAttribute(optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.count = 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * (0.1 / self.count))


class Sharpened(optim.Optimizer):
    """Runs the model twice, the second time where the loss is highest nearby."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("a closure is wanted")
        with torch.enable_grad():
            loss = closure()
        before = {}
        for p in self.param_groups[0]["params"]:
            before[p] = p.clone()
            p.add_(p.grad * 0.05)
        with torch.enable_grad():
            closure()
        for p in self.param_groups[0]["params"]:
            p.copy_(before[p]).sub_(p.grad * 0.1)
        return loss


class Remembering(optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("all", []).append(p.grad.clone())
            p.sub_(sum(self.state[p]["all"]) * 0.1)


def lbfgs(parameters):
    return optim.LBFGS(
        parameters, max_iter=3, history_size=3, line_search_fn="strong_wolfe"
    )


OPTIMIZERS = {
    "adafactor": lambda p: optim.Adafactor(p, 0.1, weight_decay=0.1),
    "by_values": OfValues,
    "counting_in_state": CountingInState,
    "counting_in_group": CountingInGroup,
    "counting_in_attribute": CountingInAttribute,
    "sharpened": Sharpened,
    "lbfgs": lbfgs,
}
CLOSURES = ("sharpened", "lbfgs")


def built(optimizer_of, count=128):
    torch.manual_seed(0)
    widths = (16, 32, 32, 32)
    hidden = [
        layer
        for ins, outs in pairwise(widths)
        for layer in (nn.Linear(ins, outs), nn.Tanh())
    ]
    model = nn.Sequential(*hidden, nn.Linear(widths[-1], 3))
    batch = torch.randn(count, 16), torch.randn(count, 3)
    return model, optimizer_of(model.parameters()), batch


def eager(optimizer_of, closure):
    model, optimizer, (x, y) = built(optimizer_of)

    def passes():
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    losses = []
    for _ in range(STEPS):
        loss = optimizer.step(passes) if closure else passes()
        if not closure:
            optimizer.step()
        losses.append(loss.item())
    return losses, model


def step_within(optimizer_of, budget, count=128):
    model, optimizer, batch = built(optimizer_of, count)
    step = mt.train_step(
        model, functional.mse_loss, optimizer, budget=budget, cache=None
    )
    return step, model, optimizer, batch
