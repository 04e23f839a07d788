"""Rooms in tiers: the bytes of each that what leaves in one run may have.

A room is held by every tensor that has bytes of it, and by the run itself: when the
last of these is gone, it is free for another run.
"""

import weakref
from collections.abc import Callable, Sequence

import torch

from mucudnn.backends.base import Copier, Device, Tier
from mucudnn.runtime.executor.tier_choice import TierChoice

__all__ = ["HeldRoom", "Room", "Rooms"]


class Room:
    """Bytes of some tiers, and what copies to them and back.

    Args:
        device: Where steps run.
        choices: The tiers.
        sizes: Bytes of each.

    Attributes:
        stale: Whether it is to be closed once nobody has it.

    Raises:
        OutOfMemoryError: There is no room.
    """

    def __init__(
        self, device: Device, choices: Sequence[TierChoice], sizes: Sequence[int]
    ) -> None:
        self.stale = False
        self._device = device
        self._copiers: dict[int, Copier] = {}
        self._tiers: list[Tier] = []
        try:
            for choice, nbytes in zip(choices, sizes, strict=True):
                self._tiers.append(choice.open(device, nbytes))
        except BaseException:
            self.close()
            raise

    def views(self) -> list[memoryview]:
        """All bytes of each tier."""
        return [memoryview(tier.view(0, tier.nbytes)) for tier in self._tiers]

    def has(self, address: int) -> bool:
        """Whether a byte is one of its own."""
        views = (tier.view(0, tier.nbytes) for tier in self._tiers)
        return any(0 <= address - v.ctypes.data < v.nbytes for v in views)

    def copier(self, link: int) -> Copier:
        """That of a tier, which is opened by its first copy."""
        if link not in self._copiers:
            self._copiers[link] = self._tiers[link].copier(self._device)
        return self._copiers[link]

    def stop(self) -> None:
        """Wait for the copies that run, and drop the rest."""
        copiers, self._copiers = self._copiers, {}
        for copier in copiers.values():
            copier.close()

    def close(self) -> None:
        """Give its bytes back as soon as no tensor has them."""
        self.stop()
        for tier in self._tiers:
            tier.close()


class HeldRoom:
    """A room that a run has.

    Args:
        room: The room.
        free: Called once neither the run nor any tensor has it any more.
    """

    def __init__(self, room: Room, free: Callable[[Room], None]) -> None:
        self.copier = room.copier
        self._views = room.views()
        held = {id(view) for view in self._views}

        def let_go(view: int) -> None:
            held.discard(view)
            if not held:
                free(room)

        for view in self._views:
            weakref.finalize(view, let_go, id(view)).atexit = False

    def bytes(self, link: int, offset: int, nbytes: int) -> torch.Tensor:
        """Some bytes of a tier, which hold on to the room."""
        view = self._views[link]
        return torch.frombuffer(view, dtype=torch.uint8, count=nbytes, offset=offset)


class Rooms:
    """Rooms of one size; it grows with what is asked for.

    Args:
        device: Where steps run.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._choices: tuple[TierChoice, ...] = ()
        self._sizes: dict[TierChoice, int] = {}
        self._free: list[Room] = []
        self._open: list[Room] = []

    def reserve(self, choices: Sequence[TierChoice], sizes: Sequence[int]) -> None:
        """Have a room with so many bytes of these tiers at least.

        Raises:
            OutOfMemoryError: There is none.
        """
        self._choices = tuple(choices)
        known = self._sizes
        wanted = dict(zip(choices, sizes, strict=True))
        self._sizes = {c: max(n, known.get(c, 0)) for c, n in wanted.items()}
        if self._sizes != known:
            self.give_up()
        try:
            if not self._free:
                self._free.append(self._made())
        except BaseException:
            self._sizes = known
            raise

    def take(self) -> HeldRoom:
        """A room that nobody has."""
        try:
            room = self._free.pop()
        except IndexError:
            room = self._made()
        return HeldRoom(room, self._back)

    def having(self, host: torch.Tensor) -> Room | None:
        """The room that some bytes are in."""
        return next((room for room in self._open if room.has(host.data_ptr())), None)

    def give_up(self) -> None:
        """Stop all copies, and use no room any more that there is."""
        free, self._free = self._free, []
        for room in tuple(self._open):
            room.stop()
            room.stale = True
        for room in free:
            self._closed(room)

    def _made(self) -> Room:
        sizes = [self._sizes[choice] for choice in self._choices]
        room = Room(self._device, self._choices, sizes)
        self._open.append(room)
        return room

    def _back(self, room: Room) -> None:
        if room.stale:
            self._closed(room)
        else:
            self._free.append(room)

    def _closed(self, room: Room) -> None:
        self._open.remove(room)
        room.close()
