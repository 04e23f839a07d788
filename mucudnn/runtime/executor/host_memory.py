"""Memory off the device: one pinned slab, and a file for what does not fit there.

All of it is reserved before the first step. A slab costs one allocation (pinning
tensor by tensor takes milliseconds each, and pools round to powers of two); a file has
its full size from the start, so that a full disk is an error then and not a crash of
whoever writes to the mapping later.
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
    """One slab of host memory, pinned where the device wants that.

    Raises:
        OutOfMemoryError: The host has no room.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self.name = "host memory"
        self.nbytes = nbytes
        self._slab: Buffer = device.host(nbytes)

    def view(self, offset: int, nbytes: int) -> Buffer:
        """A slice of the slab."""
        return self._slab[offset : offset + nbytes]

    def copier(self, device: Device) -> Copier:
        """The device's own."""
        return device.copier()

    def close(self) -> None:
        """Drop the slab."""
        self._slab = None


class DiskTier:
    """A memory-mapped file without a name: it goes when the mapping goes.

    Nothing is left behind even if the process is killed. A GPU's copies to such memory
    are staged by the driver, and the host waits for them.

    Args:
        nbytes: Size; reserved at once.
        folder: Of the file system to use; the system's for temporary files if None.

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
            raise ValueError(f"no file can be made in {where}: {e.strerror}") from e
        self._bytes: Any = np.frombuffer(mapping, np.uint8)

    def view(self, offset: int, nbytes: int) -> Buffer:
        """A slice of the mapping."""
        return self._bytes[offset : offset + nbytes]

    def copier(self, device: Device) -> Copier:
        """The device's own, as the file is mapped into host memory."""
        return device.copier()

    def close(self) -> None:
        """Drop the mapping."""
        self._bytes = None


@dataclass(frozen=True, slots=True)
class HostSlot:
    """Where a tensor is while it is not on the device.

    Attributes:
        tier: Number of the tier; negative for bytes that are a tensor's own.
        offset: First byte there.
        buffer: The bytes.
        link: Number of the tier whose links copies take.
    """

    tier: int
    offset: int
    buffer: Buffer
    link: int = 0

    def byte_range(self, storage: str, nbytes: int) -> ByteRange:
        """The bytes of a tensor here."""
        space = f"tier {self.tier}" if self.tier >= 0 else f"host bytes of {storage}"
        return ByteRange(space, self.offset, self.offset + nbytes, storage)


class Tiers:
    """Memories by preference; a tensor goes to the first that has room for it.

    Args:
        tiers: The memories.
        placement: Which storage goes where instead, if that is planned.
    """

    def __init__(
        self, tiers: Sequence[Tier], placement: TierPlacement | None = None
    ) -> None:
        self._tiers = tuple(tiers)
        self._planned = None if placement is None else placement.places

    @property
    def locked(self) -> bool:
        """Whether all of it is memory of the host that its system leaves in place."""
        return all(isinstance(tier, HostTier) for tier in self._tiers)

    def link(self, storage: str) -> int:
        """Number of the tier that a storage is planned for; else the first."""
        return 0 if self._planned is None else self._planned[storage][0]

    def view(self, storage: str, nbytes: int) -> Buffer:
        """The bytes that are planned for a storage.

        Raises:
            KeyError: None are.
        """
        tier, offset = (self._planned or {})[storage]
        return self._tiers[tier].view(offset, nbytes)

    def copiers(self, device: Device) -> list[Callable[[], Copier]]:
        """What opens the copier of each."""
        return [partial(tier.copier, device) for tier in self._tiers]

    def place(
        self, blocks: Sequence[Block], sizes: Mapping[str, int]
    ) -> dict[str, HostSlot]:
        """Slots for tensors that share the bytes with those at other times.

        Args:
            blocks: When they are there, and how many bytes to reserve.
            sizes: Tensor -> its bytes.

        Raises:
            OutOfMemoryError: All tiers together have no room.
        """
        if self._planned is not None:
            return {
                block.name: self._slot(
                    block.name, *self._planned[block.name], sizes[block.name]
                )
                for block in blocks
            }
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
        return {name: self._slot(name, *at, sizes[name]) for name, at in found.items()}

    def _slot(self, name: str, tier: int, offset: int, nbytes: int) -> HostSlot:
        return HostSlot(tier, offset, self._tiers[tier].view(offset, nbytes), tier)

    def close(self) -> None:
        """Close all of them."""
        for tier in self._tiers:
            tier.close()


def _reserve(file: int, nbytes: int, where: Path) -> None:
    """Give a file its full size.

    Where the system cannot reserve it, it gets a hole of that size.
    """
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
