"""Models under autocast: kernels that return other types than PyTorch's graphs say."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mucudnn.torch as mt
from tests.torch_steps import Block, least_bytes, train_eagerly

pytestmark = pytest.mark.torch


class Cast(nn.Module):
    """A model whose forward pass is under autocast, as users write it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*args)


class Attention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        n, c, h, w = x.shape
        flat = self.qkv(self.norm(x)).flatten(2).transpose(1, 2)
        q, k, v = (part.unsqueeze(1) for part in flat.chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v).squeeze(1)
        return x + self.out(y.transpose(1, 2).reshape(n, c, h, w))


class UNet(nn.Module):
    """With a group norm behind a convolution, and an attention."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding="same"), nn.BatchNorm2d(8)
        self.down, self.inner = nn.Conv2d(8, 16, 3, 2, 1), Attention(16)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 3, 1)

    def forward(self, x):
        a = functional.silu(self.norm(self.first(x)))
        b = checkpoint(self.inner, self.down(a), use_reentrant=False)
        return self.last(torch.cat([a, self.up(b)], 1))


def convolutions():
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
    model = nn.Sequential(*layers, nn.Conv2d(8, 3, 3, padding=1), nn.GroupNorm(3, 3))
    return model, torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)


def unet():
    return UNet(), torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)


def transformer():
    model = nn.Sequential(
        nn.Embedding(32, 16), Block(16, 2, 0.0), nn.LayerNorm(16), nn.Linear(16, 4)
    )
    return model, torch.randint(0, 32, (4, 8)), torch.randn(4, 8, 4)


def with_dropout():
    model, x, y = transformer()
    model[1].drop.p = 0.1
    return model, x, y


def used_twice():
    inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), Attention(4))
    model = nn.Sequential(inner, inner)
    return model, torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)


BUILT = convolutions, unet, transformer, with_dropout, used_twice
MODELS = {function.__name__: function for function in BUILT}


def loss_of(found, y):
    return functional.mse_loss(found.float(), y)


def built(name):
    torch.manual_seed(0)
    model, x, y = MODELS[name]()
    model = Cast(model)
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), (x, y)


def by_hand(name, compiled=lambda model: model):
    """Losses and the model of a loop of PyTorch's."""
    model, optimizer, batch = built(name)
    torch.manual_seed(1)
    losses = train_eagerly(compiled(model), loss_of, batch, optimizer, 3)
    return losses, model.state_dict()


def same(one, other):
    assert one[0] == other[0]
    assert [k for k, v in one[1].items() if not torch.equal(v, other[1][k])] == []


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("name", MODELS)
def test_steps_under_autocast_are_eager_ones_within_a_budget(name, tmp_path):
    model, optimizer, batch = built(name)

    def step_of(budget):
        return mt.train_step(model, loss_of, optimizer, budget=budget, cache=tmp_path)

    most = step_of(None).prepare(*batch).peak_bytes
    step = step_of((most + least_bytes(step_of(0).prepare, *batch)) // 2)
    torch.manual_seed(1)
    losses = [step(*batch).item() for _ in range(3)]
    same((losses, model.state_dict()), by_hand(name))


@pytest.mark.parametrize("name", ["convolutions", "unet", "transformer"])
def test_compiled_models_under_autocast_are_eager_ones(name, tmp_path):
    """The others are rounded as PyTorch's own compilers round them.

    They cast what is used twice two times, and multiply dropped gradients in float32.
    """
    torch._dynamo.reset()
    backend = mt.backend(cache=tmp_path)
    same(by_hand(name, partial(torch.compile, backend=backend)), by_hand(name))


def test_a_study_knows_what_kernels_return():
    model, optimizer, batch = built("unet")
    study = mt.memory(model, loss_of, batch, optimizer, device="cpu")
    step = mt.train_step(model, loss_of, optimizer, cache=None)
    assert study.unlimited_bytes == step.prepare(*batch).peak_bytes
