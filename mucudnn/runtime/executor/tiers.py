"""Memory off the device: a pinned slab, a file, a peer, and how users name them.

Everything is reserved before the first step. The slab is one allocation, as pinning
each tensor takes milliseconds and pools round sizes up.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from mucudnn.backends import Device
from mucudnn.backends.cpu.device import DiskTier, file_size_limit
from mucudnn.backends.device import Buffer, Copier, Slab, Tier
from mucudnn.errors import OutOfMemoryError
from mucudnn.ir.profile import TierPlacement
from mucudnn.ir.sizes import format_bytes, parse_bytes, parse_integer
from mucudnn.passes.placement.layout import PlacedStep, in_tiers
from mucudnn.passes.placement.packing import Block, pack
from mucudnn.runtime.executor.tasks import ByteRange


class HostTier(Slab):
    """One slab of host memory, pinned where the device requires it."""

    def __init__(self, device: Device, nbytes: int) -> None:
        super().__init__("host memory", device.host(nbytes), nbytes)


@dataclass(frozen=True, slots=True)
class HostSlot:
    """The bytes of an offloaded tensor.

    Attributes:
        tier: Index of the tier; negative for bytes that belong to one tensor alone.
        link: Index of the tier whose link the copies use.
    """

    tier: int
    offset: int
    buffer: Buffer
    link: int = 0

    def byte_range(self, storage: str, nbytes: int) -> ByteRange:
        """Return the byte range of a tensor in this slot."""
        space = f"tier {self.tier}" if self.tier >= 0 else f"host bytes of {storage}"
        return ByteRange(space, self.offset, self.offset + nbytes, storage)


class Tiers:
    """Offload targets in order of preference; a tensor takes the first with room.

    A `placement` determines tier and offset of each storage instead.
    """

    def __init__(
        self, tiers: Sequence[Tier], placement: TierPlacement | None = None
    ) -> None:
        self._tiers = tuple(tiers)
        self._planned = None if placement is None else placement.places

    @property
    def locked(self) -> bool:
        """True if all tiers are pinned host memory."""
        return all(isinstance(tier, HostTier) for tier in self._tiers)

    def link(self, storage: str) -> int:
        """Return the index of the tier planned for a storage; 0 without a plan."""
        return 0 if self._planned is None else self._planned[storage][0]

    def view(self, storage: str, nbytes: int) -> Buffer:
        """Return the bytes planned for a storage."""
        tier, offset = (self._planned or {})[storage]
        return self._tiers[tier].view(offset, nbytes)

    def copiers(self, device: Device) -> list[Callable[[], Copier]]:
        """Return the factory of each tier's copier."""
        return [partial(tier.copier, device) for tier in self._tiers]

    def place(
        self, blocks: Sequence[Block], sizes: Mapping[str, int]
    ) -> dict[str, HostSlot]:
        """Assign slots to offloaded tensors; disjoint live ranges share bytes.

        `blocks` are the live ranges with the bytes to reserve, `sizes` the tensors'
        bytes.
        """
        if self._planned is not None:
            planned = {block.name: self._planned[block.name] for block in blocks}
            return {n: self._slot(*at, sizes[n]) for n, at in planned.items()}
        found, left = in_tiers(blocks, [tier.nbytes for tier in self._tiers])
        if left:
            short, needed = pack(left).nbytes, pack(blocks).nbytes
            there = ", ".join(
                f"{format_bytes(tier.nbytes, short, needed)} of {tier.name}"
                for tier in self._tiers
            )
            raise OutOfMemoryError(
                f"no room for {format_bytes(short, needed)} of the "
                f"{format_bytes(needed, short)} that are offloaded; "
                f"{there or 'no tiers'} are available"
            )
        return {name: self._slot(*at, sizes[name]) for name, at in found.items()}

    def _slot(self, tier: int, offset: int, nbytes: int) -> HostSlot:
        return HostSlot(tier, offset, self._tiers[tier].view(offset, nbytes), tier)


# Parse and open offload targets: `host`, `disk:FOLDER`, `peer:DEVICE`.
#
# A size may follow, and then the rate of the link in bytes a second: `host=4GiB@12GiB`.
# Without a size, planning uses all free memory, and execution allocates only what the
# plan uses. Without a rate, the link is measured.


Kind = Literal["host", "disk", "peer"]

_FORMS = "host, disk:FOLDER or peer:DEVICE, optionally followed by =SIZE and @RATE"


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
        """Parse a target such as `host=4GiB` or `disk:/scratch`."""
        text, rate = _split_size(text, "@")
        text, size = _split_size(text, "=")
        if rate == 0:
            raise ValueError(f"the rate of {text} is 0 bytes per second; raise @RATE")
        how = math.inf if size is None else size, rate and rate / 1e3
        kind, _, argument = text.partition(":")
        match kind:
            case "host" if not argument:
                return cls("host", "", *how)
            case "disk" if argument:
                return cls("disk", argument, *how)
            case "peer" if argument:
                return cls("peer", str(parse_integer(argument)), *how)
        raise ValueError(f"unknown tier {text!r}; choose {_FORMS}")

    def __str__(self) -> str:
        """Return the target without size and rate, such as `peer:1`."""
        return f"{self.kind}:{self.argument}" if self.argument else self.kind

    @property
    def addressable(self) -> bool:
        """True if the host can address this memory on every backend."""
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
        """Allocate `nbytes` of this target."""
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
            return name, parse_bytes(int(size) if size.isdigit() else size)
    return text, None


def parse_tiers(
    tiers: str | TierChoice | Sequence[str | TierChoice],
) -> tuple[TierChoice, ...]:
    """Parse the offload targets that a user gives."""
    given: object = [tiers] if isinstance(tiers, str | TierChoice) else tiers
    if not isinstance(given, Sequence):
        raise TypeError(f"tiers must be strings such as 'host=4GiB', got {tiers!r}")
    found: dict[str, TierChoice] = {}
    for one in given:
        if not isinstance(one, str | TierChoice):
            raise TypeError(f"tiers must be strings such as 'host=4GiB', got {one!r}")
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
                # Steps run one after another, and share the largest step's room.
                nbytes = max(placement.used[i] for placement in placements)
                self._tiers.append(by_name[tier.name].open(device, nbytes))
        except BaseException:
            self.close()
            raise

    def of(self, placed: PlacedStep) -> Tiers | None:
        """Return the tiers of a step; None if it offloads nothing."""
        # A step without a placement keeps everything on the device or in plain host
        # memory.
        placement = placed.plan.prediction.placement
        return None if placement is None else Tiers(self._tiers, placement)

    def close(self) -> None:
        """Close all tiers; may be called again."""
        for tier in self._tiers:
            tier.close()

    def __repr__(self) -> str:
        there = (f"{format_bytes(tier.nbytes)} of {tier.name}" for tier in self._tiers)
        return f"OpenTiers({', '.join(there)})"
