"""Inception-v4 as SuperNeurons' public program builds it.

Convolutions are followed by a rectification and, but for the very first, by no batch
norm; module C forks within two of its branches and concatenates all six ends at once.
"""

from bench.papers.layers import LayerBuilder, Network

__all__ = ["inception_v4"]

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
