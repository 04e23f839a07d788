"""SuperNeurons' order of execution and what each of its steps must have in memory.

The route is depth first with counters: a layer that joins branches waits for all of
them, and a branch is finished before the next one begins; branch 0 is walked last, both
ways. A step's tensors follow from its layer's kind; gradients are made in place where
the public release makes them so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from bench.papers.layers import FLOAT, Kind, Layer, Network

__all__ = ["CHECKPOINTS", "Route", "Step", "route"]

CHECKPOINTS = frozenset(
    {Kind.CONV, Kind.FC, Kind.JOIN, Kind.FORK, Kind.CONCAT, Kind.SOFTMAX}
)
"""Layers whose outputs are never dropped; recomputation starts from them."""

_READS_X = frozenset({Kind.CONV, Kind.FC, Kind.BN, Kind.POOL, Kind.ACT, Kind.LRN})
_READS_Y = frozenset({Kind.POOL, Kind.ACT, Kind.LRN})
_IN_PLACE = frozenset({Kind.ACT, Kind.LRN})


@dataclass(frozen=True, slots=True)
class Step:
    """One layer, one way.

    Attributes:
        layer: The layer.
        backward: Whether it is the gradient's turn.
        reads: Forward tensors needed, without the batch, which the papers leave out.
        others: What else it touches: its own outputs, or gradients.
        twice: Gradients that the cost-aware bound counts once as dy and once as dx.
    """

    layer: Layer
    backward: bool
    reads: tuple[str, ...]
    others: tuple[str, ...]
    twice: tuple[str, ...] = ()


@dataclass(frozen=True)
class Route:
    """One training step.

    Attributes:
        network: Whose.
        steps: Forward, then backward.
        sizes: Tensor -> bytes of one image; the batch itself is not among them.
    """

    network: Network
    steps: tuple[Step, ...]
    sizes: dict[str, int]

    @cached_property
    def recomputable(self) -> frozenset[str]:
        """Outputs of all layers that are no checkpoints."""
        layers = self.network.layers
        return frozenset(
            layer.outputs[0] for layer in layers if layer.kind not in CHECKPOINTS
        )

    @property
    def largest_layer(self) -> int:
        """Most bytes that one layer's backward pass needs: the cost-aware bound."""
        return max(
            sum(self.sizes[t] for t in (*step.reads, *step.others, *step.twice))
            for step in self.steps
            if step.backward
        )


def route(network: Network) -> Route:
    """A network's training step."""
    sizes: dict[str, int] = {}
    made: list[Step] = []
    for layer in _forward(network):
        sizes.update(dict.fromkeys(layer.outputs, FLOAT * layer.numel))
        reads = tuple(t for t in layer.inputs if t in network.producer)
        made.append(Step(layer, False, reads, layer.outputs))
    gradients: dict[str, str] = {}
    for layer in _backward(network):
        made.append(_backward_step(network, layer, gradients, sizes))
    return Route(network, tuple(made), sizes)


def _backward_step(
    network: Network, layer: Layer, gradients: dict[str, str], sizes: dict[str, int]
) -> Step:
    """The step, after entering its inputs' gradients and their sizes."""
    reads: list[str] = []
    if layer.kind in _READS_X and layer.inputs[0] in network.producer:
        reads.append(layer.inputs[0])
    if layer.kind in _READS_Y:
        reads.append(layer.outputs[0])
    if layer.kind is Kind.SOFTMAX:  # its gradient overwrites its output
        gradients[layer.inputs[0]] = layer.outputs[0]
        return Step(layer, True, (*layer.inputs, *layer.outputs), ())
    arriving = [gradients[t] for t in layer.outputs]
    in_place = layer.kind in _IN_PLACE | {Kind.FORK, Kind.JOIN}
    leaving = []
    for i, t in enumerate(layer.inputs):
        if in_place and i == 0:
            gradients[t] = arriving[0]
            continue
        gradients[t] = f"d {t}"
        sizes[gradients[t]] = FLOAT * network.numel(t)
        leaving.append(gradients[t])
    twice = arriving if layer.kind is Kind.LRN else []
    return Step(layer, True, tuple(reads), (*arriving, *leaving), tuple(twice))


def _forward(network: Network) -> list[Layer]:
    def following(layer: Layer) -> list[Layer]:
        return [network.consumer[t] for t in layer.outputs if t in network.consumer]

    return _walk(network.layers[0], following, lambda layer: len(layer.inputs))


def _backward(network: Network) -> list[Layer]:
    def preceding(layer: Layer) -> list[Layer]:
        return [network.producer[t] for t in layer.inputs if t in network.producer]

    return _walk(network.layers[-1], preceding, lambda layer: len(layer.outputs))


def _walk(
    start: Layer,
    following: Callable[[Layer], Sequence[Layer]],
    arrivals: Callable[[Layer], int],
) -> list[Layer]:
    """Depth first from `start`; a layer is entered at its last arrival."""
    route: list[Layer] = []
    seen: dict[str, int] = {}
    waiting = [start]
    while waiting:
        layer = waiting.pop()
        seen[layer.name] = seen.get(layer.name, 0) + 1
        if seen[layer.name] < arrivals(layer):
            continue
        route.append(layer)
        after = following(layer)
        waiting += [*after[:1], *reversed(after[1:])]
    return route
