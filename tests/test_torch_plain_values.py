"""A planned step has the values of Python's that there are now."""

import functools

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import mucudnn.torch as mt  # noqa: E402
from tests.torch_marks import STEPS_RUN  # noqa: E402

pytestmark = STEPS_RUN

RATE = 1.0


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.heat = 1.0

    def forward(self, x):
        return self.layer(x) / self.heat


class Weighed:
    def __init__(self):
        self.rate = 1.0

    def __call__(self, out, y):
        return functional.cross_entropy(out, y) * self.rate


def built():
    torch.manual_seed(0)
    model = Tempered()
    return model, torch.randn(8, 4), torch.randint(3, (8,))


def by_a_closure(model):
    rate = 1.0

    def loss(out, y):
        return functional.cross_entropy(out, y) * rate

    def change(value):
        nonlocal rate
        rate = value

    return loss, change


def by_a_global(model):
    def helper(value):
        return value * RATE

    def change(value):
        globals()["RATE"] = value

    change(1.0)
    return lambda out, y: helper(functional.cross_entropy(out, y)), change


def by_a_tensor(model):
    rate = torch.tensor(1.0)

    def loss(out, y):
        return functional.cross_entropy(out, y) * rate

    def change(value):
        nonlocal rate
        rate = torch.tensor(value)

    return loss, change


def by_an_object(model):
    loss = Weighed()
    return loss, functools.partial(setattr, loss, "rate")


def by_a_partial(model):
    loss = Weighed()
    return functools.partial(loss.__call__), functools.partial(setattr, loss, "rate")


def by_an_attribute(model):
    return functional.cross_entropy, functools.partial(setattr, model, "heat")


@pytest.mark.parametrize(
    "made",
    [
        *(by_a_closure, by_a_global, by_a_tensor, by_an_object, by_a_partial),
        by_an_attribute,
    ],
)
def test_what_is_annealed_is_eager_modes(made):
    def trained(ours):
        model, x, y = built()
        loss_fn, change = made(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = mt.train_step(model, loss_fn, optimizer, cache=None)
        for rate in (1.0, 0.5, 0.5, 1.0):
            change(rate)
            if ours:
                step(x, y)
            else:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
        return list(model.parameters())

    assert all(map(torch.equal, trained(ours=True), trained(ours=False)))


def test_a_loss_that_counts_its_calls_counts_every_step():
    model, x, y = built()
    calls = 0

    def loss_fn(out, y):
        nonlocal calls
        calls += 1
        return functional.cross_entropy(out, y)

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = mt.train_step(model, loss_fn, optimizer, cache=None)
    for _ in range(3):
        step(x, y)
    with pytest.warns(UserWarning, match="free variable 'calls'"):
        step(x, y)
    step(x, y)
    assert calls == 5


def test_what_changes_with_every_step_is_named_once_plans_are_dropped():
    model, x, y = built()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = mt.train_step(
        model, functional.cross_entropy, optimizer, cache=None, max_plans=2
    )
    for heat in (1.0, 2.0):
        model.heat = heat
        step(x, y)
    model.heat = 3.0
    with pytest.warns(
        UserWarning, match=r"max_plans=2.*Tempered\.heat changed.*tensor"
    ):
        step(x, y)
    assert step(x, y).isfinite()
