"""What SuperNeurons drops in the forward pass and computes again in the backward pass.

A segment is a run of layers that are no checkpoints, behind a checkpoint. Forward, an
input is dropped once consumed, unless a checkpoint made it. Backward, a layer that
needs a dropped tensor has it computed again from the last valid one before it: keeping
everything on the way (speed), or nothing but what this layer needs (memory). The
cost-aware mode takes speed wherever a segment fits beneath the largest layer.
"""

import enum
from dataclasses import dataclass

from bench.papers.route import Route, Step

__all__ = ["Mode", "Moment", "moments"]


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
