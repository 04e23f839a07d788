"""Parse and open offload targets: `host`, `disk:FOLDER`, `peer:DEVICE`.

A size may follow, and then the rate of the link in bytes a second: `host=4GiB@12GiB`.
Without a size, planning uses all free memory, and execution allocates only what the
plan uses. Without a rate, the link is measured.
"""

import math
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mucudnn.backends.base import Device, Tier
from mucudnn.ir.sizes import format_bytes, parse_bytes, parse_integer
from mucudnn.passes.placement.layout import PlacedStep
from mucudnn.runtime.executor.host_memory import (
    DiskTier,
    HostTier,
    Tiers,
    file_size_limit,
)

__all__ = ["OpenTiers", "TierChoice", "parse_tiers"]

Kind = Literal["host", "disk", "peer"]

_FORMS = "host, disk:FOLDER or peer:DEVICE, each perhaps with =SIZE and @RATE behind it"


@dataclass(frozen=True, slots=True)
class TierChoice:
    """An offload target as configured by the user.

    Attributes:
        kind: `host`, `disk` or `peer`.
        argument: Folder or device number.
        nbytes: Capacity in bytes; infinity if not given.
        bytes_per_ms: Rate of the link in each direction; None to measure it.
    """

    kind: Kind
    argument: str = ""
    nbytes: float = math.inf
    bytes_per_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> "TierChoice":
        """Parse a target such as `host=4GiB` or `disk:/scratch`.

        Raises:
            ValueError: The text is no target; lists the valid forms.
        """
        text, rate = _split_size(text, "@")
        text, size = _split_size(text, "=")
        if rate == 0:
            raise ValueError(f"nothing goes to {text} at 0 bytes a second; raise @RATE")
        how = math.inf if size is None else size, rate and rate / 1e3
        kind, _, argument = text.partition(":")
        match kind:
            case "host" if not argument:
                return cls("host", "", *how)
            case "disk" if argument:
                return cls("disk", argument, *how)
            case "peer" if argument:
                return cls("peer", str(parse_integer(argument)), *how)
        raise ValueError(f"{text!r} is no tier; choose {_FORMS}")

    def __str__(self) -> str:
        """Return the target without size and rate, such as `peer:1`."""
        return f"{self.kind}:{self.argument}" if self.argument else self.kind

    @property
    def addressable(self) -> bool:
        """Whether the host can read this memory, on every backend."""
        return self.kind != "peer"

    def room(self) -> float:
        """Return the capacity in bytes; of a folder, at most its free space."""
        if self.kind != "disk":
            return self.nbytes
        with suppress(OSError):  # `open` reports the error
            free = shutil.disk_usage(self.argument).free
            return min(self.nbytes, free, file_size_limit())
        return self.nbytes

    def open(self, device: Device, nbytes: int) -> Tier:
        """Allocate `nbytes` of this target.

        Raises:
            ValueError: There is no such folder or device.
            OutOfMemoryError: There is no room.
            BackendUnavailableError: This machine has no such tier.
        """
        if self.kind == "disk":
            return DiskTier(nbytes, Path(self.argument))
        if self.kind == "peer" and nbytes:
            return device.peer(int(self.argument), nbytes)
        return HostTier(device, nbytes)


def _split_size(text: str, mark: str) -> tuple[str, int | None]:
    """Split a size off behind the last mark; folder names may contain marks."""
    name, _, size = text.rpartition(mark)
    with suppress(ValueError):
        if name:
            return name, parse_bytes(size)
    return text, None


def parse_tiers(
    tiers: str | TierChoice | Sequence[str | TierChoice],
) -> tuple[TierChoice, ...]:
    """Parse the offload targets that a user gives.

    Raises:
        ValueError: A text is no target, or a target is given twice.
        TypeError: An element is neither a text nor a `TierChoice`.
    """
    given: object = [tiers] if isinstance(tiers, str | TierChoice) else tiers
    if not isinstance(given, Sequence):
        raise TypeError(f"tiers must be texts such as 'host=4GiB', got {tiers!r}")
    found: dict[str, TierChoice] = {}
    for one in given:
        if not isinstance(one, str | TierChoice):
            raise TypeError(f"tiers must be texts such as 'host=4GiB', got {one!r}")
        choice = one if isinstance(one, TierChoice) else TierChoice.parse(one)
        if str(choice) in found:
            raise ValueError(f"tier {choice} is given twice")
        found[str(choice)] = choice
    return tuple(found.values())


class OpenTiers:
    """The open offload targets that placed steps use in turn.

    The first tier of a step is the fastest, whatever the order of `choices`. If one
    cannot be opened, those before it are closed.
    """

    def __init__(
        self,
        device: Device,
        choices: Sequence[TierChoice],
        placed: Sequence[PlacedStep],
    ) -> None:
        by_name = {str(choice): choice for choice in choices}
        found = [p.plan.prediction.placement for p in placed]
        placements = [placement for placement in found if placement is not None]
        self._tiers: list[Tier] = []
        try:
            for i, tier in enumerate(placements[0].tiers if placements else ()):
                nbytes = max(placement.used[i] for placement in placements)
                self._tiers.append(by_name[tier.name].open(device, nbytes))
        except BaseException:
            self.close()
            raise

    def of(self, placed: PlacedStep) -> Tiers | None:
        """Return the tiers of a step; None if it offloads nothing."""
        placement = placed.plan.prediction.placement
        return None if placement is None else Tiers(self._tiers, placement)

    def close(self) -> None:
        """Close all tiers; may be called again."""
        for tier in self._tiers:
            tier.close()

    def __repr__(self) -> str:
        there = (f"{format_bytes(tier.nbytes)} of {tier.name}" for tier in self._tiers)
        return f"OpenTiers({', '.join(there)})"
