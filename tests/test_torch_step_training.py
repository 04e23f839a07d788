"""What users do around a step: scaling, accumulating, clipping, changing things."""

import copy
import math

import pytest

from mucudnn.errors import PlanningError, UnsupportedError

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import mucudnn.torch as mt  # noqa: E402
from tests.torch_marks import STEPS_RUN  # noqa: E402
from tests.torch_steps import real_peak  # noqa: E402

pytestmark = STEPS_RUN


def built(*, norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, optimizer, torch.randn(6, 6), torch.randn(6, 3)


def eager_step(model, optimizer, x, y, loss_fn=functional.mse_loss):
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_scaler_skips_steps_and_changes_its_factor_as_in_eager_mode(clip_norm):
    outcomes = []
    for ours in (False, True):
        model, optimizer, x, y = built(norm=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        step = mt.train_step(
            model, functional.mse_loss, optimizer, scaler=scaler, clip_norm=clip_norm
        )
        found = []
        for i in range(10):
            batch = torch.full_like(x, math.inf) if i == 4 else x
            if ours:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = step(batch, y)
            else:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = functional.mse_loss(model(batch), y)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
                scaler.step(optimizer)
                scaler.update()
            found.append((repr(loss.item()), scaler.state_dict()))
            if i == 4:  # whose running statistics are no numbers any more
                nn.init.ones_(model[1].running_var)
                nn.init.zeros_(model[1].running_mean)
        outcomes.append((found, model, optimizer.state_dict()["state"]))
    (eager, wanted, state), (planned, model, ours) = outcomes
    assert eager == planned
    assert {row[1]["scale"] for row in planned} == {2.0**10, 2.0**11}
    assert same(wanted, model)
    assert all(torch.equal(state[i]["step"], ours[i]["step"]) for i in state)
    assert state[0]["step"] == 9


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
    for wrong in ({"accumulate": 0}, {"clip_norm": 0.0}, {"clip_value": -1.0}):
        with pytest.raises(ValueError, match="must be a"):
            mt.train_step(model, functional.mse_loss, optimizer, **wrong)
    with pytest.raises(TypeError, match="GradScaler"):
        mt.train_step(model, functional.mse_loss, optimizer, scaler=2.0)


@pytest.mark.parametrize("limit", [{"clip_norm": 0.01}, {"clip_value": 0.01}])
def test_gradients_are_clipped(limit):
    outcomes = []
    for ours in (False, True):
        model, _, x, y = built()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        step = mt.train_step(model, functional.mse_loss, optimizer, **limit)
        for _ in range(3):
            if ours:
                step(x, y)
                continue
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            if "clip_norm" in limit:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            else:
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
        outcomes.append(model)
    assert same(*outcomes)


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


def test_more_than_the_loss_comes_back_and_is_counted():
    def loss_fn(out, y):
        return functional.mse_loss(out, y), {"out": out, "part": [out.sum(1), None]}

    outcomes = []
    for ours in (False, True):
        model, optimizer, x, y = built()
        step = mt.train_step(model, loss_fn, optimizer)
        for _ in range(2):
            if ours:
                loss, extras = step(x, y)
            else:
                optimizer.zero_grad()
                loss, extras = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
        outcomes.append((loss, extras["out"], extras["part"][0]))
    assert extras["part"][1] is None
    assert all(map(torch.equal, *outcomes))
    assert not outcomes[1][1].requires_grad
    with pytest.raises(TypeError, match="would be the same"):
        mt.train_step(model, lambda out, y: (out.sum(), 3.0), optimizer)(x, y)


def test_a_loss_may_have_parameters_and_buffers():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, out, y):
            self.calls += 1
            return ((out - y) ** 2 * self.weight).mean() + self.weight.pow(2).sum()

    outcomes = []
    for ours in (False, True):
        model, _, x, y = built()
        loss_fn = Weighted()
        both = [*model.parameters(), *loss_fn.parameters()]
        optimizer = torch.optim.Adam(both, 1e-2)
        step = mt.train_step(model, loss_fn, optimizer)
        found = [
            step(x, y).item() if ours else eager_step(model, optimizer, x, y, loss_fn)
            for _ in range(3)
        ]
        outcomes.append((found, model, loss_fn))
    assert outcomes[0][0] == outcomes[1][0]
    assert same(outcomes[0][1], outcomes[1][1])
    assert same(outcomes[0][2], outcomes[1][2])


def test_groups_schedules_and_hyperparameters_change_between_steps():
    outcomes = []
    for ours in (False, True):
        model, _, x, y = built()
        groups = [
            {"params": model[0].parameters(), "lr": 0.1},
            {"params": model[2].parameters(), "weight_decay": 0.1},
        ]
        optimizer = torch.optim.SGD(groups, 0.05, momentum=0.5)
        step = mt.train_step(model, functional.mse_loss, optimizer)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=9)
        for i in range(6):
            step(x, y) if ours else eager_step(model, optimizer, x, y)
            schedule.step()
            if i == 2:
                optimizer.param_groups[1]["weight_decay"] = 0.2
            if i == 3:
                model[0].weight.requires_grad_(requires_grad=False)
        outcomes.append(model)
    assert same(*outcomes)


def test_checkpoints_copies_and_other_types_between_steps():
    outcomes = []
    for ours in (False, True):
        model, optimizer, x, y = built(norm=True)
        step = mt.train_step(model, functional.mse_loss, optimizer)

        def one(model, optimizer, x, y, step=step, ours=ours):
            return step(x, y) if ours else eager_step(model, optimizer, x, y)

        one(model, optimizer, x, y)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        one(model, optimizer, x, y)
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        one(model, optimizer, x, y)
        model.eval()
        one(model, optimizer, x, y)
        model.train()
        model.double()
        for state in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].double()
        one(model, optimizer, x.double(), y.double())
        optimizer.state.clear()
        one(model, optimizer, x.double(), y.double())
        outcomes.append(model)
    assert same(*outcomes)


def test_replaced_parameters_are_seen():
    model, optimizer, x, y = built()
    step = mt.train_step(model, functional.mse_loss, optimizer)
    step(x, y)
    model[2] = nn.Linear(8, 3)
    last = copy.deepcopy(model[2])
    step(x, y)  # the optimizer does not know the new layer, as in eager mode
    assert all(map(torch.equal, last.parameters(), model[2].parameters()))
    with pytest.raises(ValueError, match="has no parameter of the model"):
        mt.train_step(model[2], functional.mse_loss, optimizer)
    eager, _, _, _ = built()
    eager.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (eager, model)]
    step = mt.train_step(model, functional.mse_loss, optimizers[1])
    step(x, y)
    model.register_buffer("shift", torch.ones(1))  # which changes what there is
    step(x, y)
    for _ in range(2):
        eager_step(eager, optimizers[0], x, y)
    assert all(map(torch.equal, eager.parameters(), model.parameters()))


def test_hooks_of_parameters_are_kept():
    outcomes = []
    for ours in (False, True):
        model, optimizer, x, y = built()
        model[0].weight.register_hook(lambda gradient: gradient.sign())
        step = mt.train_step(model, functional.mse_loss, optimizer)
        for _ in range(2):
            step(x, y) if ours else eager_step(model, optimizer, x, y)
        outcomes.append(model)
    assert same(*outcomes)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.warns(UserWarning, match="when its gradient is accumulated"):
        mt.train_step(model, functional.mse_loss, optimizer)(x, y)
    step = mt.train_step(model, functional.mse_loss, optimizer, budget="1GiB")
    with pytest.raises(UnsupportedError, match="when its gradient is accumulated"):
        step(x, y)


def test_what_is_decided_by_a_batch_has_a_plan_for_each_outcome():
    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x) if mask.all() else super().forward(x * mask)

    def fresh():
        torch.manual_seed(0)
        model = Masked(6, 3)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    model, optimizer = fresh()
    x, y = torch.randn(4, 6), torch.randn(4, 3)
    masks = [torch.ones(4, 1), torch.tensor([[1.0], [1], [0], [1]])]
    wanted = []
    for i in (0, 1, 0):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x, masks[i]), y)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    model, optimizer = fresh()
    step = mt.train_step(model, functional.mse_loss, optimizer)
    assert [step((x, masks[i]), y).item() for i in (0, 1, 0)] == wanted


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
