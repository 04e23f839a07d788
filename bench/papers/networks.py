"""The networks SuperNeurons trained, as its public programs build them."""

from bench.papers.layers import LayerBuilder, Network, Shape

__all__ = ["BLOCKS", "alexnet", "resnet", "vgg16"]

BLOCKS = {
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
    "resnet2500": (6, 32, 788, 6),
}
"""Bottleneck blocks in each of the four stages."""


def alexnet(image: int = 227) -> Network:
    """One column, ungrouped, with LRN before pooling."""
    b = LayerBuilder(_rgb(image))
    x = b.lrn(b.conv_act(b.DATA, 96, 11, 4))
    x = b.lrn(b.conv_act(b.pool(x, 3, 2), 256, 5, pad=2))
    x = b.pool(x, 3, 2)
    for K in (384, 384, 256):
        x = b.conv_act(x, K, 3, pad=1)
    return _classified(b, b.pool(x, 3, 2), "AlexNet")


def vgg16(image: int = 227) -> Network:
    """Thirteen convolutions in five groups, three classifiers."""
    b = LayerBuilder(_rgb(image))
    x = b.DATA
    for depth, K in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(depth):
            x = b.conv_act(x, K, 3, pad=1)
        x = b.pool(x, 2, 2)
    return _classified(b, x, "VGG16")


def resnet(blocks: tuple[int, int, int, int], image: int = 227) -> Network:
    """Bottlenecks; forward, the shortcut is branch 0 and thus walked last.

    The sum takes the main branch first. Which is first is our inference: it changes
    what prefetching costs, nothing else.

    Args:
        blocks: In each stage; three layers a block, and two more, name the network.
        image: Height and width.
    """
    b = LayerBuilder(_rgb(image), bias=False)
    x = b.pool(b.act(b.bn(b.conv(b.DATA, 64, 7, 2, 3))), 3, 2)
    for stage, count in enumerate(blocks):
        for block in range(count):
            x = _bottleneck(b, x, 64 << stage, stage > 0 and block == 0, block == 0)
    x = b.softmax(b.fc(b.pool(x, 7, 1), 1000))
    return b.build(f"ResNet{3 * sum(blocks) + 2}")


def _bottleneck(b: LayerBuilder, x: str, K: int, halve: bool, project: bool) -> str:
    stride = 2 if halve else 1
    shortcut, y = b.fork(x, 2)
    if project:
        shortcut = b.bn(b.conv(shortcut, 4 * K, 1, stride))
    y = b.act(b.bn(b.conv(y, K, 1, stride)))
    y = b.act(b.bn(b.conv(y, K, 3, pad=1)))
    return b.act(b.join([b.bn(b.conv(y, 4 * K, 1)), shortcut]))


def _classified(b: LayerBuilder, x: str, name: str) -> Network:
    for _ in range(2):
        x = b.dropout(b.act(b.fc(x, 4096)))
    b.softmax(b.fc(x, 1000))
    return b.build(name)


def _rgb(image: int) -> Shape:
    return 3, image, image
