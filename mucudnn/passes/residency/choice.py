"""Where a tensor is while nobody uses it.

A policy is a function of a training graph and its profile; it says for some tensors
that they are offloaded or computed again. What it does not name is kept. Whether that
fits a budget is the scheduler's business.

Activations are saved for the backward pass, and the gap before it is theirs. Parameters
and optimizer state outlive the step: their gaps are cyclic, from the last use in one
step to the first in the next.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mucudnn.ir.graph import Graph, Node, Phase, Role
from mucudnn.ir.profile import Profile

__all__ = [
    "EVERYTHING",
    "PERSISTENTS",
    "RECOMPUTED",
    "SMALL",
    "Residency",
    "ResidencyPolicy",
    "Saved",
    "Step",
    "saved_tensors",
]


class Residency(enum.Enum):
    """Where a tensor is between its uses."""

    KEEP = "keep"
    OFFLOAD = "offload"
    """On the host before its backward uses; parameters and state in their longest gap.
    """
    RECOMPUTE = "recompute"
    """Computed once more and kept until its last use (speed-centric)."""
    RECOMPUTE_EACH = "recompute_each"
    """Computed again for every use (memory-centric)."""
    PAGE = "page"
    """Away whenever the node that runs does not use it."""


RECOMPUTED = (Residency.RECOMPUTE, Residency.RECOMPUTE_EACH)
"""What has the producers of a tensor run again."""

EVERYTHING = "*"
"""Stands for every storage that a policy does not name and that a step makes."""

PERSISTENTS = "*persistent"
"""Stands for parameters and state that a policy does not name, but for those that are
`SMALL`. Their copies would be many, and what they free next to nothing."""

SMALL = 64 << 10
"""Bytes; in a small model, less than a 1/1024 of all parameters and state."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A forward result that the backward pass reads.

    Attributes:
        name: The tensor.
        nbytes: Its size.
        producer: What computes it.
        first: Position of its producer among the graph's nodes.
        last: Position of its last forward use.
        again: Position of its first backward use.
    """

    name: str
    nbytes: int
    producer: Node
    first: int
    last: int
    again: int


class Step(Protocol):
    """What a policy may look at: a `StepRequest`, or anything that has these."""

    @property
    def graph(self) -> Graph:
        """A training graph that nothing has made in-place yet."""
        ...

    @property
    def profile(self) -> Profile:
        """Its costs."""
        ...

    @property
    def budget(self) -> float:
        """Bytes for everything; infinity if there is no limit."""
        ...

    @property
    def hosted(self) -> frozenset[str] | None:
        """Parameters and state that are host-resident, if that is decided."""
        ...


class ResidencyPolicy(Protocol):
    """A way to choose residencies."""

    def __call__(self, step: Step) -> Mapping[str, Residency]:
        """Residencies of tensors; those left out are kept."""
        ...


def saved_tensors(graph: Graph) -> tuple[Saved, ...]:
    """Forward results that backward nodes read, in order of production.

    Views count for the tensor whose bytes they are. Inputs, parameters and state are
    not among them.
    """
    positions: dict[str, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        for name in dict.fromkeys(graph.storages[t] for t in node.inputs):
            positions.setdefault(name, []).append(i)
    found = []
    for i, node in enumerate(graph.nodes):
        if node.phase is not Phase.FORWARD:
            continue
        for name in node.outputs:
            spec = graph.tensors[name]
            if spec.alias is not None or spec.role is not Role.ACTIVATION:
                continue
            uses = positions.get(name, [])
            forward = [p for p in uses if graph.nodes[p].phase is Phase.FORWARD]
            backward = [p for p in uses if graph.nodes[p].phase is not Phase.FORWARD]
            if backward:
                last = forward[-1] if forward else i
                found.append(Saved(name, spec.nbytes, node, i, last, backward[0]))
    return tuple(found)
