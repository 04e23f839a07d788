"""PyTorch steps in strips of their images: the whole's gradients in less memory."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.errors import UnsupportedError
from tests.torch_parts import eager, least, made, momentum, stepped
from tests.torch_steps import check_kept

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]


def chain():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.GELU(),
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


STEPS = {
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

SLOW = "unet", "normed", "volumes"
NORMED = "normed", "instances"


def furthest(found, expected):
    """The largest difference, of what the largest of all gradients is."""
    most = max(float(b.abs().max()) for b in expected)
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs) / most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_those_of_the_whole_image(name, dtype):
    """As near to them in float64 as PyTorch's own are, or 1e-6 where that is nearer."""
    loss, own, whole = eager(STEPS[name], dtype)
    _, expected, _ = eager(STEPS[name], torch.float64)
    limit = 1e-12
    if dtype is torch.float32:
        limit = max(1e-4 if name in NORMED else 1e-6, 2 * furthest(own, expected))
    for parts in (2, 3) if dtype is torch.float64 else (5,):
        mine, found, step, _, model = stepped(STEPS[name], dtype, f"height:{parts}")
        chosen = step.plan.splitting.chosen
        assert chosen.cutting.along == "height"
        assert chosen.segments
        assert float((mine - loss).abs() / loss) < max(limit, 1e-6 * (limit > 1e-9))
        assert furthest(found, expected) < limit
        for (_, a), b in zip(
            model.named_buffers(), dict(whole.named_buffers()).values(), strict=True
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize(
    "name", ["chain", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]
)
def test_strips_need_less_and_keep_it(name):
    whole, strips = least(STEPS[name], "none"), least(STEPS[name], "height:4")
    assert strips < 0.75 * whole
    kept = stepped(STEPS[name], torch.float32, "height:4")[1]
    _, found, step, batch, _ = stepped(STEPS[name], torch.float32, "height:4", strips)
    assert step.plan.peak_bytes <= strips
    check_kept(step, batch, found, kept)


def test_the_budget_decides_how_many_strips():
    whole = least(STEPS["chain"], "none")
    roomy = stepped(STEPS["chain"], torch.float32, "height")[2].plan
    assert roomy.splitting.chosen.parts == 1
    tight = stepped(STEPS["chain"], torch.float32, "height", 0.8 * whole)[2].plan
    assert tight.splitting.chosen.parts > 1
    assert not tight.splitting.fused
    assert f"in {tight.splitting.chosen.parts} tiles" in str(tight)
    assert tight.peak_bytes <= 0.8 * whole


def test_the_plan_says_what_stays_whole():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 3)
    )
    batch = torch.randn(1, 3, 16, 8), torch.randn(1, 2, 12, 4)
    functional.mse_loss(model(batch[0]), batch[1]).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    optimizer = momentum(model)
    step = mt.train_step(
        model, functional.mse_loss, optimizer, split="height:2", cache=None
    )
    step(*batch)
    kept = step.plan.splitting.chosen.kept_whole
    assert "rows of images" in kept
    assert "native_group_norm" in kept
    assert kept in str(step.plan)
    found = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    assert furthest(found, expected) < 1e-6


def test_masks_of_dropout_are_those_of_the_whole_image():
    losses = []
    for split in ("none", "height:3"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(), nn.Conv2d(4, 2, 3))
        batch = torch.randn(1, 3, 16, 8), torch.randn(1, 2, 12, 4)
        step = mt.train_step(
            model, functional.mse_loss, momentum(model), split=split, cache=None
        )
        step.prepare(*batch)
        torch.manual_seed(3)
        losses.append([float(step(*batch)) for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_channels_last_is_cut_or_stays_whole_but_is_right():
    losses = []
    for split in ("none", "height:2"):
        model, loss_fn, (x, y) = made(STEPS["unet"], torch.float32)
        model = model.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
        step = mt.train_step(model, loss_fn, momentum(model), split=split, cache=None)
        losses.append([float(step(x, y)) for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_one_large_image_is_cut_where_whole_does_not_fit():
    plan = stepped(
        STEPS["chain"], torch.float32, "auto", 0.8 * least(STEPS["chain"], "none")
    )[2].plan
    assert plan.splitting.chosen.cutting.along == "height"


def test_what_has_no_images_cannot_be_cut():
    model, batch = nn.Linear(4, 4), (torch.randn(3, 4), torch.randn(3, 4))
    step = mt.train_step(
        model, functional.mse_loss, momentum(model), split="height", cache=None
    )
    with pytest.raises(UnsupportedError, match=r"height.*no images"):
        step(*batch)
