"""Small PyTorch networks that ranks train together; PyTorch is imported when asked."""


def block_of(nn):
    """Two convolutions and a shortcut, batch norm after each convolution."""

    class Block(nn.Module):
        def __init__(self, inputs, outputs, stride):
            super().__init__()
            self.a = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.an = nn.BatchNorm2d(outputs)
            self.b = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.bn = nn.BatchNorm2d(outputs)
            self.down = nn.Sequential()
            if stride > 1:
                self.down = nn.Sequential(
                    nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                    nn.BatchNorm2d(outputs),
                )

        def forward(self, x):
            y = self.bn(self.b(self.an(self.a(x)).relu()))
            return (y + self.down(x)).relu()

    return Block


def residual_net():
    """As ResNet-18 is built."""
    from torch import nn

    Block = block_of(nn)
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(Block(4, 4, 1), Block(4, 8, 2), Block(8, 8, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
    )


def resnet18():
    """The network itself, for 5 classes."""
    from torch import nn

    Block = block_of(nn)
    inputs, blocks = 64, []
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.MaxPool2d(3, 2, 1), *blocks),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 5)),
    )


def u_net():
    """Down, up again, and what was there before beside it."""
    import torch
    from torch import nn

    def twice(inputs, outputs):
        return nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)),
            nn.ReLU(inplace=True),
        )

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.low = twice(3, 4), twice(4, 8)
            self.up = nn.ConvTranspose2d(8, 4, 2, 2)
            self.last, self.out = twice(8, 4), nn.Conv2d(4, 5, 1)

        def forward(self, x):
            high = self.first(x)
            low = self.low(nn.functional.max_pool2d(high, 2))
            return self.out(self.last(torch.cat([high, self.up(low)], 1)))

    return UNet()


def plain_net():
    """Without batch norm: it may run in passes."""
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5))
    )


NETWORKS = {
    "plain": plain_net,
    "residual": residual_net,
    "resnet18": resnet18,
    "unet": u_net,
}
