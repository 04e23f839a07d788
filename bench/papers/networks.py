"""The networks SuperNeurons trained, as its public programs build them.

Convolutions of Inception-v4 are followed by a rectification and, but for the very
first, by no batch norm; module C forks within two of its branches and concatenates all
six ends at once.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from bench.papers.layers import LayerBuilder, Network, Shape

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


_Conv = tuple[int, int, int]
"""Filters, kernel height, kernel width; the size stays."""


def inception_v4(image: int = 299) -> Network:
    """Stem, four A, reduction, seven B, reduction, three C, one classifier."""
    b = LayerBuilder((3, image, image))
    x = _stem(b)
    for _ in range(4):
        x = _module_a(b, x)
    x = _reduction_a(b, x)
    for _ in range(7):
        x = _module_b(b, x)
    x = _reduction_b(b, x)
    for _ in range(3):
        x = _module_c(b, x)
    b.softmax(b.fc(b.dropout(b.pool(x, 8, 1)), 1000))
    return b.build("InceptionV4")


def _stem(b: LayerBuilder) -> str:
    x = b.act(b.bn(b.conv(b.DATA, 32, 3, 2)))
    x = b.conv_act(b.conv_act(x, 32, 3), 64, 3, pad=1)
    left, right = b.fork(x, 2)
    x = b.concat([b.conv_act(left, 96, 3, 2), b.pool(right, 3, 2)])
    left, right = b.fork(x, 2)
    left = b.conv_act(_chain(b, left, (64, 1, 1)), 96, 3)
    right = b.conv_act(_chain(b, right, (64, 1, 1), (64, 1, 7), (64, 7, 1)), 96, 3)
    left, right = b.fork(b.concat([left, right]), 2)
    return b.concat([b.conv_act(left, 192, 3, 2), b.pool(right, 3, 2)])


def _module_a(b: LayerBuilder, x: str) -> str:
    one, two, three, four = b.fork(x, 4)
    return b.concat(
        [
            _chain(b, b.pool(one, 3, 1, 1), (96, 1, 1)),
            _chain(b, two, (96, 1, 1)),
            _chain(b, three, (64, 1, 1), (96, 3, 3)),
            _chain(b, four, (64, 1, 1), (96, 3, 3), (96, 3, 3)),
        ]
    )


def _reduction_a(b: LayerBuilder, x: str) -> str:
    one, two, three = b.fork(x, 3)
    return b.concat(
        [
            b.pool(one, 3, 2),
            b.conv_act(two, 384, 3, 2),
            b.conv_act(_chain(b, three, (192, 1, 1), (224, 3, 3)), 256, 3, 2),
        ]
    )


def _module_b(b: LayerBuilder, x: str) -> str:
    one, two, three, four = b.fork(x, 4)
    long = ((192, 1, 1), (192, 1, 7), (224, 7, 1), (224, 1, 7), (256, 7, 1))
    return b.concat(
        [
            _chain(b, b.pool(one, 3, 1, 1), (128, 1, 1)),
            _chain(b, two, (384, 1, 1)),
            _chain(b, three, (192, 1, 1), (224, 1, 7), (256, 7, 1)),
            _chain(b, four, *long),
        ]
    )


def _reduction_b(b: LayerBuilder, x: str) -> str:
    one, two, three = b.fork(x, 3)
    long = _chain(b, three, (256, 1, 1), (256, 1, 7), (320, 7, 1))
    return b.concat(
        [
            b.pool(one, 3, 2),
            b.conv_act(_chain(b, two, (192, 1, 1)), 192, 3, 2),
            b.conv_act(long, 320, 3, 2),
        ]
    )


def _module_c(b: LayerBuilder, x: str) -> str:
    one, two, three, four = b.fork(x, 4)
    ends = [
        _chain(b, b.pool(one, 3, 1, 1), (256, 1, 1)),
        _chain(b, two, (256, 1, 1)),
    ]
    ends += _split(b, _chain(b, three, (384, 1, 1)))
    ends += _split(b, _chain(b, four, (384, 1, 1), (448, 1, 3), (512, 3, 1)))
    return b.concat(ends)


def _split(b: LayerBuilder, x: str) -> list[str]:
    flat, tall = b.fork(x, 2)
    return [_chain(b, flat, (256, 1, 3)), _chain(b, tall, (256, 3, 1))]


def _chain(b: LayerBuilder, x: str, *convs: _Conv) -> str:
    for K, r, s in convs:
        x = b.conv_act(x, K, (r, s), pad=(r // 2, s // 2))
    return x


MODELS: Mapping[str, Callable[..., Network]] = MappingProxyType(
    {
        "alexnet": alexnet,
        "vgg16": vgg16,
        **{name: partial(resnet, blocks) for name, blocks in BLOCKS.items()},
        "inception_v4": inception_v4,
    }
)
"""Name -> builder; its one argument, if given, is the image's height and width."""


def of_library(name: str) -> str:
    """What the library calls one of `MODELS`."""
    if name in BLOCKS:
        return "resnet:" + ",".join(map(str, BLOCKS[name]))
    return name
