"""Calls and updates like earlier ones: recorded without a trace, in the same graph."""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.torch.capture import repeated_calls, repeated_updates
from tests.torch_marks import STEPS_RUN
from tests.torch_programs import free_costs, fresh_state

pytestmark = STEPS_RUN


class Mixed(nn.Module):
    """Views, writes into views, several results, random numbers and types."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(2, 8))

    def forward(self, x):
        halves = x.clone()
        halves[:, :4].add_(1.0)
        halves.view(-1, 2, 4)[:, 1].mul_(2.0)
        self.seen[0] += halves.detach().sum(0)
        self.seen.t()[0] *= 0.5
        top, values = halves.sort(dim=1)
        parts = torch.cat([*x.split(4, dim=1), values.to(x.dtype) * 2], dim=1)
        same = (x * x) + (top * x) + parts[:, 8:] / 3 + torch.zeros(8)
        same = functional.dropout(same, 0.1) + torch.view_as_real(
            torch.view_as_complex(same.reshape(-1, 4, 2)).conj() * (1 + 2j)
        ).reshape(same.shape)
        lower = self.inner(same.bfloat16().float()) + self.seen.sum()
        return self.norm(functional.scaled_dot_product_attention(lower, lower, x))


class Images(nn.Module):
    """Convolutions with weights of other strides, and of axes of one."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.narrow = nn.Conv2d(2, 1, 1)

    def forward(self, x):
        return self.narrow(self.wide(x[:, None, None, :3])).flatten(1)


OPTIMIZERS = {
    "adamw": lambda p: optim.AdamW(p, 1e-2, amsgrad=True),
    "groups": lambda p: optim.Adam([{"params": p[:3]}, {"params": p[3:], "lr": 0.1}]),
    "sgd": lambda p: optim.SGD(p, 0.1, momentum=0.9, dampening=0.1),
    "adagrad": lambda p: optim.Adagrad(p, 0.1, lr_decay=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "radam": lambda p: optim.RAdam(p, 1e-2),
    "tensor_rate": lambda p: optim.AdamW(p, torch.tensor(1e-2)),
}


def trained(depth, optimizer):
    """Return the plan's source, the losses and the state after three steps."""
    with fresh_state(), free_costs():
        model = nn.Sequential(*(Mixed() for _ in range(depth)), Images())
        parameters = list(model.parameters())
        step = mt.train_step(
            model, functional.cross_entropy, OPTIMIZERS[optimizer](parameters)
        )
        batch = torch.randn(6, 8), torch.randint(0, 3, (6,))
        losses = [step(*batch) for _ in range(3)]
        return step.plan.source, [*losses, *parameters, *model.buffers()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_programs_are_those_of_a_trace_of_every_operation(optimizer, monkeypatch):
    trained(2, "sgd")  # PyTorch makes some of its operators when they first run
    source, values = trained(2, optimizer)
    monkeypatch.setattr(repeated_calls, "_is_repeatable", lambda _: False)
    monkeypatch.setattr(repeated_updates, "_OPTIMIZERS", ())
    repeated_calls._is_pure.cache_clear()
    try:
        traced, others = trained(2, optimizer)
    finally:
        repeated_calls._is_pure.cache_clear()
    assert source == traced
    assert all(map(torch.equal, values, others))


def test_layers_like_earlier_ones_are_not_traced(monkeypatch):
    traced, counts = repeated_calls._TRACED, []

    def count(*args):
        counts[-1] += 1
        return traced(*args)

    monkeypatch.setattr(repeated_calls, "_TRACED", count)
    for depth in (2, 5):
        counts.append(0)
        trained(depth, "adamw")
    assert counts[1] - counts[0] <= 3 * 8  # makes tensors, reads numbers
