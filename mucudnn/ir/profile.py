"""What a graph costs on one device: the planners' only view of hardware."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mucudnn.ir.conv import ConvPlan

__all__ = ["ChunkCosts", "Profile"]


@dataclass(frozen=True, slots=True)
class ChunkCosts:
    """Device memory that can be mapped under any address, and what that takes.

    Attributes:
        nbytes: Size of a chunk, the unit that is mapped.
        map_ms: To map one chunk.
        unmap_ms: To take one away from its address.
    """

    nbytes: int
    map_ms: float = 0.0
    unmap_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Times and memory of every node, and the links to the host.

    Attributes:
        node_ms: Node -> median time; of a convolution, without any limit.
        workspaces: Node -> bytes of scratch memory; 0 for convolutions, whose plans
            have their own.
        fronts: Convolution node -> its plans that no other beats in both time and
            workspace, ascending in workspace.
        out_bytes_per_ms: Rate of copies to the host.
        in_bytes_per_ms: Rate of copies from the host.
        copy_share: Of a copy's time, what the computation beside it takes longer: 0
            where an engine of its own copies; more where cores or memory are shared.
        copy_overhead_ms: What the computation takes longer for every copy, however few
            its bytes: it hands the copy over and waits for it.
        once_more_ms: Node -> time of what makes its first result again, of nodes of
            which that is something else than a copy; without it, the node's own.
        chunks: Of its memory, where the device can map it; None where it cannot.
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
        """How long what runs again for a node takes."""
        return self.once_more_ms.get(node, self.node_ms[node])

    def lost_ms(self, copy_ms: float) -> float:
        """How much longer the computation beside a copy takes, by the copy's time."""
        return self.copy_overhead_ms + self.copy_share * copy_ms
