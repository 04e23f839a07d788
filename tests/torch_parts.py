"""Steps of PyTorch models in parts: what tests of slices and of strips share."""

import pytest
import torch
from torch import nn

import mucudnn.torch as mt
from mucudnn.errors import PlanningError


def made(build, dtype):
    """A case's model, loss and batch in a precision, always the same."""
    torch.manual_seed(0)
    model, loss_fn, batch = build()
    if isinstance(loss_fn, nn.Module):
        loss_fn = loss_fn.to(dtype)
    batch = [t.to(dtype) if t.is_floating_point() else t for t in batch]
    return model.to(dtype), loss_fn, batch


def momentum(model):
    """Its state after one step is the gradients."""
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def _trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def eager(build, dtype):
    """PyTorch's own loss and gradients of a whole batch, and the model."""
    model, loss_fn, (x, y) = made(build, dtype)
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss.detach(), [p.grad for p in _trained(model)], model


def stepped(build, dtype, split, budget=None):
    """Loss and gradients of one planned step, the step, its batch and the model."""
    model, loss_fn, batch = made(build, dtype)
    optimizer = momentum(model)
    step = mt.train_step(
        model, loss_fn, optimizer, split=split, budget=budget, cache=None
    )
    loss = step(*batch)
    found = [optimizer.state[p]["momentum_buffer"] for p in _trained(model)]
    return loss, found, step, batch, model


def least(build, split):
    with pytest.raises(PlanningError) as refused:
        stepped(build, torch.float32, split, budget=2000)
    return refused.value.least_bytes
