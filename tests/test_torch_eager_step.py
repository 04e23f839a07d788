"""A step in eager mode is a planned one and a hand-written loop, bit for bit."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import nn, optim
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mucudnn.torch as mt
from mucudnn.errors import UnsupportedError
from mucudnn.torch.capture.step_tensors import Batch, StepSettings
from mucudnn.torch.eager_step import run_eager_step
from tests.torch_marks import STEPS_RUN
from tests.torch_own_updates import Sharpened, lbfgs

pytestmark = STEPS_RUN

STEPS = 4
PLANNED = (1, 2)
"""Numbers of the steps that are planned among eager ones."""


class Net(nn.Module):
    """Batch norm, dropout, a weight that is used twice; checkpoints of both kinds."""

    def __init__(self, checkpoints):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.2)
        self.checkpoints = checkpoints

    def forward(self, x, scale=None, *, shift=None):
        if self.checkpoints:
            x = checkpoint(self.a, x, use_reentrant=False)
            x = checkpoint(self.drop, x, use_reentrant=True)
        x = self.drop(self.norm(torch.tanh(x)))
        x = self.a(x) if scale is None else self.a(x) * scale
        return self.b(x if shift is None else x + shift)


class WeightedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, out, y):
        self.calls += 1
        return ((out - y) ** 2 * self.weight).mean()


def with_extras(out, y):
    return functional.mse_loss(out, y), {"out": out, "sums": [out.sum(1), None, "a"]}


class Rotating(optim.Optimizer):
    """Multiplies matrices, which autocast would round; counts in Python."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.count = 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                rows = p.grad.reshape(p.shape[0], -1)
                p.sub_((rows @ rows.T @ rows).reshape(p.shape), alpha=0.1 / self.count)


def adamw(parameters):
    return optim.AdamW(parameters, 1e-2)


def as_positional(x, y):
    return (x, y), {}


CASES = {
    "checkpoints": {"checkpoints": True},
    "accumulate_evenly": {
        "accumulate": 3,
        "optimizer": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    },
    "accumulate_unevenly": {"accumulate": 4, "norm": False, "loss": with_extras},
    "accumulate_single_samples": {"accumulate": 9, "norm": False},
    "scaler": {"scaler": {}},
    "scaler_off": {"scaler": {"enabled": False}, "clip_norm": 0.05},
    "scaler_and_all": {
        "scaler": {"growth_interval": 1},
        "clip_norm": 0.05,
        "clip_value": 0.01,
        "accumulate": 2,
        "loss": with_extras,
        "cast": True,
    },
    "some_are_not_updated": {
        "scaler": {},
        "clip_norm": 0.05,
        "optimizer": lambda p: adamw(list(p)[:2]),
    },
    "extras": {"loss": with_extras},
    "loss_module": {"loss": WeightedLoss},
    "tuple": {"call": lambda x, y: (((x, x[:, :1]), y), {})},
    "dict": {"call": lambda x, y: (({"x": x, "scale": x[:, :1]}, y), {})},
    "by_name": {"call": lambda x, y: ((x, y), {"scale": None, "shift": x})},
    "trained_input": {"call": lambda x, y: ((x.clone().requires_grad_(), y), {})},
    "own_update": {"optimizer": Rotating, "clip_norm": 0.05, "scaler": {}},
    "own_update_cast": {"optimizer": Rotating, "cast": True},
    "lbfgs": {"optimizer": lbfgs, "loss": with_extras, "clip_norm": 1.0},
    "optional_closure": {"optimizer": Sharpened},
}


def trained(case, choose):
    """Losses, extras and everything that was trained.

    Args:
        case: Of `CASES`.
        choose: Whether a step is planned, by its number.
    """
    torch.manual_seed(0)
    model = Net(case.get("checkpoints", False))
    if not case.get("norm", True):
        model.norm.eval()
    loss_fn = case.get("loss", functional.mse_loss)
    loss_fn = loss_fn() if isinstance(loss_fn, type) else loss_fn
    both = nn.ModuleList(
        [model, loss_fn] if isinstance(loss_fn, nn.Module) else [model]
    )
    used = [p for p in both.parameters() if p.requires_grad]
    optimizer = case.get("optimizer", adamw)(used)
    scaler = case.get("scaler")
    if scaler is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, **scaler)
    limits = {
        k: case[k] for k in ("accumulate", "clip_norm", "clip_value") if k in case
    }
    settings = StepSettings(scaler=scaler, **limits)
    step = mt.train_step(model, loss_fn, optimizer, scaler=scaler, cache=None, **limits)
    marker = torch.ones_like(used[0])
    used[0].grad = marker
    x, y = torch.randn(6, 6), torch.randn(6, 3)
    results = []
    torch.manual_seed(1)
    for number in range(STEPS):
        bad = scaler is not None and number < 2
        given = torch.full_like(y, math.inf) if bad else y
        args, kwargs = case.get("call", as_positional)(x, given)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.get("cast", False)):
            if choose(number):
                found = step(*args, **kwargs)
            else:
                batch = Batch.of(args, kwargs)
                found = run_eager_step(model, loss_fn, optimizer, batch, settings)
        results.append(found)
        assert used[0].grad is marker
        assert all(p.grad is None for p in used[1:])
        assert args[0].grad is None if isinstance(args[0], torch.Tensor) else True
    leaves = torch.utils._pytree.tree_leaves(results)
    assert not any(t.requires_grad for t in leaves if isinstance(t, torch.Tensor))
    state = optimizer.state_dict()
    return [
        results,
        list(both.state_dict().values()),
        {p: s for p, s in state["state"].items() if s},
        scaler and scaler.state_dict(),
        torch.get_rng_state(),
    ]


def assert_same(one, other):
    first, form = torch.utils._pytree.tree_flatten(one)
    second, other_form = torch.utils._pytree.tree_flatten(other)
    assert form == other_form, f"{form} is not {other_form}"
    for a, b in zip(first, second, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b


@pytest.mark.parametrize("name", CASES)
def test_eager_steps_are_planned_ones(name):
    eager = trained(CASES[name], lambda number: False)
    assert_same(trained(CASES[name], lambda number: number in PLANNED), eager)


def test_an_eager_step_is_a_hand_written_loop():
    outcomes = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = Net(checkpoints=True)
        optimizer = adamw(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=1)
        settings = StepSettings(2, clip_norm=0.05, clip_value=0.01, scaler=scaler)
        x, y = torch.randn(6, 6), torch.randn(6, 3)
        losses = []
        torch.manual_seed(1)
        for number in range(STEPS):
            given = torch.full_like(y, math.inf) if number == 1 else y
            with torch.autocast("cpu", torch.bfloat16):
                if ours:
                    batch = Batch.of((x, given), {})
                    loss, extras = run_eager_step(
                        model, with_extras, optimizer, batch, settings
                    )
                    losses += [loss, *(part["out"] for part in extras)]
                    continue
            optimizer.zero_grad()
            total, outs = 0, []
            for some, wanted in zip(x.chunk(2), given.chunk(2), strict=True):
                with torch.autocast("cpu", torch.bfloat16):
                    out = model(some)
                    loss = functional.mse_loss(out, wanted) / 2
                scaler.scale(loss).backward()
                total = total + loss.detach()
                outs.append(out.detach())
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            losses += [total, *outs]
        state = optimizer.state_dict()["state"]
        outcomes.append([losses, list(model.state_dict().values()), state])
    assert_same(*outcomes)


@pytest.mark.parametrize("where", ["model", "loss", "backward", "update"])
def test_an_exception_leaves_gradients_as_they_were(where):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            fail("backward")
            return gradient

    def fail(here):
        if here == where:
            raise KeyError(here)

    class Model(nn.Linear):
        def forward(self, x):
            fail("model")
            return Failing.apply(super().forward(x))

    def loss_fn(out, y):
        fail("loss")
        return functional.mse_loss(out, y)

    model = Model(6, 3)
    optimizer = adamw(model.parameters())
    model.weight.grad = marker = torch.ones(3, 6)
    optimizer.register_step_pre_hook(lambda *_: fail("update"))
    batch = Batch.of((torch.randn(6, 6), torch.randn(6, 3)), {})
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(KeyError, match=where):
        run_eager_step(model, loss_fn, optimizer, batch, StepSettings())
    assert model.weight.grad is marker
    assert model.bias.grad is None
    assert all(map(torch.equal, before, model.parameters()))


def test_gradients_of_what_the_loss_closes_over_stay():
    critic, model = nn.Linear(3, 1), nn.Linear(6, 3)
    critic.weight.grad = marker = torch.ones(1, 3)
    optimizer = adamw(model.parameters())

    def loss_fn(out):
        return checkpoint(torch.tanh, critic(out), use_reentrant=True).mean()

    batch = Batch.of((torch.randn(6, 6),), {})
    before = [p.clone() for p in model.parameters()]
    run_eager_step(model, loss_fn, optimizer, batch, StepSettings(2))
    assert critic.weight.grad is marker
    assert critic.bias.grad is None
    assert torch.equal(marker, torch.ones(1, 3))
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_loss_may_be_a_parameter():
    model = nn.BatchNorm1d(1)
    model.bias.grad = marker = torch.full((1,), 7.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    batch = Batch.of((torch.randn(3, 1),), {})
    run_eager_step(model, lambda _: model.bias, optimizer, batch, StepSettings())
    assert model.bias.item() == -0.5
    assert model.bias.grad is marker


@pytest.mark.parametrize("optimizer_of", [lbfgs, Sharpened])
def test_a_scaler_and_a_closure_are_refused_in_our_words(optimizer_of):
    model = nn.Linear(6, 3)
    optimizer = optimizer_of(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    batch = torch.randn(6, 6), torch.randn(6, 3)
    step = mt.train_step(
        model, functional.mse_loss, optimizer, scaler=scaler, cache=None
    )
    with pytest.raises(UnsupportedError, match="needs a closure"):
        step(*batch)
    settings, given = StepSettings(scaler=scaler), Batch.of(batch, {})
    with pytest.raises(UnsupportedError, match="needs a closure"):
        run_eager_step(model, functional.mse_loss, optimizer, given, settings)


class Scored(NamedTuple):
    loss: torch.Tensor
    sums: tuple | None


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "sums", [lambda out: {"sums": Scored(out, None)}, lambda out: None]
)
def test_a_named_tuple_stays_one(sums, accumulate):
    def scored(out, y):
        return Scored(functional.mse_loss(out, y), sums(out))

    case = {"loss": scored, "accumulate": accumulate}
    eager = trained(case, lambda number: False)
    assert all(type(result) is Scored for result in eager[0])
    assert_same(trained(case, lambda number: number in PLANNED), eager)
