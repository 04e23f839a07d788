"""Networks that people train, with a loss and a batch each, always the same."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bench.torch.vision import timm_model, torchvision_model, vision_transformer

__all__ = [
    *("ZOO", "Case", "GPTConfig", "bert", "build", "classifier", "gpt", "llama"),
    *("transformer", "unet"),
]

_CLASSES = 10


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        model: In training mode.
        loss_fn: Of its result and the rest of the batch.
        batch: What the model is called with, and targets.
        parts: The model as a sequence; none if it is not one.
    """

    model: nn.Module
    loss_fn: Callable[..., torch.Tensor]
    batch: tuple[torch.Tensor, ...]
    parts: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a decoder."""

    layers: int = 6
    width: int = 192
    heads: int = 6
    length: int = 128
    vocabulary: int = 512
    dropout: float = 0.1


class _Block(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Attention and a perceptron, each behind a norm and beside a shortcut."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        d = config.width
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.heads, self.drop = config.heads, nn.Dropout(config.dropout)

    def forward(self, x: Any) -> Any:
        n, t, d = x.shape
        parts = self.qkv(self.ln1(x)).split(d, dim=2)
        q, k, v = (p.view(n, t, self.heads, -1).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(n, t, d)))
        return x + self.drop(self.down(functional.gelu(self.up(self.ln2(x)))))


class _Embedding(nn.Module):  # type: ignore[misc]  # likewise
    """Tokens and their positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, tokens: Any) -> Any:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.drop(self.tokens(tokens) + self.positions(positions))


def gpt(batch: int, config: GPTConfig) -> Case:
    """A decoder whose embedding is also its last layer."""
    embedding = _Embedding(config)
    head = nn.Linear(config.width, config.vocabulary, bias=False)
    head.weight = embedding.tokens.weight
    blocks = (_Block(config) for _ in range(config.layers))
    model = nn.Sequential(embedding, *blocks, nn.LayerNorm(config.width), head)
    shape = (batch, config.length)
    tokens, targets = (torch.randint(config.vocabulary, shape) for _ in range(2))
    return Case(model, _token_loss, (tokens, targets), tuple(model))


class _LlamaBlock(nn.Module):  # type: ignore[misc]  # likewise
    """Rotary attention and a gated perceptron, each behind a root-mean-square norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        d, hidden = config.width, 8 * config.width // 3
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d, bias=False)
        self.gate_up = nn.Linear(d, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)
        self.heads = config.heads
        half = d // config.heads // 2
        angles = torch.outer(
            torch.arange(config.length), 1e4 ** -(torch.arange(half) / half)
        )
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def _rotated(self, x: Any) -> Any:
        a, b = x.chunk(2, dim=-1)
        return torch.cat(
            (a * self.cos - b * self.sin, a * self.sin + b * self.cos), dim=-1
        )

    def forward(self, x: Any) -> Any:
        n, t, d = x.shape
        parts = self.qkv(self.norm1(x)).split(d, dim=2)
        q, k, v = (p.view(n, t, self.heads, -1).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(
            self._rotated(q), self._rotated(k), v, is_causal=True
        )
        x = x + self.proj(y.transpose(1, 2).reshape(n, t, d))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


def llama(batch: int, config: GPTConfig) -> Case:
    """A decoder with the blocks of Llama that tells the next token."""
    shape = (batch, config.length)
    model = nn.Sequential(
        nn.Embedding(config.vocabulary, config.width),
        *(_LlamaBlock(config) for _ in range(config.layers)),
        nn.RMSNorm(config.width),
        nn.Linear(config.width, config.vocabulary, bias=False),
    )
    tokens = torch.randint(config.vocabulary, shape)
    return Case(model, _token_loss, (tokens, torch.randint(config.vocabulary, shape)))


def bert(batch: int, config: GPTConfig) -> Case:
    """An encoder with the blocks of BERT that tells every token."""
    shape = (batch, config.length)
    block = nn.TransformerEncoderLayer(
        config.width,
        config.heads,
        4 * config.width,
        config.dropout,
        functional.gelu,
        batch_first=True,
    )
    model = nn.Sequential(
        _Embedding(config),
        nn.TransformerEncoder(block, config.layers, enable_nested_tensor=False),
        nn.Linear(config.width, config.vocabulary),
    )
    tokens = torch.randint(config.vocabulary, shape)
    return Case(model, _token_loss, (tokens, torch.randint(config.vocabulary, shape)))


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _images(model: nn.Module, batch: int, size: int) -> Case:
    """A classifier of colour images."""
    x, y = torch.randn(batch, 3, size, size), torch.randint(_CLASSES, (batch,))
    return Case(model, functional.cross_entropy, (x, y), tuple(_parts(model)))


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """A classifier's modules in their order, if its head follows its features."""
    for name, child in model.named_children():
        if name in ("classifier", "fc"):
            yield nn.Flatten()
        if isinstance(child, nn.Sequential):
            yield from child
        else:
            yield child


class _Level(nn.Module):  # type: ignore[misc]  # likewise
    """Two convolutions, what is below them at half the size, and two more."""

    def __init__(self, inputs: int, width: int, levels: int) -> None:
        super().__init__()
        self.first = _twice(inputs, width)
        self.below: nn.Module | None = None
        if levels > 1:
            self.below = nn.Sequential(
                nn.MaxPool2d(2),
                _Level(width, 2 * width, levels - 1),
                nn.ConvTranspose2d(2 * width, width, 2, stride=2),
            )
            self.last = _twice(2 * width, width)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        if self.below is None:
            return x
        return self.last(torch.cat((x, self.below(x)), 1))


def _twice(inputs: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for count in (inputs, width):
        layers += [nn.Conv2d(count, width, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def unet(batch: int, size: int, width: int, levels: int = 4) -> Case:
    """A U-Net that tells two kinds of pixels apart."""
    model = nn.Sequential(_Level(1, width, levels), nn.Conv2d(width, 2, 1))
    x, y = torch.randn(batch, 1, size, size), torch.randint(2, (batch, size, size))
    return Case(model, functional.cross_entropy, (x, y))


def classifier(name: str, batch: int, size: int) -> Case:
    """One of torchvision's."""
    return _images(torchvision_model(name, num_classes=_CLASSES), batch, size)


def transformer(batch: int, size: int, layers: int, width: int, dropout: float) -> Case:
    """A vision transformer over patches of 8 x 8 pixels."""
    model = vision_transformer(
        image_size=size,
        patch_size=8,
        num_layers=layers,
        num_heads=4,
        hidden_dim=width,
        mlp_dim=4 * width,
        dropout=dropout,
        num_classes=_CLASSES,
    )
    return _images(model, batch, size)


ZOO: dict[str, Callable[[], Case]] = {
    "resnet18": lambda: classifier("resnet18", 8, 32),
    "resnet50": lambda: classifier("resnet50", 4, 32),
    "densenet121": lambda: classifier("densenet121", 2, 32),
    "mobilenet_v3_small": lambda: classifier("mobilenet_v3_small", 8, 64),
    "efficientnet_b0": lambda: classifier("efficientnet_b0", 4, 64),
    "vit": lambda: transformer(8, 32, 3, 64, 0.1),
    "convnext_atto": lambda: _images(
        timm_model("convnext_atto", num_classes=_CLASSES, drop_path_rate=0.1), 4, 64
    ),
    "gpt": lambda: gpt(4, GPTConfig(layers=2, width=64, heads=2, length=32)),
    "unet": lambda: unet(4, 32, 8),
}
"""Small batches of small images: a step takes a fraction of a second."""


def build(name: str) -> Case:
    """A case of the zoo, always the same."""
    torch.manual_seed(0)
    return ZOO[name]()
