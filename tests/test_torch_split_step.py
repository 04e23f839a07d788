"""PyTorch steps in slices of their batch: the whole's gradients in less memory."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.errors import UnsupportedError
from mucudnn.runtime.tuning.tuner import Tuner
from tests.torch_parts import eager, least, made, momentum, stepped
from tests.torch_steps import TinyGPT, build, check_kept, token_loss

pytestmark = pytest.mark.torch


def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.GroupNorm(2, 8),
        nn.Conv2d(8, 8, 3),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    batch = torch.randn(8, 3, 16, 16), torch.randn(8, 4)
    return model, functional.mse_loss, batch


def without_dropout():
    model = TinyGPT()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, token_loss, build("gpt")[2]


def some_labels_ignored():
    model, _, (x, y) = build("mlp")
    weights = torch.rand(10) + 0.5
    y = torch.where(torch.arange(len(y)) % 3 == 0, -100, y)
    return model, nn.CrossEntropyLoss(weight=weights), (x, y)


class Tagger(nn.Module):
    """Two layers in both directions; samples are strided in their memory."""

    def __init__(self, normed):
        super().__init__()
        # As many channels as samples: their statistics are no rows of the batch.
        self.norm = nn.BatchNorm1d(7) if normed else torch.zeros_like
        self.words = nn.Embedding(20, 12)
        self.cells = nn.LSTM(12, 16, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        states, (last, _) = self.cells(self.words(x))
        states = states + self.norm(states[:, -1, :7]).sum(1)[:, None, None]
        return self.head(states + last.mean()).flatten(0, 1)


def recurrent(normed):
    batch = torch.randint(0, 20, (7, 24)), torch.randint(0, 5, (7 * 24,))
    return Tagger(normed), functional.cross_entropy, batch


STEPS = {
    "convolutions": convolutions,
    "gpt": without_dropout,
    "ignored": some_labels_ignored,
    "mlp": lambda: build("mlp"),
}


def furthest(found, expected):
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_those_of_the_whole_batch(name, dtype):
    """As near to them in float64 as PyTorch's own are, or 1e-6 where that is nearer."""
    loss, own, _ = eager(STEPS[name], dtype)
    _, expected, _ = eager(STEPS[name], torch.float64)
    limit = 1e-12
    if dtype is torch.float32:
        limit = max(1e-6, 2 * furthest(own, expected))
    for parts in (2, 3) if dtype is torch.float64 else (4,):
        mine, found, step, *_ = stepped(STEPS[name], dtype, parts)
        assert step.plan.splitting.chosen.parts == parts
        assert float((mine - loss).abs() / loss) < limit
        assert furthest(found, expected) < limit


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize(
    "name", ["convolutions", pytest.param("gpt", marks=pytest.mark.slow)]
)
def test_parts_need_less_and_keep_it(name):
    whole, parts = least(STEPS[name], "none"), least(STEPS[name], 4)
    assert parts < 0.6 * whole
    kept = stepped(STEPS[name], torch.float32, 4)[1]
    _, found, step, batch, _ = stepped(STEPS[name], torch.float32, 4, budget=parts)
    assert step.plan.peak_bytes <= parts
    check_kept(step, batch, found, kept)


@pytest.mark.parametrize(("parts", "normed"), [(2, True), (3, False)])
def test_an_lstm_runs_in_parts(parts, normed):
    tagger = partial(recurrent, normed)
    loss, own, _ = eager(tagger, torch.float32)
    mine, found, step, *_ = stepped(tagger, torch.float32, parts)
    assert step.plan.splitting.chosen.parts == parts
    torch.testing.assert_close(mine, loss)
    assert furthest(found, own) < 1e-5
    nodes = [node.op for node in step.plan.plan.schedule.graph.nodes]
    assert nodes.count("lstm:backward") == 4 * parts
    assert least(tagger, parts) < 0.8 * least(tagger, "none")


def test_whole_or_in_parts_is_decided_by_the_budget():
    whole = least(STEPS["convolutions"], "none")
    roomy = stepped(STEPS["convolutions"], torch.float32, "auto")[2].plan
    assert roomy.splitting.chosen.parts == 1
    tight = stepped(STEPS["convolutions"], torch.float32, "auto", budget=0.7 * whole)[
        2
    ].plan
    assert tight.splitting.chosen.parts > 1
    assert tight.splitting.fused
    assert f"in {tight.splitting.chosen.parts} parts" in str(tight)
    assert tight.peak_bytes <= 0.7 * whole


def test_what_couples_the_batch_stays_whole_and_is_exact():
    torch.manual_seed(0)
    model, loss_fn, batch = build("cnn")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    loss_fn(model(batch[0]), batch[1]).backward()
    expected = [p.grad for p in model.parameters()]
    running = {k: v.clone() for k, v in model.named_buffers()}
    model.load_state_dict(before)
    optimizer = momentum(model)
    mt.train_step(model, loss_fn, optimizer, split=4, cache=None)(*batch)
    found = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    most = max(float(g.abs().max()) for g in expected)  # a bias's before a norm is 0
    for mine, theirs in zip(found, expected, strict=True):
        assert float((mine - theirs).abs().max()) < 1e-5 * most
    for name, value in model.named_buffers():
        torch.testing.assert_close(value, running[name])


def test_convolutions_of_slices_may_be_planned_too(tmp_path):
    own = Tuner(
        backend=mt.cpu_backend(), workspace_limit="1MiB", cache=tmp_path / "t.sqlite"
    )
    model, loss_fn, batch = made(STEPS["convolutions"], torch.float32)
    with own as tuner:
        step = mt.train_step(
            model, loss_fn, momentum(model), split=2, tuner=tuner, cache=None
        )
        loss = step(*batch)
    sizes = {plan.problem.batch for plan in step.plan.convolutions.values()}
    assert sizes == {len(batch[0]) // 2}
    expected, *_ = eager(STEPS["convolutions"], torch.float32)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_masks_of_dropout_are_drawn_as_one():
    """Random numbers stay those of the whole batch, in their order."""
    losses = []
    for split in ("none", 4):
        model, loss_fn, batch = build("gpt")
        step = mt.train_step(model, loss_fn, momentum(model), split=split, cache=None)
        step.prepare(*batch)
        torch.manual_seed(3)
        losses.append([float(step(*batch)) for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("split", ["some", 0])
def test_other_splits_are_refused(split):
    with pytest.raises(ValueError, match="split"):
        stepped(STEPS["mlp"], torch.float32, split)


def test_one_sample_cannot_be_cut():
    model, batch = nn.Linear(4, 4), (torch.randn(1, 4), torch.randn(1, 4))
    options = {"cache": None}
    step = mt.train_step(
        model, functional.mse_loss, momentum(model), split=2, **options
    )
    with pytest.raises(UnsupportedError, match="one sample"):
        step(*batch)
    step = mt.train_step(
        model, functional.mse_loss, momentum(model), split="auto", **options
    )
    assert step(*batch).isfinite()
