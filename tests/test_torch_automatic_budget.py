"""Budgets of `train_step` that depend on the step or on the device."""

import copy
import math
import re

import pytest
import torch

import mucudnn.torch as mt
from mucudnn.errors import PlanningError
from mucudnn.torch import automatic_budget
from tests.torch_steps import train_eagerly

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("short_search"),
    # Of PyTorch's own modules, as they are imported for compilation.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*profiling.*"),
]


def network(channels=8, width=64):
    """Most memory is activations of the first layers, or parameters of the last."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, channels, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(channels, channels, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * channels, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 5),
    )


def batch(samples=4):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(samples, 3, 24, 24, generator=generator),
        torch.randint(0, 5, (samples,), generator=generator),
    )


def planned(model, **options):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loss_fn = torch.nn.functional.cross_entropy
    return mt.train_step(model, loss_fn, optimizer, cache=None, **options)


@pytest.mark.parametrize("width", [64, 2048])
@pytest.mark.parametrize("budget", ["85%", "auto", "device", " 100 % "])
def test_a_step_keeps_it_and_equals_eager_mode(budget, width):
    model = network(width=width)
    eager, whole = copy.deepcopy(model), copy.deepcopy(model)
    most = planned(whole).prepare(*batch()).peak_bytes
    step = planned(model, budget=budget, verify=1)
    optimizer = torch.optim.Adam(eager.parameters(), 1e-2)
    loss_fn = torch.nn.functional.cross_entropy
    losses = train_eagerly(eager, loss_fn, batch(), optimizer, 2)
    assert [step(*batch()).item() for _ in range(2)] == losses
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert ours.equal(theirs)
    plan = step.plan
    assert plan.peak_bytes <= plan.budget
    share = {"85%": 0.85, "auto": 1.0}.get(budget)
    if share is None:
        assert plan.peak_bytes == most
    else:
        assert plan.peak_bytes <= share * most
    if budget == "auto":
        assert plan.slowdown <= 1.05
    first, second, third = str(plan).splitlines()[:3]
    assert first.startswith(f"budget {budget.strip()}: ")
    assert second.startswith("chosen: ")
    assert f"{plan.slowdown:.3f} of the time" in third


def test_options_that_round_are_chosen_only_where_they_are_allowed():
    with pytest.raises(
        PlanningError, match="without exact=True it may run in micro-batches"
    ) as error:
        planned(network(channels=32), budget="12%", exact=True).prepare(*batch(16))
    plan = planned(network(channels=32), budget="12%").prepare(*batch(16))
    assert plan.peak_bytes <= plan.budget < error.value.least_bytes
    assert plan.splitting.chosen.parts > 1
    assert "split='auto'; results may differ by rounding" in str(plan)
    with pytest.raises(PlanningError, match="the least budget that works is") as error:
        planned(network(), budget="0.1%", exact=False).prepare(*batch())
    assert error.value.least_bytes
    (share,) = re.findall(r"or budget='(\d+%)'", str(error.value))
    plan = planned(network(), budget=share, exact=False).prepare(*batch())
    assert plan.budget >= error.value.least_bytes


class Language(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(50, 16)
        self.cells = torch.nn.LSTM(16, 32, batch_first=True)
        self.head = torch.nn.Linear(32, 50)

    def forward(self, x):
        return self.head(self.cells(self.words(x))[0]).transpose(1, 2)


def test_half_the_memory_of_an_lstm():
    torch.manual_seed(0)
    words = torch.randint(0, 50, (16, 40))
    with pytest.raises(PlanningError) as error:
        planned(Language(), budget="50%", exact=True).prepare(words, words)
    assert error.value.node in str(error.value)
    step = planned(Language(), budget="50%", verify=1)
    step(words, words)
    assert step.plan.peak_bytes <= step.plan.budget < error.value.least_bytes
    assert step.plan.splitting.chosen.parts > 1


@pytest.mark.parametrize("exact", [True, None])
def test_compilation_is_the_last_resort(exact, monkeypatch):
    plan_program = automatic_budget.plan_program

    def refused(step, options, budget=math.inf, **more):
        """As if nothing but compiled kernels fitted."""
        if options.inductor or math.isinf(budget):
            return plan_program(step, options, budget)
        raise PlanningError("too much", least_bytes=int(1.5 * budget), node="mm")

    monkeypatch.setattr(automatic_budget, "plan_program", refused)
    step = planned(network(), budget="90%", exact=exact, verify=1)
    if exact:
        with pytest.raises(PlanningError, match="that needs most is mm; without exact"):
            step.prepare(*batch())
        return
    step(*batch())  # which compares it with eager mode
    assert step.plan.kernels
    assert "chosen: inductor=True; results may differ by rounding" in str(step.plan)


@pytest.mark.parametrize("budget", ["0%", "101%", "-5%", "half%", "nan%"])
def test_bad_shares(budget):
    with pytest.raises(ValueError, match="above 0% and at most 100%"):
        planned(network(), budget=budget)
