"""SuperNeurons' techniques as arithmetic: which tensor is in memory at which moment.

A tensor is resident from one touch to the next, unless the next one writes it anew (it
was dropped) or the technique moves it out in between. Offloading moves the outputs of
convolutions, and of the layers that branch, once their consumers have run forward. They
come back when first needed, by a recomputation too (on demand), or as early as the last
convolution's backward step before that (prefetch). All is linear in the batch, so bytes
are those of one image; parameters, workspace and the batch itself are not counted.
"""

import enum
from collections import defaultdict
from dataclasses import dataclass

from bench.papers.layers import Kind, Network
from bench.papers.recompute import Mode, Moment, moments
from bench.papers.route import Route, route

__all__ = ["MIB", "TECHNIQUES", "Curve", "Offload", "curve", "peaks", "row"]

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
        "parameters": network.parameters,
        "baseline_mib": sum(way.sizes.values()) * scale,
        "liveness_mib": mib["liveness"],
        "liveness_step": worst + 1,
        "liveness_live_tensors": curves["liveness"].live[worst],
        "offload_mib": mib["offload_prefetch"],
        "offload_prefetch_mib": mib["offload_prefetch"],
        "offload_on_demand_mib": mib["offload_on_demand"],
        **recomputed,
        "largest_layer_mib": way.largest_layer * scale,
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
