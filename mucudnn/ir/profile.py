"""Measured or estimated costs of a graph: the planners' only view of hardware."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mucudnn.ir.conv import ConvPlan

__all__ = ["ChunkCosts", "Profile"]


@dataclass(frozen=True, slots=True)
class ChunkCosts:
    """Costs of mapping device memory in chunks under arbitrary addresses."""

    nbytes: int
    map_ms: float = 0.0
    unmap_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Times and memory of every node, and rates of the host link.

    Attributes:
        node_ms: Node -> median time; for a convolution, without a workspace limit.
        workspaces: Node -> bytes of scratch memory; 0 for convolutions, whose plans
            have their own.
        fronts: Convolution node -> Pareto front of its plans in time and workspace,
            ascending in workspace.
        out_bytes_per_ms: Rate of copies to the host.
        in_bytes_per_ms: Rate of copies from the host.
        copy_share: Slowdown of concurrent computation as a share of the copy's time: 0
            with a dedicated copy engine, more if cores or memory are shared.
        copy_overhead_ms: Slowdown of computation by every copy, whatever its size: time
            to enqueue the copy and to wait for it.
        once_more_ms: Node -> time of the node that recomputes its first result, if that
            is not a plain copy; otherwise the node's own time applies.
        chunks: Mapping costs of its memory; None if the device cannot map memory.
    """

    node_ms: Mapping[str, float]
    workspaces: Mapping[str, int]
    fronts: Mapping[str, tuple[ConvPlan, ...]]
    out_bytes_per_ms: float
    in_bytes_per_ms: float
    copy_share: float = 0.0
    copy_overhead_ms: float = 0.0
    once_more_ms: Mapping[str, float] = field(default_factory=dict)
    chunks: ChunkCosts | None = None

    def again_ms(self, node: str) -> float:
        """Return the time to recompute a node's first result."""
        return self.once_more_ms.get(node, self.node_ms[node])

    def lost_ms(self, copy_ms: float) -> float:
        """Return the slowdown of computation beside a copy of this duration."""
        return self.copy_overhead_ms + self.copy_share * copy_ms
