"""Training loops as users have them, by planned steps and by hand: the same numbers."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn.torch as mt

pytestmark = pytest.mark.torch

LOGITS = functional.binary_cross_entropy_with_logits


def batches(count=4):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(4, 8, generator=generator), torch.randn(4, 3, generator=generator))
        for _ in range(count)
    ]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def step_of(model, loss_fn, optimizer, ours):
    """A call that trains by one batch."""
    if ours:
        return mt.train_step(model, loss_fn, optimizer, cache=None)

    def by_hand(x, *rest):
        optimizer.zero_grad()
        found = model(*x) if isinstance(x, tuple) else model(x)
        loss = loss_fn(found, *rest)
        loss.backward()
        optimizer.step()
        return loss

    return by_hand


class Faked(nn.Module):
    """What a discriminator says of a generator's results."""

    def __init__(self, generator, judge):
        super().__init__()
        self.generator, self.judge = generator, judge

    def forward(self, z):
        return self.judge(self.generator(z))


class Both(Faked):
    """The same, and what it says of data; the generator stays as it is."""

    def forward(self, z, x):
        with torch.no_grad():
            made = self.generator(z)
        return self.judge(made), self.judge(x)


def two_optimizers(ours):
    generator = network()
    judge = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    fool = step_of(
        Faked(generator, judge),
        lambda said: LOGITS(said, torch.ones_like(said)),
        torch.optim.Adam(generator.parameters(), 0.01, betas=(0.5, 0.9)),
        ours,
    )
    tell = step_of(
        Both(generator, judge),
        lambda said: (
            LOGITS(said[0], torch.zeros_like(said[0]))
            + LOGITS(said[1], torch.ones_like(said[1]))
        ),
        torch.optim.Adam(judge.parameters(), 0.01),
        ours,
    )
    for z, x in batches():
        tell((z, x))
        fool(z)
    return Faked(generator, judge).state_dict()


def test_two_planned_steps_of_one_model_are_those_by_hand():
    torch.manual_seed(1)
    wanted = two_optimizers(ours=False)
    torch.manual_seed(1)
    found = two_optimizers(ours=True)
    assert [k for k, v in wanted.items() if not torch.equal(v, found[k])] == []


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_modules_that_were_compiled_in_place_are_captured_as_written():
    models = network(), network()
    models[0][0].compile(backend="eager")
    compiled = models[0][0]._compiled_call_impl
    for model, ours in zip(models, (True, False), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = step_of(model, functional.mse_loss, optimizer, ours)
        for x, y in batches():
            step(x, y)
    assert models[0][0]._compiled_call_impl is compiled
    assert all(map(torch.equal, *(m.parameters() for m in models)))


def test_a_thread_has_values_of_its_own():
    local = threading.local()
    local.rate = 1.0
    model, batch = nn.Linear(4, 4), (torch.randn(4, 4), torch.randn(4, 4))

    def loss_fn(out, y):
        return functional.mse_loss(out, y) * getattr(local, "rate", 2.0)

    step = mt.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.0))
    once = step(*batch)
    with ThreadPoolExecutor(1) as threads:
        assert torch.equal(threads.submit(step, *batch).result(), once * 2)
    assert torch.equal(step(*batch), once)
