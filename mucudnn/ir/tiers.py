"""Memory off the device, as a planner sees it: tiers, and what goes to which."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mucudnn.ir.sizes import format_bytes

__all__ = ["MemoryTier", "TierPlacement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTier:
    """Memory that tensors are swapped out to, over links of its own.

    Attributes:
        name: As a user gives it, such as `disk:/scratch`.
        nbytes: How much there is; infinity if that is no limit.
        out_bytes_per_ms: Measured rate of copies to it.
        in_bytes_per_ms: Measured rate of copies back.
        addressable: Whether the host can read it: parameters and state go nowhere else.
    """

    name: str
    nbytes: float = math.inf
    out_bytes_per_ms: float
    in_bytes_per_ms: float
    addressable: bool = True

    @property
    def round_trip_ms(self) -> float:
        """What one byte takes that leaves and comes back."""
        return 1 / self.out_bytes_per_ms + 1 / self.in_bytes_per_ms


@dataclass(frozen=True, slots=True)
class TierPlacement:
    """Which storage goes where while it is not on the device.

    Attributes:
        tiers: The fastest first.
        places: Storage -> number of its tier, and its offset there.
        used: Bytes of each tier.
    """

    tiers: tuple[MemoryTier, ...]
    places: Mapping[str, tuple[int, int]]
    used: tuple[int, ...]

    def number(self, storage: str) -> int:
        """Of the tier that a storage goes to."""
        return self.places[storage][0]

    def of(self, storage: str) -> MemoryTier:
        """The tier that a storage goes to."""
        return self.tiers[self.number(storage)]

    def names(self, number: int) -> tuple[str, ...]:
        """Storages that go to a tier."""
        return tuple(name for name, (tier, _) in self.places.items() if tier == number)

    def to_json(self) -> list[dict[str, Any]]:
        """What goes where, the fastest tier first."""
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
        """Such as `12 tensors to host (8 MiB), 3 to peer:1 (2 MiB)`."""
        counts = [
            f"{len(self.names(i))} to {tier.name} ({format_bytes(used)})"
            for i, (tier, used) in enumerate(zip(self.tiers, self.used, strict=True))
        ]
        return f"tensors: {', '.join(counts)}"
