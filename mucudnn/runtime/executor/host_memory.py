"""Offload targets on the host: a pinned slab of memory, and a file on disk.

Everything is reserved before the first step. The slab is one allocation, as pinning
each tensor takes milliseconds and pools round sizes up. The file has its full size from
the start, so that a full disk raises an error instead of crashing whoever writes to the
mapping later.
"""

import errno
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mucudnn.backends.base import Buffer, Copier, Device, Tier
from mucudnn.errors import OutOfMemoryError
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tiers import TierPlacement
from mucudnn.passes.placement.layout import in_tiers
from mucudnn.passes.placement.packing import Block, pack
from mucudnn.runtime.executor.tasks import ByteRange

__all__ = ["DiskTier", "HostSlot", "HostTier", "Tier", "Tiers"]


class HostTier:
    """One slab of host memory, pinned where the device requires it."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.name = "host memory"
        self.nbytes = nbytes
        self._slab: Buffer = device.host(nbytes)

    def view(self, offset: int, nbytes: int) -> Buffer:
        """Return a slice of the slab."""
        return self._slab[offset : offset + nbytes]

    def copier(self, device: Device) -> Copier:
        """Return the device's own copier."""
        return device.copier()

    def close(self) -> None:
        """Drop the slab."""
        self._slab = None


class DiskTier:
    """A memory-mapped anonymous file, which disappears with the mapping.

    No file remains even if the process is killed. The driver stages a GPU's copies to
    such memory, and the host waits for them.

    Args:
        nbytes: Size of the file, reserved at once.
        folder: Folder on the file system to use; the system's temporary folder if None.

    Raises:
        OutOfMemoryError: The disk has no room.
        ValueError: There can be no file in that folder.
    """

    def __init__(self, nbytes: int, folder: str | Path | None = None) -> None:
        where = Path(tempfile.gettempdir() if folder is None else folder)
        self.name = f"a file in {where}"
        self.nbytes = nbytes
        try:
            with tempfile.TemporaryFile(dir=where, prefix="mucudnn-") as file:
                _reserve(file.fileno(), max(1, nbytes), where)
                mapping = mmap.mmap(file.fileno(), max(1, nbytes))
        except OSError as e:
            raise ValueError(
                f"no file can be made in {where}: {e.strerror}; name a folder that can "
                "be written to"
            ) from e
        self._bytes: Any = np.frombuffer(mapping, np.uint8)

    def view(self, offset: int, nbytes: int) -> Buffer:
        """Return a slice of the mapping."""
        return self._bytes[offset : offset + nbytes]

    def copier(self, device: Device) -> Copier:
        """Return the device's own copier, as the file is mapped into memory."""
        return device.copier()

    def close(self) -> None:
        """Drop the mapping."""
        self._bytes = None


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
        """Whether all tiers are pinned host memory."""
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

        Raises:
            OutOfMemoryError: All tiers together have no room.
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
                f"{format_bytes(needed, short)} that leave the device; "
                f"there are {there or 'no tiers'}"
            )
        return {name: self._slot(*at, sizes[name]) for name, at in found.items()}

    def _slot(self, tier: int, offset: int, nbytes: int) -> HostSlot:
        return HostSlot(tier, offset, self._tiers[tier].view(offset, nbytes), tier)

    def close(self) -> None:
        """Close all tiers."""
        for tier in self._tiers:
            tier.close()


def _reserve(file: int, nbytes: int, where: Path) -> None:
    """Give a file its full size; a sparse file where space cannot be reserved."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, nbytes)
        else:
            os.ftruncate(file, nbytes)
    except (OSError, OverflowError) as e:
        full = isinstance(e, OverflowError) or e.errno in _FULL
        if not full:
            raise
        if nbytes > (most := file_size_limit()):
            raise OutOfMemoryError(
                f"no file in {where} may have {format_bytes(nbytes, int(most))}: the "
                f"limit of this process is {format_bytes(int(most), nbytes)} a file "
                "(`ulimit -f` in blocks); raise it, or give less of this tier"
            ) from e
        stat = os.statvfs(where)
        free = stat.f_bavail * stat.f_frsize
        raise OutOfMemoryError(
            f"no room for {format_bytes(nbytes, free)} on the disk of {where}; "
            f"{format_bytes(free, nbytes)} are free, perhaps less by a quota"
        ) from e


_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def file_size_limit() -> float:
    """Return how many bytes a file of this process may have; infinity for no limit."""
    try:
        import resource
    except ImportError:  # a system without such limits
        return math.inf
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return math.inf if most == resource.RLIM_INFINITY else most
