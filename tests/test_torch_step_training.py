"""What users do around a step: scaling, accumulating, clipping, changing things."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.errors import PlanningError, UnsupportedError
from tests.torch_marks import STEPS_RUN
from tests.torch_steps import real_peak

pytestmark = STEPS_RUN


def built(*, norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, optimizer, torch.randn(6, 6), torch.randn(6, 3)


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize(("size", "parts"), [(6, 3), (5, 2)])
def test_parts_of_a_batch_are_accumulated(size, parts):
    model, optimizer, x, y = built(norm=True)
    x, y = x[:size], y[:size]
    wanted = []
    for _ in range(3):
        optimizer.zero_grad()
        losses = []
        for part in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
            rows = len(part[0])
            divisor = parts if size % parts == 0 else size / rows
            loss = functional.mse_loss(model(part[0]), part[1]) / divisor
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        wanted.append(sum(losses[1:], losses[0]).item())
    mine, optimizer, x, y = built(norm=True)
    step = mt.train_step(mine, functional.mse_loss, optimizer, accumulate=parts)
    assert [step(x[:size], y[:size]).item() for _ in range(3)] == wanted
    assert same(model, mine)
    assert mine[1].num_batches_tracked == 3 * parts


def test_parts_of_a_batch_leave_and_come_back():
    def step_of(budget):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5)]
        model = nn.Sequential(*layers, nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        step = mt.train_step(
            model, functional.mse_loss, optimizer, budget=budget, accumulate=2
        )
        return model, step

    batch = torch.randn(256, 8), torch.randn(256, 1)
    with pytest.raises(PlanningError) as caught:
        step_of(0)[1].prepare(*batch)
    outcomes = []
    for budget in (None, caught.value.least_bytes):
        model, step = step_of(budget)
        step.prepare(*batch)
        torch.manual_seed(1)
        losses = [step(*batch).item() for _ in range(3)]
        outcomes.append((losses, model, step.plan))
    assert outcomes[0][0] == outcomes[1][0]
    assert same(outcomes[0][1], outcomes[1][1])
    plan = outcomes[1][2]
    assert plan.leaving or plan.recomputed
    peak = real_peak(lambda: step(*batch))
    assert peak <= plan.peak_bytes - plan.resident_bytes


def test_accumulation_takes_less_memory_and_wants_a_batch():
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(256, 8), torch.randn(256, 1)
    peaks = [
        mt.train_step(model, functional.mse_loss, optimizer, accumulate=k)
        .prepare(*batch)
        .peak_bytes
        for k in (1, 8)
    ]
    assert peaks[1] < 0.5 * peaks[0]
    step = mt.train_step(model, functional.mse_loss, optimizer, accumulate=2)
    with pytest.raises(ValueError, match="first axis"):
        step(batch[0], batch[1][:3])


class Two(nn.Module):
    """A model with several inputs, one of them by name, and a dictionary as result."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x, other, labels=None, flag=True):
        out = self.a(x) + self.b(other) if flag else self.a(x)
        found = {"out": out}
        if labels is not None:
            found["loss"] = functional.mse_loss(out, labels)
        return found


def test_a_batch_has_many_forms():
    def fresh():
        torch.manual_seed(0)
        model = Two()
        return model, torch.optim.SGD(model.parameters(), 0.1)

    model, optimizer = fresh()
    x, other, y = torch.randn(4, 6), torch.randn(4, 6), torch.randn(4, 3)
    optimizer.zero_grad()
    first = model(x, other, y)["loss"]
    first.backward()
    optimizer.step()
    second = model(x, other, y)["loss"].item()

    def of_labels(out):
        return out["loss"]

    def of_target(out, target):
        return functional.mse_loss(out["out"], target)

    forms = (
        (of_target, ((x, other), y), {}),
        (of_target, (x, y), {"other": other}),
        (of_labels, ({"x": x, "other": other, "labels": y},), {}),
        (of_labels, (), {"x": x, "other": other, "labels": y, "flag": True}),
    )
    for loss_fn, args, kwargs in forms:
        model, optimizer = fresh()
        step = mt.train_step(model, loss_fn, optimizer)
        assert step(*args, **kwargs).item() == first.item()
        assert step(*args, **kwargs).item() == second
    without = step(x=x, other=other, labels=y, flag=False)
    assert without.item() != second  # what is no tensor has a plan for each value
    with pytest.raises(TypeError, match=r"torch\.tensor\(number\)"):
        step(x=x, other=other, labels=3.0)
    with pytest.raises(TypeError, match="without a batch"):
        step()


def test_numbers_beside_the_loss_are_refused():
    model, optimizer, x, y = built()
    with pytest.raises(TypeError, match="would be the same"):
        mt.train_step(model, lambda out, y: (out.sum(), 3.0), optimizer)(x, y)


def test_hooks_when_a_gradient_is_accumulated_need_eager_mode():
    model, optimizer, x, y = built()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.warns(UserWarning, match="when its gradient is accumulated"):
        mt.train_step(model, functional.mse_loss, optimizer)(x, y)
    step = mt.train_step(model, functional.mse_loss, optimizer, budget="1GiB")
    with pytest.raises(UnsupportedError, match="when its gradient is accumulated"):
        step(x, y)


def test_every_kind_of_batch_has_a_plan_up_to_a_limit():
    model, optimizer, x, y = built()
    step = mt.train_step(model, functional.mse_loss, optimizer, max_plans=2)
    first = step.prepare(x, y)
    second = step.prepare(x[:4], y[:4])
    assert second is not first
    assert step.prepare(x, y) is first
    with pytest.warns(UserWarning, match=r"max_plans=2.*Pad batches"):
        step.prepare(x[:3], y[:3])
    assert step.prepare(x, y) is first
    assert step.prepare(x[:4], y[:4]) is not second


class Tempered(nn.Linear):
    heat = 1.0

    def forward(self, x):
        return super().forward(x) / self.heat


def test_what_changes_with_every_step_is_named_once_plans_are_dropped():
    model, x, y = Tempered(6, 3), torch.randn(6, 6), torch.randn(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = mt.train_step(model, functional.mse_loss, optimizer, cache=None, max_plans=2)
    for model.heat in (1.0, 2.0):
        step(x, y)
    model.heat = 3.0
    with pytest.warns(
        UserWarning, match=r"max_plans=2.*Tempered\.heat changed.*tensor"
    ):
        step(x, y)
    assert step(x, y).isfinite()


def test_a_loss_that_counts_its_calls_counts_every_step():
    model, optimizer, x, y = built()
    calls = 0

    def loss_fn(out, y):
        nonlocal calls
        calls += 1
        return functional.mse_loss(out, y)

    step = mt.train_step(model, loss_fn, optimizer, cache=None)
    for _ in range(3):
        step(x, y)
    with pytest.warns(UserWarning, match="free variable 'calls'"):
        step(x, y)
    step(x, y)
    assert calls == 5
