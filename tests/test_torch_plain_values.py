"""A planned step has the values of Python's that there are now."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import mucudnn.torch as mt  # noqa: E402
from tests.torch_marks import STEPS_RUN  # noqa: E402

pytestmark = STEPS_RUN


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.heat = 1.0

    def forward(self, x):
        return self.layer(x) / self.heat


def built():
    torch.manual_seed(0)
    model = Tempered()
    return model, torch.randn(8, 4), torch.randint(3, (8,))


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
