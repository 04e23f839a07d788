"""Small modules, each with something that a captured step may get wrong."""

from types import MappingProxyType

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.torch_programs import rows_of


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


def images(module, y=(2, 4, 6, 6), form=torch.contiguous_format):
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), module)
    x = torch.randn(2, 4, 6, 6).to(memory_format=form)
    return model, functional.mse_loss, (x, torch.randn(*y))


def binary(out, y):
    return functional.binary_cross_entropy_with_logits(out, y.sigmoid())


def words(model, y=(2, 4, 8), forward=lambda s, x: s.m[0](x)):
    batch = torch.randn(2, 4, 8), torch.randn(*y)
    return Whole(forward, model), functional.mse_loss, batch


def without_gradient(s, x):
    with torch.no_grad():
        weight = s.m[0](x).softmax(1)
    return s.m[1](x) * weight


def checkpointed(s, x):
    def inside(v):
        return functional.dropout(s.m[0](v).relu(), 0.3, training=True)

    y = checkpoint(inside, x, use_reentrant=False)
    return y + checkpoint(s.m[1], y, use_reentrant=True)


def one_recurrence(kind):
    return words(kind, forward=lambda s, x: s.m[0](x)[0][..., :8])


def token_targets():
    targets = torch.randint(0, 8, (4,))
    targets[0] = -100
    return targets


def embedded(module, y):
    batch = torch.randint(0, 16, (4, 3)), torch.randn(*y)
    return nn.Sequential(module), functional.mse_loss, batch


def transcribed(targets, *lengths):
    """CTC's loss of two sequences of six."""
    model = Whole(lambda s, x: s.m[0](x).log_softmax(2), nn.Linear(8, 5))

    def loss_fn(out, targets):
        return functional.ctc_loss(out, targets, *lengths)

    return model, loss_fn, (torch.randn(6, 2, 8), targets)


def frozen(module):
    return module.requires_grad_(False)


KEPT = torch.arange(8.0)


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


def in_eight_bits(s, x):
    """A layer whose weights and result are rounded to eight bits, with gradients."""
    weight = s.m[0].weight.to(torch.float8_e4m3fn).to(torch.float32)
    y = functional.linear(x, weight)
    return y + (y.detach().to(torch.float8_e5m2).to(torch.float32) - y.detach())


OF_VECTORS = """
def build():
    def forward(s, x):
        {forward}
    return vectors(forward, {parts})
"""
"""Of a forward pass of a module `s`, and of the module's parts and tensors."""

OF_MODULES = """
def build():
    return {case}
"""

_ROWS = (
    *rows_of(
        """
counting_norm
    | s.m[1](s.m[1](s.m[0](x)).tanh()) | linear(), nn.BatchNorm1d(8, momentum=None)
    | quick
eight_bits | in_eight_bits(s, x) | linear() | quick
frozen_before_a_norm
    | s.m[2](s.m[1](s.m[0](x))) | frozen(linear()), nn.BatchNorm1d(8), linear() | quick
solved
    | matrix = s.m[0].weight @ s.m[0].weight.T + torch.eye(8)
    ; torch.linalg.solve(matrix, s.m[0](x).T).T * torch.logdet(matrix) | linear()
    | quick
chosen | s.m[0](x)[:, torch.multinomial(torch.arange(8.0) + 1, 8)] | linear() | quick
between | s.m[0](x) + torch.zeros(8, 2).t().random_(3, 9)[:1].tanh() | linear() | quick
added_to | y = s.m[0](x); y += x; functional.relu_(y) | linear() | quick
put
    | y = s.m[0](x).clone(); y.index_put_((torch.tensor([0, 2]),), torch.zeros(8))
    | linear() | quick
written_in_slices
    | y = s.m[0](x); z = torch.zeros_like(y); z[:, ::2] = y[:, 1::2]; z[1] *= 2
    ; z.t()[0].add_(1); z | linear() | quick
written_in_parts_of_a_storage
    | written_in_parts_of_a_storage(s, x) | linear() | quick
grouped_products
    | ends = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32)
    ; s.m[0](functional.grouped_mm(x, s.w, offs=ends).relu())
    | linear(), w=nn.Parameter(torch.randn(2, 8, 8)) | quick
set_by_mask | y = s.m[0](x) * 1; y[x > 0] = 0.0; y | linear() | quick
without_gradient | without_gradient(s, x) | linear(), linear() | quick
complex
    | torch.fft.irfft(torch.fft.rfft(s.m[0](x), dim=1) * s.w, dim=1)
    | linear(), w=nn.Parameter(torch.randn(5, dtype=torch.complex64)) | quick
counted | s.n.add_(1); s.m[0](x) * s.n.float() | linear(), n=torch.tensor(0) | quick
averaged_anew
    | y = s.m[0](x); s.e = 0.9 * s.e + 0.1 * y.detach().mean(0); y - s.e
    | linear(), e=torch.zeros(8) | quick
kept_for_the_loss | s.last = s.m[0](x); s.last * 2 | linear() | quick
checkpointed | checkpointed(s, x) | linear(), linear() | quick
custom_function | Square.apply(s.m[0](x)) | linear() | quick
attention
    | q = s.m[0](x).view(2, 2, 2, 4)
    ; y = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
    ; y.reshape(4, 8) | linear() | quick
a_transposed_dropout
    | functional.dropout(s.m[0](x).t().unsqueeze(0), 0.5).squeeze(0).t() | linear()
    | quick
noisy
    | s.m[0](x) + torch.randn_like(x) * torch.rand(8) + torch.randperm(4)[:, None]
    | linear() | quick
in_complex_numbers
    | z = torch.view_as_complex(s.m[1].weight.view(8, 4, 2)).mean(0)
    ; torch.fft.irfft(torch.fft.rfft(s.m[0](x))[:, :4] * z, 8) | linear(), linear()
    | quick
in_windows_of_two_kinds
    | y = s.m[0](x)[None, None]; z = functional.max_pool2d(y, 2, dilation=2).mean()
    ; y[0, 0] * (functional.max_pool2d(y, 3, 2, 1, ceil_mode=True).mean() + z)
    | linear() | quick
in_a_larger_storage
    | s.m[0](x) * s.m[1](x.repeat(64, 1).reshape(1, 4, 8, 8, 8)).mean()
    | linear(), nn.ConvTranspose3d(4, 2, 1) | quick
by_a_number | s.m[0](x) * x.abs().max().item() | linear() | quick
unused | s.m[0](x) | linear(), linear() | quick
averaged_in_place
    | y = s.m[0](x); s.e.mul_(0.9).add_(y.detach().mean(0), alpha=0.1); y - s.e
    | linear(), e=torch.zeros(8)
bce | s.m[0](x) | linear(), loss=binary
vmap | torch.vmap(lambda row: s.m[0](row).tanh())(x) | linear()
hessian | second_derivatives(s, x) | linear()
sorted | s.m[0](x).cumsum(1).sort(1)[0].flip(0) | linear()
scattered
    | places = torch.zeros(4, 8, dtype=torch.long)
    ; torch.zeros(4, 8).scatter_add(1, places, s.m[0](x)) | linear()
gumbel | functional.gumbel_softmax(s.m[0](x), hard=True) | linear()
strided | s.m[0](x).as_strided((4, 4), (8, 2)) | linear(), y=(4, 4)
a_constant_copied
    | mask = KEPT.clone(); mask[::2] = 0; s.m[0](x) * mask.add_(1) | linear()
views_of_a_constant
    | s.m[0](x) * KEPT[None] + KEPT.view(2, 4)[:, :2].flatten().repeat(2) | linear()
input_changed | s.m[0](x.mul_(0.5)) | linear()
""",
        globals(),
        OF_VECTORS,
        "forward parts",
    ),
    *rows_of(
        """
ctc
    | transcribed(
    torch.randint(1, 5, (2, 4)), torch.tensor([6, 5]), torch.tensor([3, 2]))
    | quick
heads
    | words(nn.MultiheadAttention(8, 2, 0.1), forward=lambda s, x: s.m[0](x, x, x)[0])
    | quick
lstm | one_recurrence(nn.LSTM(8, 4, 2, dropout=0.2, bidirectional=True)) | quick
gru | one_recurrence(nn.GRU(8, 32, 2, dropout=0.2)) | quick
narrow_gru | one_recurrence(nn.GRU(8, 8, 2, dropout=0.2)) | quick
batch_norm | images(nn.BatchNorm2d(4)) | quick
channels_last | images(nn.ReLU(), form=torch.channels_last) | quick
interpolated | images(nn.Upsample(size=(5, 7), mode="bicubic"), (2, 4, 5, 7)) | quick
weighted_loss
    | behind(nn.ReLU(inplace=True), y=token_targets(),
    loss=nn.CrossEntropyLoss(torch.rand(8), label_smoothing=0.1)) | quick
embedding_renormed | embedded(nn.Embedding(16, 8, max_norm=1.0), (4, 3, 8)) | quick
spectral_norm
    | images(nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1))) | quick
dropout_in_place | behind(nn.Dropout(0.3, inplace=True))
alpha_dropout | behind(nn.AlphaDropout(0.3))
feature_alpha_dropout | behind(nn.FeatureAlphaDropout(0.3))
rrelu | behind(nn.RReLU())
layer_norm | behind(nn.LayerNorm(8))
rms_norm | behind(nn.RMSNorm(8))
batch_norm_1d | behind(nn.BatchNorm1d(8))
prelu | behind(nn.PReLU())
selu | behind(nn.SELU(inplace=True))
glu | behind(nn.Sequential(nn.Linear(8, 16), nn.GLU()))
hardswish | behind(nn.Hardswish())
group_norm | images(nn.GroupNorm(2, 4))
instance_norm | images(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
dropout_2d | images(nn.Dropout2d(0.3))
nearest | images(nn.Upsample(scale_factor=2), (2, 4, 12, 12))
max_pool | images(nn.MaxPool2d(2), (2, 4, 3, 3))
adaptive | images(nn.AdaptiveAvgPool2d(2), (2, 4, 2, 2))
transposed | images(nn.ConvTranspose2d(4, 4, 2, 2), (2, 4, 12, 12))
depthwise | images(nn.Conv2d(4, 4, 3, padding=1, groups=4))
circular | images(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"))
weight_norm | images(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)))
reflected | images(nn.ReflectionPad2d(1), (2, 4, 8, 8))
encoder | words(nn.TransformerEncoderLayer(8, 2, 16))
transformer | words(nn.Transformer(8, 2, 1, 1, 16), forward=lambda s, x: s.m[0](x, x))
rnn | one_recurrence(nn.RNN(8, 4, bidirectional=True))
embedding_bag | embedded(nn.EmbeddingBag(16, 8, mode="mean"), (4, 8))
ctc_of_numbers | transcribed(torch.randint(1, 5, (2, 3)), (6, 6), (3, 1))
ctc_in_a_row
    | transcribed(torch.randint(1, 5, (5,)), torch.tensor([6, 6]), torch.tensor([3, 2]))
""",
        globals(),
        OF_MODULES,
        "case",
    ),
)

CASES = MappingProxyType({name: build for name, build, _ in _ROWS})

QUICK = MappingProxyType({name: build for name, build, word in _ROWS if word})
"""Tried with every change; each stands for others among `CASES`."""
