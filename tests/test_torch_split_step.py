"""PyTorch steps in slices of their batch, or in strips of their images.

Their gradients are the whole's, in less memory.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.errors import UnsupportedError
from mucudnn.runtime.tuning.tuner import Tuner
from tests.torch_steps import TinyGPT, build, least_bytes, real_peak, token_loss

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


def two_layers():
    return [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.GELU(),
    ]


def convolutions():
    model = nn.Sequential(
        *two_layers(),
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


def chain():
    model = nn.Sequential(
        *two_layers(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
        nn.LeakyReLU(),
        nn.Conv2d(8, 8, 3, dilation=2, padding=2),
        nn.SiLU(),
        nn.Conv2d(8, 5, 1),
    )
    labels = torch.randint(0, 5, (1, 19, 8))
    labels[:, :3] = -100
    batch = torch.randn(1, 3, 37, 16), labels
    return model, nn.CrossEntropyLoss(torch.rand(5)), batch


class UNet(nn.Module):
    """Two levels down and up again, skips beside."""

    def __init__(self, dims, norm=nn.Identity, up="transposed"):
        super().__init__()
        conv = {2: nn.Conv2d, 3: nn.Conv3d}[dims]
        pool = {2: nn.MaxPool2d, 3: nn.MaxPool3d}[dims]
        turned = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]

        def block(a, b):
            one = conv(a, b, 3, padding=1), norm(b), nn.ReLU()
            return nn.Sequential(*one, conv(b, b, 3, padding=1), norm(b), nn.ReLU())

        def grown(a, b):
            if up == "transposed":
                return turned(a, b, 2, stride=2)
            return nn.Sequential(nn.Upsample(scale_factor=2, mode=up), conv(a, b, 1))

        self.down = nn.ModuleList([block(2, 4), block(4, 8), block(8, 8)])
        self.up = nn.ModuleList([grown(8, 8), grown(8, 4)])
        self.beside = nn.ModuleList([block(16, 8), block(8, 4)])
        self.pool, self.last = pool(2), conv(4, 3, 1)

    def forward(self, x):
        first = self.down[0](x)
        second = self.down[1](self.pool(first))
        x = self.down[2](self.pool(second))
        for skip, up, block in zip((second, first), self.up, self.beside, strict=True):
            x = block(torch.cat([skip, up(x)], 1))
        return self.last(x)


def labelled(*sizes):
    return torch.randn(1, 2, *sizes), torch.randint(0, 3, (1, *sizes))


def dice(scores, labels):
    """As segmentation has it: overlap over area, of each class."""
    shares = scores.softmax(1)
    wanted = functional.one_hot(labels, 3).movedim(-1, 1).to(shares.dtype)
    axes = tuple(range(2, shares.dim()))
    overlap = (shares * wanted).sum(axes)
    return 1 - (2 * overlap / (shares + wanted).sum(axes)).mean()


def both(scores, labels):
    return functional.cross_entropy(scores, labels) + dice(scores, labels)


class Larger(nn.Module):
    """Super-resolution with a residual beside, pixels shuffled by transposition."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 5, padding=2)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.PReLU(8))
        self.pool = nn.AvgPool2d(3, 1, 1)
        self.up = nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1)

    def forward(self, x):
        grown = functional.interpolate(x, scale_factor=2, mode="bilinear")
        y = self.first(functional.pad(x, [1, 1, 1, 1]))[:, :, 1:-1, 1:-1]
        return self.up(self.pool(y + self.body(y))) + grown


def instances():
    """Norms with and without parameters, running statistics and gradients."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.InstanceNorm2d(4),
        nn.ELU(),
        nn.Conv2d(4, 4, 3, padding=1, bias=False),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.Hardswish(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4, affine=False, track_running_stats=False),
        nn.BatchNorm2d(4, momentum=None),
        nn.Conv2d(4, 3, 1),
    )
    model[4].weight.requires_grad_(False)
    return model


def masked():
    return (torch.rand(2, 3, 21, 8),)


class Cropped(nn.Module):
    """Convolutions without padding: what is beside is cut to their size."""

    def __init__(self):
        super().__init__()
        self.first, self.body = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x):
        x = self.first(x).relu()
        y = self.body(x).tanh()
        x = self.last(torch.cat([x[:, :, 1:-1, 1:-1], y], 1))
        return functional.pad(x, [2, 2, 2, 2])


class Shuffled(nn.Module):
    """What is not cut between what is."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(3, 3, 3)
        self.norm, self.around = nn.GroupNorm(3, 12), nn.ReflectionPad2d(1)

    def forward(self, x):
        y = functional.pixel_shuffle(self.norm(self.first(x)), 2)
        y = self.last(self.around(functional.hardtanh(y)))
        return y * y.mean((2, 3), keepdim=True).sigmoid()


def masks(scores, wanted):
    return functional.binary_cross_entropy_with_logits(scores, wanted)


SLICED = {
    "convolutions": convolutions,
    "gpt": without_dropout,
    "ignored": some_labels_ignored,
    "mlp": lambda: build("mlp"),
}

STRIPPED = {
    "chain": chain,
    "unet": lambda: (UNet(2), both, labelled(36, 16)),
    "nearest": lambda: (UNet(2, up="nearest"), dice, labelled(28, 12)),
    "bilinear": lambda: (
        UNet(2, up="bilinear"),
        nn.CrossEntropyLoss(),
        labelled(20, 8),
    ),
    "volumes": lambda: (UNet(3), both, labelled(12, 8, 8)),
    "larger": lambda: (
        Larger(),
        masks,
        (torch.randn(2, 3, 13, 8), torch.rand(2, 3, 26, 16)),
    ),
    "shuffled": lambda: (
        Shuffled(),
        functional.l1_loss,
        (torch.randn(2, 3, 11, 8), torch.randn(2, 3, 22, 16)),
    ),
    "normed": lambda: (UNet(2, nn.BatchNorm2d), both, labelled(24, 16)),
    "cropped": lambda: (Cropped(), masks, (torch.randn(2, 3, 21, 8), *masked())),
    "instances": lambda: (instances(), masks, (torch.randn(2, 3, 21, 8), *masked())),
}

STEPS = SLICED | STRIPPED
NORMED = "normed", "instances"


def in_parts(name, count):
    """How a case is split in so many parts."""
    return count if name in SLICED else f"height:{count}"


def made(build, dtype):
    """A case's model, loss and batch in a precision, always the same."""
    torch.manual_seed(0)
    model, loss_fn, batch = build()
    if isinstance(loss_fn, nn.Module):
        loss_fn = loss_fn.to(dtype)
    batch = [t.to(dtype) if t.is_floating_point() else t for t in batch]
    return model.to(dtype), loss_fn, batch


def momentum(model):
    """Its state after one step is the gradients."""
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def eager(build, dtype):
    """PyTorch's own loss and gradients of a whole batch, and the model."""
    model, loss_fn, (x, y) = made(build, dtype)
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss.detach(), [p.grad for p in trained(model)], model


def step_of(model, loss_fn, split, **options):
    return mt.train_step(
        model, loss_fn, momentum(model), split=split, **{"cache": None, **options}
    )


def gradients(step, model):
    """Those of the one step that was made."""
    state = step._optimizer.state
    return [state[p]["momentum_buffer"] for p in trained(model)]


def stepped(build, dtype, split, budget=None):
    """Loss and gradients of one planned step, the step, its batch and the model."""
    model, loss_fn, batch = made(build, dtype)
    step = step_of(model, loss_fn, split, budget=budget)
    loss = step(*batch)
    return loss, gradients(step, model), step, batch, model


def least(build, split):
    return least_bytes(stepped, build, torch.float32, split, 2000)


def furthest(found, expected, *, apart=False):
    """The largest difference, of what the largest of all is, or `apart` each is."""
    sizes = [float(b.abs().max()) for b in expected]
    sizes = sizes if apart else [max(sizes)] * len(sizes)
    rows = zip(found, expected, sizes, strict=True)
    return max(float((a - b).abs().max()) / size for a, b, size in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_those_of_the_whole(name, dtype):
    """As near to them in float64 as PyTorch's own are, or 1e-6 where that is nearer."""
    apart = name in SLICED
    loss, own, whole = eager(STEPS[name], dtype)
    _, expected, _ = eager(STEPS[name], torch.float64)
    limit = 1e-12
    if dtype is torch.float32:
        least_limit = 1e-4 if name in NORMED else 1e-6
        limit = max(least_limit, 2 * furthest(own, expected, apart=apart))
    several = (2, 3) if dtype is torch.float64 else (4,) if name in SLICED else (5,)
    for parts in several:
        split = in_parts(name, parts)
        mine, found, step, _, model = stepped(STEPS[name], dtype, split)
        chosen = step.plan.splitting.chosen
        if name in SLICED:
            assert chosen.parts == parts
        else:
            assert chosen.cutting.along == "height"
            assert chosen.segments
        assert float((mine - loss).abs() / loss) < max(limit, 1e-6 * (limit > 1e-9))
        assert furthest(found, expected, apart=apart) < limit
        buffers = dict(whole.named_buffers())
        torch.testing.assert_close(dict(model.named_buffers()), buffers)


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("convolutions", 0.6),
        ("chain", 0.75),
        *(
            pytest.param(name, share, marks=pytest.mark.slow)
            for share, names in ((0.6, ["gpt"]), (0.75, ["unet", "normed", "volumes"]))
            for name in names
        ),
    ],
)
def test_parts_need_less_and_keep_it(name, share):
    split = in_parts(name, 4)
    whole, parts = least(STEPS[name], "none"), least(STEPS[name], split)
    assert parts < share * whole
    kept = stepped(STEPS[name], torch.float32, split)[1]
    _, found, step, batch, _ = stepped(STEPS[name], torch.float32, split, parts)
    assert step.plan.peak_bytes <= parts
    assert all(map(torch.equal, found, kept))
    beyond = real_peak(lambda: step(*batch))
    assert beyond <= step.plan.peak_bytes - step.plan.resident_bytes


@pytest.mark.parametrize(
    ("name", "split", "share", "word"),
    [("convolutions", "auto", 0.7, "parts"), ("chain", "height", 0.8, "tiles")],
)
def test_the_budget_decides_how_many_parts(name, split, share, word):
    whole = least(STEPS[name], "none")
    roomy = stepped(STEPS[name], torch.float32, split)[2].plan
    assert roomy.splitting.chosen.parts == 1
    tight = stepped(STEPS[name], torch.float32, split, share * whole)[2].plan
    assert tight.splitting.chosen.parts > 1
    assert bool(tight.splitting.fused) == (split == "auto")
    assert f"in {tight.splitting.chosen.parts} {word}" in str(tight)
    assert tight.peak_bytes <= share * whole


def test_one_large_image_is_cut_where_whole_does_not_fit():
    budget = 0.8 * least(chain, "none")
    plan = stepped(chain, torch.float32, "auto", budget)[2].plan
    assert plan.splitting.chosen.cutting.along == "height"


@pytest.mark.parametrize(("parts", "normed"), [(2, True), (3, False)])
def test_an_lstm_runs_in_parts(parts, normed):
    tagger = partial(recurrent, normed)
    loss, own, _ = eager(tagger, torch.float32)
    mine, found, step, *_ = stepped(tagger, torch.float32, parts)
    assert step.plan.splitting.chosen.parts == parts
    torch.testing.assert_close(mine, loss)
    assert furthest(found, own, apart=True) < 1e-5
    nodes = [node.op for node in step.plan.plan.schedule.graph.nodes]
    assert nodes.count("lstm:backward") == 4 * parts
    assert least(tagger, parts) < 0.8 * least(tagger, "none")


def test_what_couples_the_batch_stays_whole_and_is_exact():
    def cnn():
        return build("cnn")

    _, expected, whole = eager(cnn, torch.float32)
    _, found, _, _, model = stepped(cnn, torch.float32, 4)
    assert furthest(found, expected) < 1e-5  # a bias's before a norm is 0
    buffers = dict(whole.named_buffers())
    torch.testing.assert_close(dict(model.named_buffers()), buffers)


def test_the_plan_says_what_stays_whole():
    def normed():
        layers = [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 3)]
        batch = torch.randn(1, 3, 16, 8), torch.randn(1, 2, 12, 4)
        return nn.Sequential(*layers), functional.mse_loss, batch

    _, expected, _ = eager(normed, torch.float32)
    _, found, step, *_ = stepped(normed, torch.float32, "height:2")
    kept = step.plan.splitting.chosen.kept_whole
    assert "rows of images" in kept
    assert "native_group_norm" in kept
    assert kept in str(step.plan)
    assert furthest(found, expected) < 1e-6


def dropping():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(), nn.Conv2d(4, 2, 3))
    batch = torch.randn(1, 3, 16, 8), torch.randn(1, 2, 12, 4)
    return model, functional.mse_loss, batch


def images_last():
    model, loss_fn, (x, y) = STEPS["unet"]()
    form = torch.channels_last
    return model.to(memory_format=form), loss_fn, (x.to(memory_format=form), y)


@pytest.mark.parametrize(
    ("build", "split"),
    [(partial(build, "gpt"), 4), (dropping, "height:3"), (images_last, "height:2")],
    ids=["tokens", "images", "images_last"],
)
def test_masks_of_dropout_and_layouts_are_those_of_the_whole(build, split):
    """Random numbers stay those of the whole batch, in their order."""
    losses = []
    for how in ("none", split):
        model, loss_fn, batch = made(build, torch.float32)
        step = step_of(model, loss_fn, how)
        step.prepare(*batch)
        torch.manual_seed(3)
        losses.append([float(step(*batch)) for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_convolutions_of_slices_may_be_planned_too(tmp_path):
    own = Tuner(
        backend=mt.cpu_backend(), workspace_limit="1MiB", cache=tmp_path / "t.sqlite"
    )
    model, loss_fn, batch = made(convolutions, torch.float32)
    with own as tuner:
        step = step_of(model, loss_fn, 2, tuner=tuner)
        loss = step(*batch)
    sizes = {plan.problem.batch for plan in step.plan.convolutions.values()}
    assert sizes == {len(batch[0]) // 2}
    expected, *_ = eager(convolutions, torch.float32)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("rows", "split", "words"),
    [(1, 2, "one sample"), (3, "height", "height.*no images")],
)
def test_what_cannot_be_cut_is_refused_or_runs_whole(rows, split, words):
    batch = torch.randn(rows, 4), torch.randn(rows, 4)
    step = step_of(nn.Linear(4, 4), functional.mse_loss, split)
    with pytest.raises(UnsupportedError, match=words):
        step(*batch)
    if split != "height":
        step = step_of(nn.Linear(4, 4), functional.mse_loss, "auto")
        assert step(*batch).isfinite()
