"""Small PyTorch models with losses and batches, and what a call really allocates."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from bench.torch.peak import real_peak as real_peak
from mucudnn.errors import PlanningError
from mucudnn.torch.capture.step import capture_step
from mucudnn.torch.capture.step_tensors import StepParts
from mucudnn.torch.execution.copies import ThreadCopies
from mucudnn.torch.execution.program import bind
from mucudnn.torch.plan_program import LoweredStep, PlanOptions


def least_bytes(call, *args):
    """The least budget that works, as the refusal of a call names it."""
    with pytest.raises(PlanningError) as refused:
        call(*args)
    return refused.value.least_bytes


def planner_of(model, loss_fn, optimizer, batch):
    """What plans a captured step at measured costs, and the step's tensors."""
    parts = StepParts.of(model, optimizer, loss_fn)
    captured = capture_step(model, loss_fn, optimizer, batch)
    return LoweredStep.of_captured(captured, parts).planner(PlanOptions()), parts


def losses_of(planner, schedule, parts, batch, count):
    """Losses of steps by the program of a schedule, run by itself."""
    segment = bind(planner.lowered, schedule, ThreadCopies(reuse=True))
    with torch.no_grad():
        return [segment.run([*parts.tensors(), *batch])[0].item() for _ in range(count)]


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.drop = heads, nn.Dropout(dropout)

    def forward(self, x):
        n, t, d = x.shape
        parts = self.qkv(self.ln1(x)).split(d, dim=2)
        q, k, v = (p.view(n, t, self.heads, -1).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(n, t, d)))
        return x + self.drop(self.down(functional.gelu(self.up(self.ln2(x)))))


class TinyGPT(nn.Module):
    """A decoder whose embedding is also its last layer, with dropout."""

    def __init__(self, vocabulary=64, length=32, width=32, layers=1, heads=2):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, 0.1) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        return self.head(self.norm(self.blocks(x)))


def token_loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(name):
    """A model, its loss and a batch, always the same."""
    torch.manual_seed(0)
    if name == "gpt":
        batch = torch.randint(0, 64, (4, 32)), torch.randint(0, 64, (4, 32))
        return TinyGPT(), token_loss, batch
    if name == "mlp":
        model = nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.ReLU()
        )
        model.append(nn.Linear(256, 10))
        batch = torch.randn(128, 64), torch.randint(0, 10, (128,))
        return model, functional.cross_entropy, batch
    layers = []
    for channels, bias in ((3, True), (16, False)):
        layers += [nn.Conv2d(channels, 16, 3, padding=1, bias=bias)]
        layers += [nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 10))
    batch = torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))
    return model, functional.cross_entropy, batch


def train_eagerly(model, loss_fn, batch, optimizer, steps):
    """Losses of PyTorch's own steps, which planned ones are compared with."""
    x, *targets = batch
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model(x), *targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def load_in_place(optimizer, saved):
    """Load a state dict into the tensors there are: others are captured anew."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in saved["state"].items():
        mine = optimizer.state[parameters[number]]
        if mine.keys() != values.keys():
            optimizer.load_state_dict(saved)
            return
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                mine[key].copy_(value)
            else:
                mine[key] = value
