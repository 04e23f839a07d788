"""vDNN's memory as arithmetic: feature maps that leave after their last reader.

Rules, with memory-optimal algorithms, thus without workspace: weights and their
gradients stay; rectifications are in place; a concatenation's inputs are slices of its
output, and a fork copies nothing. The baseline is Torch's: every map, and two gradient
buffers as large as the largest map. Forward, a layer holds its x and y. Backward, it
holds x, dy and dx, a pooling also y, and what the window search brings back meanwhile;
an in-place rectification is a moment of its own, before its layer's, with y and dy. The
softmax is a moment at the turn; the first layer makes no dx. The average is over all
moments. Which moments there are is our reading: the paper gives sums, not steps.

Which AlexNet and OverFeat vDNN was evaluated on is not known for sure, so two AlexNets
stand here. Rectifications in place hold no feature map; local response normalization is
left out.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from bench.papers.layers import FLOAT, Kind, Layer, LayerBuilder, Network

ALL = frozenset({Kind.CONV, Kind.POOL})
"""vDNN_all: the layers whose x is offloaded."""

CONV = frozenset({Kind.CONV})
"""vDNN_conv."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Under one policy, in bytes.

    Attributes:
        most: In the worst moment.
        average: Over all moments.
        offloaded: Moved to the host in one step.
    """

    most: int
    average: float
    offloaded: int


@dataclass(frozen=True, slots=True)
class Account:
    """One network at one batch size, in bytes.

    Attributes:
        maps: All feature maps, the batch included.
        weights: Parameters, once.
        baseline: Network-wide allocation.
        classifiers: Of it, fully connected layers' outputs, weights and gradients.
        conv: vDNN_conv.
        all: vDNN_all.
    """

    maps: int
    weights: int
    baseline: int
    classifiers: int
    conv: Usage
    all: Usage

    @property
    def saving(self) -> float:
        """Of vDNN_all's average against the baseline, as a fraction."""
        return 1 - self.all.average / self.baseline

    @property
    def feature_share(self) -> float:
        """Of the baseline, what is feature extraction's, as a fraction."""
        return 1 - self.classifiers / self.baseline

    @property
    def feature_saving(self) -> float:
        """The same without weights and their gradients, which nothing moves."""
        fixed = 2 * self.weights
        return 1 - (self.all.average - fixed) / (self.baseline - fixed)


def account(network: Network, batch: int) -> Account:
    """All of vDNN's figures for a network."""
    maps = _Maps(network)
    weights = FLOAT * network.parameters
    image = batch * FLOAT
    held = image * sum(maps.numel.values())
    largest = image * max(n for t, n in maps.numel.items() if t != LayerBuilder.DATA)
    full = [layer for layer in network.layers if layer.kind is Kind.FC]
    return Account(
        maps=held,
        weights=weights,
        baseline=held + 2 * largest + 2 * weights,
        classifiers=sum(
            image * layer.numel + 2 * FLOAT * (layer.weights + layer.biases)
            for layer in full
        ),
        conv=_usage(maps, batch, weights, CONV),
        all=_usage(maps, batch, weights, ALL),
    )


@dataclass(frozen=True, slots=True)
class _Step:
    kind: Kind
    x: str
    y: str
    rectified: bool


class _Maps:
    """Feature maps after merging what is in place, copied or a slice, and the steps."""

    def __init__(self, network: Network) -> None:
        of = _merged(network)
        self.numel = {of[t]: network.numel(of[t]) for t in of}
        self.steps = [
            _Step(layer.kind, of[x], of[y], _rectified(network, layer))
            for layer in network.layers
            if layer.kind in {Kind.CONV, Kind.POOL, Kind.FC}
            for x, y in [(layer.inputs[0], layer.outputs[0])]
        ]


def _merged(network: Network) -> dict[str, str]:
    """Tensor -> the tensor in whose memory it lies."""
    of = {LayerBuilder.DATA: LayerBuilder.DATA}
    for layer in network.layers:
        if layer.kind is Kind.CONCAT:
            (whole,) = layer.outputs
            parts = {of[t] for t in layer.inputs}
            of = {t: whole if root in parts else root for t, root in of.items()}
            of[whole] = whole
        elif layer.kind in {Kind.CONV, Kind.POOL, Kind.FC}:
            of[layer.outputs[0]] = layer.outputs[0]
        else:
            of.update(dict.fromkeys(layer.outputs, of[layer.inputs[0]]))
    return of


def _rectified(network: Network, layer: Layer) -> bool:
    following = network.consumer.get(layer.outputs[0])
    return following is not None and following.kind is Kind.ACT


def _usage(maps: _Maps, batch: int, weights: int, policy: frozenset[Kind]) -> Usage:
    moving = {step.x for step in maps.steps if step.kind in policy}
    live = _forward(maps, moving)
    live += _backward(maps, moving)
    image = FLOAT * batch
    return Usage(
        most=2 * weights + image * max(live),
        average=2 * weights + image * sum(live) / len(live),
        offloaded=image * _numel(maps, moving),
    )


def _forward(maps: _Maps, moving: set[str]) -> list[int]:
    """Values of one image held in each step; a map leaves after its last reader."""
    readers = Counter(step.x for step in maps.steps)
    resident: set[str] = set()
    live = []
    for step in maps.steps:
        resident |= {step.x, step.y}
        live.append(_numel(maps, resident))
        readers[step.x] -= 1
        if step.x in moving and not readers[step.x]:
            resident.remove(step.x)
    return live


def _backward(maps: _Maps, moving: set[str]) -> list[int]:
    """Values of one image held in each moment, from the softmax back."""

    def total(*more: str) -> int:
        return _numel(maps, resident | {*more}) + _numel(maps, gradients)

    away, resident = set(moving), maps.numel.keys() - moving
    gradients = {maps.steps[-1].y}
    writers = Counter(step.y for step in maps.steps)
    _bring_back(maps, len(maps.steps), away, resident)
    live = [total()]
    for i in reversed(range(len(maps.steps))):
        step = maps.steps[i]
        away.discard(step.x)
        resident.add(step.x)
        _bring_back(maps, i, away, resident)
        if step.rectified:
            live.append(total(step.y))
        writers[step.y] -= 1
        if not writers[step.y]:
            resident.discard(step.y)
        if step.x != LayerBuilder.DATA:
            gradients.add(step.x)
        live.append(total(step.y) if step.kind is Kind.POOL else total())
        if not writers[step.y]:
            gradients.remove(step.y)
    return live


def _numel(maps: _Maps, tensors: Iterable[str]) -> int:
    return sum(maps.numel[t] for t in tensors)


def _bring_back(maps: _Maps, before: int, away: set[str], resident: set[str]) -> None:
    """The window search: the nearest map away, not beyond the nearest convolution."""
    for step in reversed(maps.steps[:before]):
        if step.x in away:
            away.remove(step.x)
            resident.add(step.x)
            return
        if step.kind is Kind.CONV:
            return


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
