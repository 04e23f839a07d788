"""Memory tiers off the device, and the assignment of tensors to them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mucudnn.ir.sizes import format_bytes

__all__ = ["MemoryTier", "TierPlacement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTier:
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

    @property
    def round_trip_ms(self) -> float:
        """Time to offload and fetch one byte."""
        return 1 / self.out_bytes_per_ms + 1 / self.in_bytes_per_ms


@dataclass(frozen=True, slots=True)
class TierPlacement:
    """An assignment of offloaded storages to tiers, fastest first.

    `places` maps a storage to the number of its tier and its offset there.
    """

    tiers: tuple[MemoryTier, ...]
    places: Mapping[str, tuple[int, int]]
    used: tuple[int, ...]

    def number(self, storage: str) -> int:
        """Return the number of the tier of a storage."""
        return self.places[storage][0]

    def of(self, storage: str) -> MemoryTier:
        """Return the tier of a storage."""
        return self.tiers[self.number(storage)]

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
