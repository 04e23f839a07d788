"""Memory off the device as a user asks for it: `host`, `disk:FOLDER`, `peer:DEVICE`.

How much of it there is may follow, and then how many bytes a second its link carries:
`host=4GiB@12GiB`. Without a size it is all that is free, which is looked at for
planning, and only what a plan uses is taken. Without a rate the link is measured.
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
    """One tier that is asked for.

    Attributes:
        kind: `host`, `disk` or `peer`.
        argument: The folder, or the number of the device.
        nbytes: How much of it; infinity if that is not said.
        bytes_per_ms: Rate of its link, each way; None to measure it.
    """

    kind: Kind
    argument: str = ""
    nbytes: float = math.inf
    bytes_per_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> "TierChoice":
        """A choice as it is written.

        Raises:
            ValueError: It is none; says what would be.
        """
        text, rate = _ends_with(text, "@")
        text, size = _ends_with(text, "=")
        if rate == 0:
            raise ValueError(f"nothing goes to {text} at 0 bytes a second")
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
        """Without size and rate, such as `peer:1`."""
        return f"{self.kind}:{self.argument}" if self.argument else self.kind

    @property
    def addressable(self) -> bool:
        """Whether the host can read what is there, on every backend."""
        return self.kind != "peer"

    def room(self) -> float:
        """How much there is, as far as that is said or can be looked up."""
        if self.kind != "disk":
            return self.nbytes
        with suppress(OSError):  # opening it will say what is wrong
            free = shutil.disk_usage(self.argument).free
            return min(self.nbytes, free, file_size_limit())
        return self.nbytes

    def open(self, device: Device, nbytes: int) -> Tier:
        """So many bytes of it.

        Raises:
            ValueError: There is no such folder or device.
            OutOfMemoryError: There is no room.
            BackendUnavailableError: Such a tier cannot be had here.
        """
        if self.kind == "disk":
            return DiskTier(nbytes, Path(self.argument))
        if self.kind == "peer" and nbytes:
            return device.peer(int(self.argument), nbytes)
        return HostTier(device, nbytes)


def _ends_with(text: str, mark: str) -> tuple[str, int | None]:
    """What is before the last mark, and the size behind it; folders may have marks."""
    name, _, size = text.rpartition(mark)
    with suppress(ValueError):
        if name:
            return name, parse_bytes(size)
    return text, None


def parse_tiers(
    tiers: str | TierChoice | Sequence[str | TierChoice],
) -> tuple[TierChoice, ...]:
    """Tiers as a user gives them, each once.

    Raises:
        ValueError: One is none, or is there twice.
        TypeError: One is something else.
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
    """The tiers that some placed steps use in turn, with what they need of each.

    Args:
        device: From which tensors leave.
        choices: Where to.
        placed: The steps; the first tier is the fastest, whatever the choices' order.

    Raises:
        ValueError: There is no such folder or device.
        OutOfMemoryError: There is no room; what was opened is given back.
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
        """The places of one of the steps; None if none are planned."""
        placement = placed.plan.prediction.placement
        return None if placement is None else Tiers(self._tiers, placement)

    def close(self) -> None:
        """Close all of them; may be called again."""
        for tier in self._tiers:
            tier.close()

    def __repr__(self) -> str:
        there = (f"{format_bytes(tier.nbytes)} of {tier.name}" for tier in self._tiers)
        return f"OpenTiers({', '.join(there)})"
