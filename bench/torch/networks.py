"""Networks of the library in PyTorch: the same layers, written by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def alexnet_owt() -> nn.Module:
    """64-192-384-256-256 without normalisation, 1000 classes."""
    channels = (64, 192, 384, 256, 256)
    kernels = ((11, 4, 2), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1))
    layers: list[nn.Module] = []
    before = 3
    for i, (count, (kernel, stride, padding)) in enumerate(
        zip(channels, kernels, strict=True)
    ):
        conv = nn.Conv2d(before, count, kernel, stride=stride, padding=padding)
        layers += [conv, nn.ReLU(inplace=True)]
        if i in (0, 1, 4):
            layers.append(nn.MaxPool2d(3, 2))
        before = count
    layers.append(nn.Flatten())
    for inputs in (9216, 4096):
        layers += [nn.Dropout(), nn.Linear(inputs, 4096), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))


class _Block(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_bn(inputs, width, 3, stride),
            nn.ReLU(inplace=True),
            *_conv_bn(width, width, 3, 1),
        )
        same = stride == 1 and inputs == width
        self.shortcut = nn.Sequential(
            *(() if same else _conv_bn(inputs, width, 1, stride))
        )

    def forward(self, x: Any) -> Any:
        """Their sum."""
        return torch.relu_(self.body(x) + self.shortcut(x))


class _Bottleneck(nn.Module):  # type: ignore[misc]  # likewise
    """Three convolutions, of which the second steps, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_bn(inputs, width, 1, 1),
            nn.ReLU(inplace=True),
            *_conv_bn(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_conv_bn(width, 4 * width, 1, 1),
        )
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Sequential(
            *(() if same else _conv_bn(inputs, 4 * width, 1, stride))
        )

    def forward(self, x: Any) -> Any:
        """Their sum."""
        return torch.relu_(self.body(x) + self.shortcut(x))


def _conv_bn(inputs: int, width: int, kernel: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(
        inputs, width, kernel, stride=stride, padding=kernel // 2, bias=False
    )
    return [conv, nn.BatchNorm2d(width)]


def resnet18() -> nn.Module:
    """Basic blocks, two a stage, 1000 classes."""
    return _resnet(_Block, (2, 2, 2, 2), 1)


def resnet50() -> nn.Module:
    """Bottlenecks, 1000 classes."""
    return _resnet(_Bottleneck, (3, 4, 6, 3), 4)


def _resnet(
    block: Callable[[int, int, int], nn.Module], depths: Sequence[int], wider: int
) -> nn.Module:
    layers: list[nn.Module] = [*_conv_bn(3, 64, 7, 2), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    before = 64
    for stage, depth in enumerate(depths):
        for i in range(depth):
            width = 64 << stage
            layers.append(block(before, width, 2 if stage and not i else 1))
            before = wider * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000)]
    return nn.Sequential(*layers)


class _UNet(nn.Module):  # type: ignore[misc]  # likewise
    """Four steps down, four up, 64 channels at the top."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64 << i for i in range(5)]
        pairs = zip([1, *widths[:-1]], widths, strict=True)
        self.down = nn.ModuleList(_twice(a, b) for a, b in pairs)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[3::-1]
        )
        self.join = nn.ModuleList(_twice(2 * w, w) for w in widths[3::-1])
        self.last = nn.Conv2d(64, 2, 1)

    def forward(self, x: Any) -> Any:
        """Logits a pixel."""
        skips = []
        for i, convs in enumerate(self.down):
            x = convs(nn.functional.max_pool2d(x, 2) if i else x)
            skips.append(x)
        for up, join, skip in zip(self.up, self.join, skips[3::-1], strict=True):
            x = join(torch.cat((skip, up(x)), 1))
        return self.last(x)


def _twice(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, width, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(inplace=True),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "alexnet_owt": alexnet_owt,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "unet2d": _UNet,
}
