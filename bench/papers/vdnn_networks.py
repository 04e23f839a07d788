"""The networks vDNN was evaluated on; which AlexNet and OverFeat is not known for sure.

Two AlexNets stand here, therefore. Rectifications are in place, so that they hold no
feature map of their own; local response normalization is left out.
"""

from bench.papers.layers import LayerBuilder, Network

__all__ = ["alexnet_one_tower", "alexnet_wide", "googlenet", "overfeat", "vgg"]

_MODULES = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)
"""GoogLeNet's inception modules: 1x1; 1x1, 3x3; 1x1, 5x5; 1x1 after the pooling."""

_POOL_AFTER = (1, 6)


def alexnet_one_tower() -> Network:
    """The form of "One weird trick", at 224."""
    b = LayerBuilder((3, 224, 224))
    x = b.pool(b.conv_act(b.DATA, 64, 11, 4, 2), 3, 2)
    x = b.pool(b.conv_act(x, 192, 5, pad=2), 3, 2)
    return _three_and_classifiers(b, x, (384, 256, 256), (4096, 4096), 3, "AlexNet-OWT")


def alexnet_wide() -> Network:
    """The original's filters in one column, at 227."""
    b = LayerBuilder((3, 227, 227))
    x = b.pool(b.conv_act(b.DATA, 96, 11, 4), 3, 2)
    x = b.pool(b.conv_act(x, 256, 5, pad=2), 3, 2)
    return _three_and_classifiers(
        b, x, (384, 384, 256), (4096, 4096), 3, "AlexNet-wide"
    )


def overfeat() -> Network:
    """The fast model, at 231."""
    b = LayerBuilder((3, 231, 231))
    x = b.pool(b.conv_act(b.DATA, 96, 11, 4), 2, 2)
    x = b.pool(b.conv_act(x, 256, 5), 2, 2)
    return _three_and_classifiers(b, x, (512, 1024, 1024), (3072, 4096), 2, "OverFeat")


def vgg(extra: int = 0) -> Network:
    """VGG-16, with `extra` more convolutions in each of its five groups."""
    b = LayerBuilder((3, 224, 224))
    x = b.DATA
    for depth, K in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(depth + extra):
            x = b.conv_act(x, K, 3, pad=1)
        x = b.pool(x, 2, 2)
    return _classified(b, x, (4096, 4096), f"VGG-{16 + 5 * extra}")


def googlenet() -> Network:
    """The first version, without its auxiliary classifiers."""
    b = LayerBuilder((3, 224, 224))
    x = b.pool(b.conv_act(b.DATA, 64, 7, 2, 3), 3, 2, ceil=True)
    x = b.conv_act(b.conv_act(x, 64, 1), 192, 3, pad=1)
    x = b.pool(x, 3, 2, ceil=True)
    for i, module in enumerate(_MODULES):
        x = _inception(b, x, module)
        if i in _POOL_AFTER:
            x = b.pool(x, 3, 2, ceil=True)
    return _classified(b, b.pool(x, 7, 1), (), "GoogLeNet")


def _inception(b: LayerBuilder, x: str, filters: tuple[int, ...]) -> str:
    one, three, five, pooled = b.fork(x, 4)
    K1, R3, K3, R5, K5, KP = filters
    return b.concat(
        [
            b.conv_act(one, K1, 1),
            b.conv_act(b.conv_act(three, R3, 1), K3, 3, pad=1),
            b.conv_act(b.conv_act(five, R5, 1), K5, 5, pad=2),
            b.conv_act(b.pool(pooled, 3, 1, 1), KP, 1),
        ]
    )


def _three_and_classifiers(
    b: LayerBuilder, x: str, filters: tuple[int, ...], hidden: tuple[int, ...],
    window: int, name: str,
) -> Network:  # fmt: skip
    for K in filters:
        x = b.conv_act(x, K, 3, pad=1)
    return _classified(b, b.pool(x, window, 2), hidden, name)


def _classified(b: LayerBuilder, x: str, hidden: tuple[int, ...], name: str) -> Network:
    for K in hidden:
        x = b.act(b.fc(x, K))
    b.softmax(b.fc(x, 1000))
    return b.build(name)
