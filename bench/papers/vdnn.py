"""vDNN's memory as arithmetic: feature maps that leave after their last reader.

Rules, with memory-optimal algorithms, thus without workspace: weights and their
gradients stay; rectifications are in place; a concatenation's inputs are slices of its
output, and a fork copies nothing. The baseline is Torch's: every map, and two gradient
buffers as large as the largest map. Forward, a layer holds its x and y. Backward, it
holds x, dy and dx, a pooling also y, and what the window search brings back meanwhile;
an in-place rectification is a moment of its own, before its layer's, with y and dy. The
softmax is a moment at the turn; the first layer makes no dx. The average is over all
moments. Which moments there are is our reading: the paper gives sums, not steps.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from bench.papers.layers import FLOAT, Kind, Layer, LayerBuilder, Network

__all__ = ["ALL", "CONV", "Account", "Usage", "account"]

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
