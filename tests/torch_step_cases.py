"""Small modules, each with something that a captured step may get wrong."""

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["CASES", "QUICK", "Whole"]


class Whole(nn.Module):
    """A module whose forward pass is a function of it and of its input."""

    def __init__(self, forward, *modules, **tensors):
        super().__init__()
        self.function = forward
        self.m = nn.ModuleList(modules)
        for name, value in tensors.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x):
        return self.function(self, x)


class Square(torch.autograd.Function):
    """With a gradient that is not its own, so that it must be the one that is used."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x * gradient


def linear():
    return nn.Linear(8, 8)


def second_derivatives(s, x):
    """By a forward derivative of a gradient: PyTorch traces shapes of its own aside."""

    def energy(row):
        return s.m[0](row).tanh().sum()

    return torch.vmap(torch.func.hessian(energy))(x).sum(1)


def vectors(forward, *modules, y=(4, 8), loss=functional.mse_loss, **tensors):
    model = Whole(forward, *modules, **tensors)
    target = torch.randn(*y) if isinstance(y, tuple) else y
    return model, loss, (torch.randn(4, 8), target)


def behind(module, **options):
    return vectors(lambda s, x: s.m[1](s.m[0](x)), linear(), module, **options)


def images(module, y=(2, 4, 6, 6)):
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), module)
    return model, functional.mse_loss, (torch.randn(2, 4, 6, 6), torch.randn(*y))


def words(model, y=(2, 4, 8), forward=lambda s, x: s.m[0](x)):
    batch = torch.randn(2, 4, 8), torch.randn(*y)
    return Whole(forward, model), functional.mse_loss, batch


def added_to(s, x):
    y = s.m[0](x)
    y += x
    return functional.relu_(y)


def put(s, x):
    y = s.m[0](x).clone()
    return y.index_put_((torch.tensor([0, 2]),), torch.zeros(8))


def written_in_slices(s, x):
    y = s.m[0](x)
    z = torch.zeros_like(y)
    z[:, ::2] = y[:, 1::2]
    z[1] *= 2
    z.t()[0].add_(1)
    return z


def set_by_mask(s, x):
    y = s.m[0](x) * 1
    y[x > 0] = 0.0
    return y


def without_gradient(s, x):
    with torch.no_grad():
        weight = s.m[0](x).softmax(1)
    return s.m[1](x) * weight


def complex_numbers(s, x):
    spectrum = torch.fft.rfft(s.m[0](x), dim=1)
    return torch.fft.irfft(spectrum * s.w, dim=1)


def counted(s, x):
    s.n.add_(1)
    return s.m[0](x) * s.n.float()


def averaged_in_place(s, x):
    y = s.m[0](x)
    s.e.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return y - s.e


def averaged_anew(s, x):
    y = s.m[0](x)
    s.e = 0.9 * s.e + 0.1 * y.detach().mean(0)
    return y - s.e


def kept_for_the_loss(s, x):
    s.last = s.m[0](x)  # written before it is read, in every step
    return s.last * 2


def checkpointed(s, x):
    def inside(v):
        return functional.dropout(s.m[0](v).relu(), 0.3, training=True)

    y = checkpoint(inside, x, use_reentrant=False)
    return y + checkpoint(s.m[1], y, use_reentrant=True)


def attention(s, x):
    q = s.m[0](x).view(2, 2, 2, 4)
    y = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
    return y.reshape(4, 8)


def a_transposed_dropout(s, x):
    return functional.dropout(s.m[0](x).t().unsqueeze(0), 0.5).squeeze(0).t()


def noisy(s, x):
    return s.m[0](x) + torch.randn_like(x) * torch.rand(8) + torch.randperm(4)[:, None]


def by_a_number(s, x):
    return s.m[0](x) * x.abs().max().item()


def one_recurrence(kind):
    return words(kind, forward=lambda s, x: s.m[0](x)[0][..., :8])


def token_targets():
    targets = torch.randint(0, 8, (4,))
    targets[0] = -100
    return targets


def embedded(module, y):
    batch = torch.randint(0, 16, (4, 3)), torch.randn(*y)
    return nn.Sequential(module), functional.mse_loss, batch


def in_channels_last():
    model, loss, (x, y) = images(nn.ReLU())
    return model, loss, (x.to(memory_format=torch.channels_last), y)


def weighted():
    return nn.CrossEntropyLoss(torch.rand(8), label_smoothing=0.1)


def transcribed(targets, *lengths):
    """CTC's loss of two sequences of six."""
    model = Whole(lambda s, x: s.m[0](x).log_softmax(2), nn.Linear(8, 5))

    def loss_fn(out, targets):
        return functional.ctc_loss(out, targets, *lengths)

    return model, loss_fn, (torch.randn(6, 2, 8), targets)


def solved(s, x):
    matrix = s.m[0].weight @ s.m[0].weight.T + torch.eye(8)
    return torch.linalg.solve(matrix, s.m[0](x).T).T * torch.logdet(matrix)


def frozen(module):
    return module.requires_grad_(False)


KEPT = torch.arange(8.0)


def a_constant_copied(s, x):
    mask = KEPT.clone()
    mask[::2] = 0
    return s.m[0](x) * mask.add_(1)


def views_of_a_constant(s, x):
    return s.m[0](x) * KEPT[None] + KEPT.view(2, 4)[:, :2].flatten().repeat(2)


def written_in_parts_of_a_storage(s, x):
    """Slices, rows and a diagonal of tensors that are parts of larger ones."""
    part = x.new_zeros(len(x) + 3, 90)[2:-1, 1:9]
    part[:, :4] = s.m[0](x)[:, :4]
    part[0] = part[1] + 1
    part[:, 4:].copy_(x[:, 4:].tanh())
    part.diagonal().copy_(x.sum())
    whole = x.new_zeros(len(x), 90)[:, 70:78]
    whole[:] = s.m[0](x)
    return part.tanh() + whole


def grouped_products(s, x):
    ends = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32)
    return s.m[0](functional.grouped_mm(x, s.w, offs=ends).relu())


def in_eight_bits(s, x):
    """A layer whose weights and result are rounded to eight bits, with gradients."""
    weight = s.m[0].weight.to(torch.float8_e4m3fn).to(torch.float32)
    y = functional.linear(x, weight)
    return y + (y.detach().to(torch.float8_e5m2).to(torch.float32) - y.detach())


def normed_twice(s, x):
    return s.m[1](s.m[1](s.m[0](x)).tanh())


QUICK = MappingProxyType(
    {
        "counting_norm": lambda: vectors(
            normed_twice, linear(), nn.BatchNorm1d(8, momentum=None)
        ),
        "eight_bits": lambda: vectors(in_eight_bits, linear()),
        "frozen_before_a_norm": lambda: vectors(
            lambda s, x: s.m[2](s.m[1](s.m[0](x))),
            frozen(linear()),
            nn.BatchNorm1d(8),
            linear(),
        ),
        "ctc": lambda: transcribed(
            torch.randint(1, 5, (2, 4)), torch.tensor([6, 5]), torch.tensor([3, 2])
        ),
        "solved": lambda: vectors(solved, linear()),
        "added_to": lambda: vectors(added_to, linear()),
        "put": lambda: vectors(put, linear()),
        "written_in_slices": lambda: vectors(written_in_slices, linear()),
        "written_in_parts_of_a_storage": lambda: vectors(
            written_in_parts_of_a_storage, linear()
        ),
        "grouped_products": lambda: vectors(
            grouped_products, linear(), w=nn.Parameter(torch.randn(2, 8, 8))
        ),
        "set_by_mask": lambda: vectors(set_by_mask, linear()),
        "without_gradient": lambda: vectors(without_gradient, linear(), linear()),
        "complex": lambda: vectors(
            complex_numbers,
            linear(),
            w=nn.Parameter(torch.randn(5, dtype=torch.complex64)),
        ),
        "counted": lambda: vectors(counted, linear(), n=torch.tensor(0)),
        "averaged_anew": lambda: vectors(averaged_anew, linear(), e=torch.zeros(8)),
        "kept_for_the_loss": lambda: vectors(kept_for_the_loss, linear()),
        "checkpointed": lambda: vectors(checkpointed, linear(), linear()),
        "custom_function": lambda: vectors(
            lambda s, x: Square.apply(s.m[0](x)), linear()
        ),
        "attention": lambda: vectors(attention, linear()),
        "a_transposed_dropout": lambda: vectors(a_transposed_dropout, linear()),
        "noisy": lambda: vectors(noisy, linear()),
        "by_a_number": lambda: vectors(by_a_number, linear()),
        "unused": lambda: vectors(lambda s, x: s.m[0](x), linear(), linear()),
        "heads": lambda: words(
            nn.MultiheadAttention(8, 2, 0.1), forward=lambda s, x: s.m[0](x, x, x)[0]
        ),
        "lstm": lambda: one_recurrence(
            nn.LSTM(8, 4, 2, dropout=0.2, bidirectional=True)
        ),
        "gru": lambda: one_recurrence(nn.GRU(8, 32, 2, dropout=0.2)),
        "narrow_gru": lambda: one_recurrence(nn.GRU(8, 8, 2, dropout=0.2)),
        "batch_norm": lambda: images(nn.BatchNorm2d(4)),
        "channels_last": in_channels_last,
        "interpolated": lambda: images(
            nn.Upsample(size=(5, 7), mode="bicubic"), (2, 4, 5, 7)
        ),
        "weighted_loss": lambda: behind(
            nn.ReLU(inplace=True), y=token_targets(), loss=weighted()
        ),
        "embedding_renormed": lambda: embedded(
            nn.Embedding(16, 8, max_norm=1.0), (4, 3, 8)
        ),
        "spectral_norm": lambda: images(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1))
        ),
    }
)
"""Tried with every change; each stands for others among `CASES`."""

_BEHIND: dict[str, Callable[[], nn.Module]] = {
    "dropout_in_place": lambda: nn.Dropout(0.3, inplace=True),
    "alpha_dropout": lambda: nn.AlphaDropout(0.3),
    "feature_alpha_dropout": lambda: nn.FeatureAlphaDropout(0.3),
    "rrelu": nn.RReLU,
    "layer_norm": lambda: nn.LayerNorm(8),
    "rms_norm": lambda: nn.RMSNorm(8),
    "batch_norm_1d": lambda: nn.BatchNorm1d(8),
    "prelu": nn.PReLU,
    "selu": lambda: nn.SELU(inplace=True),
    "glu": lambda: nn.Sequential(nn.Linear(8, 16), nn.GLU()),
    "hardswish": nn.Hardswish,
}

_IMAGES: dict[str, Callable[[], tuple]] = {
    "group_norm": lambda: images(nn.GroupNorm(2, 4)),
    "instance_norm": lambda: images(
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    ),
    "dropout_2d": lambda: images(nn.Dropout2d(0.3)),
    "nearest": lambda: images(nn.Upsample(scale_factor=2), (2, 4, 12, 12)),
    "max_pool": lambda: images(nn.MaxPool2d(2), (2, 4, 3, 3)),
    "adaptive": lambda: images(nn.AdaptiveAvgPool2d(2), (2, 4, 2, 2)),
    "transposed": lambda: images(nn.ConvTranspose2d(4, 4, 2, 2), (2, 4, 12, 12)),
    "depthwise": lambda: images(nn.Conv2d(4, 4, 3, padding=1, groups=4)),
    "circular": lambda: images(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")),
    "weight_norm": lambda: images(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))
    ),
    "reflected": lambda: images(nn.ReflectionPad2d(1), (2, 4, 8, 8)),
}

CASES = MappingProxyType(
    {
        **QUICK,
        **{name: lambda f=f: behind(f()) for name, f in _BEHIND.items()},
        **_IMAGES,
        "averaged_in_place": lambda: vectors(
            averaged_in_place, linear(), e=torch.zeros(8)
        ),
        "encoder": lambda: words(nn.TransformerEncoderLayer(8, 2, 16)),
        "transformer": lambda: words(
            nn.Transformer(8, 2, 1, 1, 16), forward=lambda s, x: s.m[0](x, x)
        ),
        "rnn": lambda: one_recurrence(nn.RNN(8, 4, bidirectional=True)),
        "bce": lambda: vectors(
            lambda s, x: s.m[0](x),
            linear(),
            loss=lambda out, y: functional.binary_cross_entropy_with_logits(
                out, y.sigmoid()
            ),
        ),
        "embedding_bag": lambda: embedded(nn.EmbeddingBag(16, 8, mode="mean"), (4, 8)),
        "vmap": lambda: vectors(
            lambda s, x: torch.vmap(lambda row: s.m[0](row).tanh())(x), linear()
        ),
        "hessian": lambda: vectors(second_derivatives, linear()),
        "sorted": lambda: vectors(
            lambda s, x: s.m[0](x).cumsum(1).sort(1)[0].flip(0), linear()
        ),
        "scattered": lambda: vectors(
            lambda s, x: torch.zeros(4, 8).scatter_add(
                1, torch.zeros(4, 8, dtype=torch.long), s.m[0](x)
            ),
            linear(),
        ),
        "gumbel": lambda: vectors(
            lambda s, x: functional.gumbel_softmax(s.m[0](x), hard=True), linear()
        ),
        "strided": lambda: vectors(
            lambda s, x: s.m[0](x).as_strided((4, 4), (8, 2)), linear(), y=(4, 4)
        ),
        "ctc_of_numbers": lambda: transcribed(
            torch.randint(1, 5, (2, 3)), (6, 6), (3, 1)
        ),
        "ctc_in_a_row": lambda: transcribed(
            torch.randint(1, 5, (5,)), torch.tensor([6, 6]), torch.tensor([3, 2])
        ),
        "a_constant_copied": lambda: vectors(a_constant_copied, linear()),
        "views_of_a_constant": lambda: vectors(views_of_a_constant, linear()),
        "input_changed": lambda: vectors(lambda s, x: s.m[0](x.mul_(0.5)), linear()),
    }
)
