"""Profiles: cost of every node, link rates and memory tiers of one device."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class ChunkCosts:
    """Costs of mapping device memory in chunks under arbitrary addresses."""

    nbytes: int
    map_ms: float = 0.0
    unmap_ms: float = 0.0


class _Links:
    """Two links to what is offloaded, with their rates."""

    __slots__ = ()
    out_bytes_per_ms: float
    in_bytes_per_ms: float

    @property
    def round_trip_ms(self) -> float:
        """Time to offload and fetch one byte."""
        return 1 / self.out_bytes_per_ms + 1 / self.in_bytes_per_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(_Links):
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
        recompute_ms: Node -> time of the node that recomputes its first result, if that
            is not a plain copy; otherwise the node's own time applies.
        mapping_costs: Costs of mapping memory; None if the device cannot map memory.
        network_ms: Collective -> its time on the network, beside computation. Its first
            reader waits for it; `node_ms` has the time that computation takes for it.
    """

    node_ms: Mapping[str, float]
    workspaces: Mapping[str, int]
    fronts: Mapping[str, tuple[ConvPlan, ...]]
    out_bytes_per_ms: float
    in_bytes_per_ms: float
    copy_share: float = 0.0
    copy_overhead_ms: float = 0.0
    recompute_ms: Mapping[str, float] = field(default_factory=dict)
    mapping_costs: ChunkCosts | None = None
    network_ms: Mapping[str, float] = field(default_factory=dict)

    def recompute_ms_of(self, node: str) -> float:
        """Return the time to recompute a node's first result."""
        return self.recompute_ms.get(node, self.node_ms[node])

    def copy_slowdown_ms(self, copy_ms: float) -> float:
        """Return the slowdown of computation beside a copy of this duration."""
        return self.copy_overhead_ms + self.copy_share * copy_ms


# Memory tiers off the device, and the assignment of tensors to them.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTier(_Links):
    """An offload target with its own links.

    Attributes:
        name: Name given by the user, such as `disk:/scratch`.
        nbytes: Capacity; infinity without a limit.
        out_bytes_per_ms: Measured rate of copies to the tier.
        in_bytes_per_ms: Measured rate of copies from the tier.
        addressable: Whether the host can read it, as parameters and state require.
    """

    name: str
    nbytes: float = math.inf
    out_bytes_per_ms: float
    in_bytes_per_ms: float
    addressable: bool = True


@dataclass(frozen=True, slots=True)
class TierPlacement:
    """An assignment of offloaded storages to tiers, fastest first.

    `places` maps a storage to the number of its tier and its offset there.
    """

    tiers: tuple[MemoryTier, ...]
    places: Mapping[str, tuple[int, int]]
    used: tuple[int, ...]

    def names(self, number: int) -> tuple[str, ...]:
        """Return the storages assigned to a tier."""
        return tuple(name for name, (tier, _) in self.places.items() if tier == number)

    def to_json(self) -> list[dict[str, Any]]:
        """Return rates, use and tensors of each tier, fastest first."""
        return [
            {
                "name": tier.name,
                "used_bytes": self.used[i],
                "out_bytes_per_ms": tier.out_bytes_per_ms,
                "in_bytes_per_ms": tier.in_bytes_per_ms,
                "tensors": self.names(i),
            }
            for i, tier in enumerate(self.tiers)
        ]

    def __str__(self) -> str:
        """Return text such as `12 tensors to host (8 MiB), 3 to peer:1 (2 MiB)`."""
        counts = [
            f"{len(self.names(i))} to {tier.name} ({format_bytes(used)})"
            for i, (tier, used) in enumerate(zip(self.tiers, self.used, strict=True))
        ]
        return f"tensors: {', '.join(counts)}"
