"""Networks written a second time, with PyTorch's modules and from their papers.

Parameters come in the order in which a module calls them, which is ours, too.
"""

import torch
from torch import Tensor, nn


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    )


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.first = conv_bn(inputs, width, 3, stride)
        self.second = conv_bn(width, width, 3)
        same = stride == 1 and inputs == width
        self.shortcut = nn.Identity() if same else conv_bn(inputs, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.relu(self.first(x)))
        return torch.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.stem = nn.Sequential(
            conv_bn(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.Sequential(
            *(BasicBlock(64, 64, 1) for _ in range(2)),
            *(
                block
                for width in (128, 256, 512)
                for block in (
                    BasicBlock(width // 2, width, 2),
                    BasicBlock(width, width, 1),
                )
            ),
        )
        self.classifier = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.blocks(self.stem(x)).mean((2, 3)))


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(),
            nn.Conv2d(inputs, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layers(x)], 1)


class DenseNet121(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        channels = 64
        for block, count in enumerate((6, 12, 24, 16)):
            if block:
                layers += [
                    nn.BatchNorm2d(channels),
                    nn.ReLU(),
                    nn.Conv2d(channels, channels // 2, 1, bias=False),
                    nn.AvgPool2d(2),
                ]
                channels //= 2
            for _ in range(count):
                layers.append(DenseLayer(channels, 32))
                channels += 32
        layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Recursive: a level is its convolutions around the level below it."""

    def __init__(self, inputs: int, channels: int, levels: int):
        super().__init__()
        self.down = double_conv(inputs, channels)
        self.levels = levels
        if levels:
            self.pool = nn.MaxPool2d(2)
            self.below = UNet(channels, 2 * channels, levels - 1)
            self.up = nn.ConvTranspose2d(2 * channels, channels, 2, 2)
            self.merge = double_conv(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        if not self.levels:
            return x
        y = self.up(self.below(self.pool(x)))
        return self.merge(torch.cat([x, y], 1))


class UNet2d(nn.Sequential):
    def __init__(self, classes: int):
        super().__init__(UNet(1, 64, 4), nn.Conv2d(64, classes, 1))
