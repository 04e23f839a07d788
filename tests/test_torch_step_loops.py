"""Training loops as users have them, by planned steps and by hand: the same numbers."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import mucudnn.torch as mt  # noqa: E402

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


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8))


def complex_parameters(ours):
    model = Spectral()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)  # decays by a rate
    step = step_of(model, functional.mse_loss, optimizer, ours)
    for x, y in batches():
        step(x, y)
    return model.state_dict()


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


class Penalised(nn.Module):
    """A model and the norm of its gradient by its input."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        x = x.detach().requires_grad_()
        y = self.model(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, gradient.norm(dim=1)


def gradient_penalty(ours):
    model = Penalised(network())
    step = step_of(
        model,
        lambda found, y: (
            functional.mse_loss(found[0], y) + ((found[1] - 1) ** 2).mean()
        ),
        torch.optim.SGD(model.parameters(), 0.1),
        ours,
    )
    for x, y in batches():
        step(x, y)
    return model.state_dict()


def a_module_twice(ours):
    inner = nn.Sequential(network(), nn.Linear(3, 8), nn.BatchNorm1d(8))
    model = nn.Sequential(inner, inner, nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = step_of(model, functional.mse_loss, optimizer, ours)
    for x, y in batches():
        step(x, y)
    return model.state_dict()


def interrupted(ours):
    model = network()
    armed = ours

    def loss_fn(found, y):
        if armed:
            raise KeyboardInterrupt
        return functional.mse_loss(found, y)

    step = step_of(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), ours)
    if ours:
        with pytest.raises(KeyboardInterrupt):
            step(*batches()[0])
        armed = False
        assert all(parameter.grad is None for parameter in model.parameters())
    for x, y in batches():
        step(x, y)
    return model.state_dict()


def trained_later(ours):
    model = network()
    step = step_of(
        model,
        functional.mse_loss,
        torch.optim.Adam(model.parameters(), 0.01),
        ours,
    )
    model[0].requires_grad_(False)
    for i, (x, y) in enumerate(batches()):
        if i == 2:
            model[0].requires_grad_(True)
        step(x, y)
    return model.state_dict()


def losses_and_states(model, optimizer, step, change):
    """What two steps before a change, and two after it, have left behind."""
    found = {}
    for i, (x, y) in enumerate(batches()):
        if i == 2:
            change()
        found[f"loss {i}"] = step(x, y).detach()
    for i, held in optimizer.state_dict()["state"].items():
        found |= {f"{i} {key}": value for key, value in held.items()}
    return {**found, **model.state_dict()}


def assigned(ours):
    """The optimizer is left with parameters that the model had."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    step = step_of(model, functional.mse_loss, optimizer, ours)
    other = {key: 0.5 * value for key, value in network().state_dict().items()}

    def change():
        model.load_state_dict(other, assign=True)

    return losses_and_states(model, optimizer, step, change)


def one_replaced(ours):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = step_of(model, functional.mse_loss, optimizer, ours)

    def change():
        model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)
        model[2].bias = None

    return losses_and_states(model, optimizer, step, change)


def without_statistics(ours):
    model = nn.Sequential(network(), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = step_of(model, functional.mse_loss, optimizer, ours)

    def change():
        model[1].running_mean = model[1].running_var = None

    return losses_and_states(model, optimizer, step, change)


LOOPS = (
    assigned,
    one_replaced,
    without_statistics,
    trained_later,
    complex_parameters,
    two_optimizers,
    gradient_penalty,
    a_module_twice,
    interrupted,
)


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_of_planned_steps_are_those_by_hand(loop):
    torch.manual_seed(1)
    wanted = loop(ours=False)
    torch.manual_seed(1)
    found = loop(ours=True)
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
