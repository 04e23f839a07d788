"""SuperNeurons' techniques as arithmetic: which tensor is in memory at which moment.

A tensor is resident from one touch to the next, unless the next one writes it anew (it
was dropped) or the technique moves it out in between. Offloading moves the outputs of
convolutions, and of the layers that branch, once their consumers have run forward. They
come back when first needed, by a recomputation too (on demand), or as early as the last
convolution's backward step before that (prefetch). All is linear in the batch, so bytes
are those of one image; parameters, workspace and the batch itself are not counted.

The route is depth first with counters: a layer that joins branches waits for all of
them, and a branch is finished before the next one begins; branch 0 is walked last, both
ways. A step's tensors follow from its layer's kind; gradients are made in place where
the public release makes them so.

A segment is a run of layers that are no checkpoints, behind a checkpoint. Forward, an
input is dropped once consumed, unless a checkpoint made it. Backward, a layer that
needs a dropped tensor has it computed again from the last valid one before it: keeping
everything on the way (speed), or nothing but what this layer needs (memory). The
cost-aware mode takes speed wherever a segment fits beneath the largest layer.
"""

import enum
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from bench.papers.layers import FLOAT, Kind, Layer, Network

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


class Mode(enum.Enum):
    """What is computed again."""

    NONE = "none"
    SPEED = "speed"
    MEMORY = "memory"
    COST_AWARE = "cost_aware"


@dataclass(frozen=True, slots=True)
class Moment:
    """A layer's turn, or a layer computed again within another's turn.

    Attributes:
        step: Number, from 0, of the step in whose turn this is.
        reads: Tensors that must be there.
        writes: Tensors that are made here; what they held before is of no use.
    """

    step: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def moments(route: Route, mode: Mode) -> list[Moment]:
    """A training step with all that is computed again in it."""
    dropped = frozenset() if mode is Mode.NONE else route.recomputable
    thrifty = frozenset[str]()
    if mode is Mode.MEMORY:
        thrifty = dropped
    elif mode is Mode.COST_AWARE:
        thrifty = _large_segments(route)
    made: list[Moment] = []
    valid: set[str] = set()
    for number, step in enumerate(route.steps):
        if step.backward:
            made += _again(route, number, step, valid, thrifty)
            made.append(Moment(number, (*step.reads, *step.others), ()))
        else:
            made.append(Moment(number, step.reads, step.others))
            valid.update(step.others)
            valid -= dropped.intersection(step.reads)
    return made


def _again(
    route: Route, number: int, step: Step, valid: set[str], thrifty: frozenset[str]
) -> list[Moment]:
    """Layers computed again for a step; `valid` follows."""
    made = []
    for tensor in step.reads:
        chain = []
        while tensor in route.sizes and tensor not in valid:
            layer = route.network.producer[tensor]
            chain.append(layer)
            tensor = layer.inputs[0]
        for layer in reversed(chain):
            x, y = layer.inputs[0], layer.outputs[0]
            made.append(Moment(number, (x,) if x in route.sizes else (), (y,)))
            valid.add(y)
            if y in thrifty and x in route.recomputable and x not in step.reads:
                valid.remove(x)
    return made


def _large_segments(route: Route) -> frozenset[str]:
    """Outputs within segments whose inputs and outputs exceed the largest layer."""
    head: dict[str, str] = {}
    nbytes: dict[str, int] = {}
    for layer in route.network.layers:
        x, y = layer.inputs[0], layer.outputs[0]
        if y in route.recomputable:
            first = head[y] = head.get(x, x)
            both = route.sizes.get(x, 0) + route.sizes[y]
            nbytes[first] = nbytes.get(first, 0) + both
    limit = route.largest_layer
    return frozenset(t for t, first in head.items() if nbytes[first] > limit)


MIB = 1 << 20

OFFLOADED = frozenset({Kind.CONV, Kind.FORK, Kind.JOIN, Kind.CONCAT})
"""Whose outputs leave the GPU; in a linear network these are the convolutions."""


class Offload(enum.Enum):
    """When what left comes back; `NONE`: nothing leaves."""

    NONE = "none"
    PREFETCH = "prefetch"
    ON_DEMAND = "on_demand"


TECHNIQUES = {
    "liveness": (Mode.NONE, Offload.NONE),
    "offload_prefetch": (Mode.NONE, Offload.PREFETCH),
    "offload_on_demand": (Mode.NONE, Offload.ON_DEMAND),
    "speed": (Mode.SPEED, Offload.ON_DEMAND),
    "memory": (Mode.MEMORY, Offload.ON_DEMAND),
    "cost_aware": (Mode.COST_AWARE, Offload.ON_DEMAND),
    "cost_aware_prefetch": (Mode.COST_AWARE, Offload.PREFETCH),
}
"""Each stands on the ones before it; without any, all tensors are there at once."""


@dataclass(frozen=True)
class Curve:
    """Memory over a training step, for one image.

    Attributes:
        nbytes: The most bytes while each step runs.
        live: How many tensors that is.
        layers: The steps' layers, by name.
        extra: Layers computed again.
    """

    nbytes: tuple[int, ...]
    live: tuple[int, ...]
    layers: tuple[str, ...]
    extra: int

    @property
    def peak(self) -> int:
        """The most bytes of all."""
        return max(self.nbytes)

    @property
    def peak_step(self) -> int:
        """The number, from 0, of the first step that needs the most."""
        return self.nbytes.index(self.peak)


def curve(way: Route, mode: Mode, offload: Offload) -> Curve:
    """Memory over a training step under one technique."""
    turns = moments(way, mode)
    arrives, leaves = (
        defaultdict[int, list[str]](list),
        defaultdict[int, list[str]](list),
    )
    for tensor, first, last in _spans(way, turns, offload):
        arrives[first].append(tensor)
        leaves[last].append(tensor)
    nbytes, live = [0] * len(way.steps), [0] * len(way.steps)
    resident, count = 0, 0
    for i, turn in enumerate(turns):
        resident += sum(way.sizes[t] for t in arrives[i])
        count += len(arrives[i])
        if resident > nbytes[turn.step]:
            nbytes[turn.step], live[turn.step] = resident, count
        resident -= sum(way.sizes[t] for t in leaves[i])
        count -= len(leaves[i])
    names = tuple(step.layer.name for step in way.steps)
    return Curve(tuple(nbytes), tuple(live), names, len(turns) - len(way.steps))


def peaks(network: Network) -> dict[str, Curve]:
    """PolicyResult -> memory over a training step."""
    way = route(network)
    return {name: curve(way, *how) for name, how in TECHNIQUES.items()}


def row(network: Network, batch: int) -> dict[str, object]:
    """All techniques' peaks in MiB at a batch size. Ready for JSON."""
    way = route(network)
    curves = peaks(network)
    scale = batch / MIB
    mib = {name: one.peak * scale for name, one in curves.items()}
    recomputed = {
        name: {"peak_mib": mib[name], "extra": curves[name].extra}
        for name in ("speed", "memory", "cost_aware", "cost_aware_prefetch")
    }
    worst = curves["liveness"].peak_step
    return {
        "model": network.name,
        "batch": batch,
        "image": network.data[1],
        "layers": len(network.layers),
        "tensors": len(way.sizes),
        "baseline_mib": sum(way.sizes.values()) * scale,
        "liveness_mib": mib["liveness"],
        "liveness_live_tensors": curves["liveness"].live[worst],
        "offload_prefetch_mib": mib["offload_prefetch"],
        "offload_on_demand_mib": mib["offload_on_demand"],
        **recomputed,
        "conv_output_mib": scale
        * sum(
            way.sizes[layer.outputs[0]]
            for layer in network.layers
            if layer.kind is Kind.CONV
        ),
    }


def _spans(
    way: Route, turns: list[Moment], offload: Offload
) -> list[tuple[str, int, int]]:
    """Tensor, first and last moment of each stay in memory."""
    touches = defaultdict[str, list[tuple[int, bool]]](list)
    for i, turn in enumerate(turns):
        for tensor in turn.reads:
            touches[tensor].append((i, False))
        for tensor in turn.writes:
            touches[tensor].append((i, True))
    half = len(way.steps) // 2
    back = _prefetches(way, turns) if offload is Offload.PREFETCH else {}
    spans = []
    for tensor, (start, *later) in touches.items():
        first = last = start[0]
        moves = offload is not Offload.NONE and _moves(way, tensor)
        for i, written in later:
            step = turns[i].step
            returns = moves and turns[last].step < half <= step
            if written or returns:
                spans.append((tensor, first, last))
                first = back.get(step, i) if returns else i
            last = i
        spans.append((tensor, first, last))
    return spans


def _moves(way: Route, tensor: str) -> bool:
    layer = way.network.producer.get(tensor)
    return layer is not None and layer.kind in OFFLOADED


def _prefetches(way: Route, turns: list[Moment]) -> dict[int, int]:
    """Step -> the moment at which the convolution's backward step before it begins."""
    begins: dict[int, int] = {}
    for i, turn in enumerate(turns):
        begins.setdefault(turn.step, i)
    back: dict[int, int] = {}
    latest: int | None = None
    for number, step in enumerate(way.steps):
        if latest is not None:
            back[number] = begins[latest]
        if step.backward and step.layer.kind is Kind.CONV:
            latest = number
    return back
