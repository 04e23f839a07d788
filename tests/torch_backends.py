"""Compiled models beside eager ones: the same bits, in no more bytes than planned."""

import torch
from torch import nn

import mucudnn.torch as mt
from tests.torch_steps import least_bytes, real_peak


class WithLoss(nn.Module):
    def __init__(self, model, loss_fn):
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, x, *targets):
        return self.loss_fn(self.model(x), *targets)


def observed(model, run, call, batch):
    """Everything that a step leaves, gradients of its batch and random numbers too."""
    torch.manual_seed(1)
    model.zero_grad()
    batch = [
        given.detach().clone().requires_grad_(given.requires_grad) for given in batch
    ]
    results = run(call, *batch)
    found = {f"result {i}": r.detach().clone() for i, r in enumerate(results)}
    found |= {f"batch {i}": given.detach() for i, given in enumerate(batch)}
    found |= {f"batch {i}.grad": given.grad for i, given in enumerate(batch)}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    found |= {
        f"{name}.grad": None if grad is None else grad.clone()
        for name, grad in gradients.items()
    }
    found |= {name: b.clone() for name, b in model.named_buffers()}
    return found | {"random": torch.rand(2)}


def differing(found, wanted):
    """What is not the same, bit for bit."""
    assert found.keys() == wanted.keys()
    return [
        name
        for name, value in wanted.items()
        if (value is None) != (found[name] is None)
        or (value is not None and not torch.equal(value, found[name]))
    ]


def one_backward(call, *batch):
    """The usual step, whose one result is the loss."""
    loss = call(*batch)
    loss.backward()
    return [loss]


def check_against_eager(make, run=one_backward, *, measured=True):
    """Steps without a limit and in the least budget are eager's, and are in it.

    Args:
        make: Gives a model and its batch, always the same.
        run: One step of a call on a batch; its results.
        measured: Whether the step does nothing beside the compiled graph.

    Returns:
        Plans without a limit and in the least budget.
    """
    model, batch = make()
    wanted = [observed(model, run, model, batch) for _ in range(2)]
    model, batch = make()
    torch._dynamo.reset()
    refusing = torch.compile(model, backend=mt.backend(budget=0), fullgraph=True)
    plans = []
    for budget in (None, least_bytes(run, refusing, *batch)):
        model, batch = make()
        torch._dynamo.reset()
        backend = mt.backend(budget=budget)
        call = torch.compile(model, backend=backend, fullgraph=True)
        for expected in wanted:
            found = observed(model, run, call, batch)
            assert not differing(found, expected), differing(found, expected)
        [plan] = backend.plans
        assert plan.peak_bytes <= plan.budget
        if measured:
            model.zero_grad()
            beyond = real_peak(lambda c=call, b=batch: run(c, *b))
            assert beyond <= plan.peak_bytes - plan.resident_bytes
        plans.append(plan)
    return plans
