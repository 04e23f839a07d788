"""Static placement: every storage and workspace of a graph at a fixed offset.

Persistent tensors lie at the bottom of the arena in the order of their declaration, so
that all graphs that declare the same ones find them at the same place. Above them,
storages whose lives do not overlap share memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.passes.fitting import Block
from mucudnn.passes.liveness import live_ranges, rounded
from mucudnn.passes.packing import live_peak, pack

__all__ = ["ALIGNMENT", "Placement", "place"]

ALIGNMENT = 512
"""Bytes that every offset is a multiple of, as CUDA's own allocator guarantees."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything lies in one arena.

    Attributes:
        offsets: Storage -> offset in bytes.
        workspace_offsets: Node with a workspace -> offset of it.
        nbytes: Size of the arena.
        live_peak: The most bytes in use at once, each size rounded up to the
            alignment: a bound below `nbytes`.
    """

    offsets: Mapping[str, int]
    workspace_offsets: Mapping[str, int]
    nbytes: int
    live_peak: int

    @property
    def fragmentation(self) -> float:
        """Share of `live_peak` that the arena is larger than it."""
        return self.nbytes / self.live_peak - 1 if self.live_peak else 0.0


def place(
    graph: Graph,
    workspaces: Mapping[str, int] | None = None,
    *,
    alignment: int = ALIGNMENT,
) -> Placement:
    """Offsets such that what is needed at the same time does not overlap.

    Args:
        graph: What is run.
        workspaces: Node -> bytes of scratch memory while it runs.
        alignment: Of every offset, in bytes.
    """
    ranges = live_ranges(graph)
    fixed: dict[str, int] = {}
    bottom = 0
    for spec in graph.with_role(*PERSISTENT):
        if spec.name in ranges:
            fixed[spec.name] = bottom
            bottom += rounded(spec.nbytes, alignment)
    storages = [
        Block(name, rounded(graph.tensors[name].nbytes, alignment), r.first, r.last)
        for name, r in ranges.items()
        if name not in fixed
    ]
    scratch = [
        Block(_scratch(node.name), rounded(nbytes, alignment), position, position)
        for position, node in enumerate(graph.nodes)
        if (nbytes := (workspaces or {}).get(node.name, 0))
    ]
    names = {_scratch(node.name): node.name for node in graph.nodes}
    packing = pack([*storages, *scratch])
    moved = {name: bottom + offset for name, offset in packing.offsets.items()}
    return Placement(
        MappingProxyType(fixed | {b.name: moved[b.name] for b in storages}),
        MappingProxyType({names[b.name]: moved[b.name] for b in scratch}),
        bottom + packing.nbytes,
        bottom + live_peak([*storages, *scratch]),
    )


def _scratch(node: str) -> str:
    """The name of a node's workspace beside storages, which are named like nodes."""
    return f"\0{node}"
