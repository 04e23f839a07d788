"""PyTorch's convolutions, a network of them, and tuners that plan them as told."""

import numpy as np
import torch
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn import ConvPlan, Tuner
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.torch.conv.backend import TORCH

ONCE = StoppingRule(min_samples=1, max_samples=1, hopeless=0.0)


def tuner(*, native=False, **options):
    """Ours alone, unless `native`, timed as briefly as can be."""
    options = {"batch_policy": "undivided", "validate": False, **options}
    backend = mt.cpu_backend(native=native)
    return Tuner(backend=backend, cache=None, rule=ONCE, **options)


def operands(dtype=torch.float64, *, requires_grad=True):
    x = torch.randn(2, 4, 6, 6, dtype=dtype, requires_grad=requires_grad)
    w = torch.randn(6, 2, 3, 3, dtype=dtype, requires_grad=requires_grad)
    b = torch.randn(6, dtype=dtype, requires_grad=requires_grad)
    return x, w, b


def conv(x, w, b):
    return functional.conv2d(x, w, b, stride=2, padding=1, groups=2)


def conv_transpose(x, w, b):
    return functional.conv_transpose2d(
        x, w, b, stride=2, padding=1, output_padding=1, dilation=2, groups=2
    )


class Residual(torch.nn.Module):
    """A small network with every usual convolution in it."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, padding="same", bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.down = torch.nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.depthwise = torch.nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.shortcut = torch.nn.Conv2d(8, 16, 1, stride=2)
        self.up = torch.nn.ConvTranspose2d(16, 4, 3, stride=2, padding=1)
        self.head = torch.nn.Linear(4, 5)

    def forward(self, x):
        x = functional.relu(self.norm(self.stem(x)))
        inner = self.depthwise(functional.relu(self.down(x)))
        x = functional.relu(inner + self.shortcut(x))
        return self.head(self.up(x).mean((2, 3)))


def losses(model, steps=3):
    rng = np.random.default_rng(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(steps):
        x = torch.from_numpy(rng.standard_normal((4, 3, 12, 12)))
        loss = functional.cross_entropy(model(x), torch.arange(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def trained(context, wrap=lambda model: model):
    torch.manual_seed(5)
    model = Residual().double()
    with context:
        found = losses(wrap(model))
    return found, model.state_dict()


def only_torch(tables, limit):
    return [
        ConvPlan(
            t.problem,
            tuple(
                p for p in t.usable if p.algo == TORCH and p.batch == t.problem.batch
            ),
        )
        for t in tables
    ]


def without_torch(tables, limit):
    return [
        ConvPlan(
            table.problem,
            (
                min(
                    (p for p in table.usable if p.algo != TORCH),
                    key=lambda p: p.time_ms,
                ),
            ),
        )
        for table in tables
    ]
