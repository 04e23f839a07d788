"""Offload targets of a PyTorch step: host, files, other processes.

The memories and the copies are those of our own executor: a tier has bytes and two
queues. What leaves in one run has a room, which is the bytes of each tier that a plan
uses; it is free for the next run once no tensor has any of them. So a step that runs
again and again has one room, and several forward passes under way one each.

After a failure nothing is copied any more, and the next run begins in a new room: what
another process lost was only ever of one run. Parameters and state go only where they
can be read between two steps, and have memory of their own there.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mucudnn.backends import Device, get_backend
from mucudnn.backends.device import Copier, Tier
from mucudnn.errors import UnsupportedError
from mucudnn.ir.profile import MemoryTier, TierPlacement
from mucudnn.passes.liveness import rounded
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.executor.tiers import TierChoice
from mucudnn.runtime.profiling.links import LINK_BYTES, measured_tiers
from mucudnn.torch.execution.copies import bytes_of


class StepTiers:
    """The tiers that steps on the CPU leave to.

    Args:
        choices: Which; several are filled the fastest first.
        shared: Whether steps run one at a time, and may have the same room.
    """

    def __init__(self, choices: Sequence[TierChoice], *, shared: bool) -> None:
        self._choices = {str(choice): choice for choice in choices}
        self._device = get_backend("cpu").device
        self._rates: tuple[MemoryTier, ...] | None = None
        self._rooms = Rooms(self._device) if shared else None

    def measured(self, device: torch.device) -> tuple[MemoryTier, ...]:
        """The tiers as planners see them; their links are measured once.

        Raises:
            UnsupportedError: Steps do not run on the CPU.
            ValueError: There is no such folder or device.
            OutOfMemoryError: There is no room to measure in.
        """
        if device.type != "cpu":
            raise UnsupportedError(
                f"a step on {device} leaves to the memory of its host so far; tiers "
                "are for steps on the CPU"
            )
        if self._rates is None:
            choices = tuple(self._choices.values())
            self._rates = measured_tiers(self._device, choices, LINK_BYTES)
        return self._rates

    def copies(self, plan: StepPlan) -> "TierCopies | None":
        """What runs the copies of a plan; None if it is for no tiers.

        Raises:
            OutOfMemoryError: What the plan uses is not there any more.
        """
        placement = plan.prediction.placement
        if placement is None:
            return None
        choices = [self._choices[tier.name] for tier in placement.tiers]
        rooms = self._rooms or Rooms(self._device)
        base = _state_ends(plan, placement)
        sizes = [n - first for n, first in zip(placement.used, base, strict=True)]
        rooms.reserve(choices, sizes)
        return TierCopies(rooms, choices, placement, base, self._device)


def _state_ends(plan: StepPlan, placement: TierPlacement) -> list[int]:
    """Where in each tier the bytes end that parameters and state have to themselves."""
    ends = [0] * len(placement.tiers)
    tensors = plan.schedule.graph.tensors
    for name in plan.schedule.hosted:
        tier, offset = placement.places[name]
        ends[tier] = max(ends[tier], offset + rounded(tensors[name].nbytes))
    return ends


class TierLeaving:
    """A storage that has left or is on its way.

    Args:
        host: Its bytes in a tier.
        copier: Of that tier.
        ticket: Of its last copy; None if none is under way.
    """

    __slots__ = ("copier", "host", "ticket")

    def __init__(self, host: torch.Tensor, copier: Copier, ticket: Any = None) -> None:
        self.host = host
        self.copier = copier
        self.ticket = ticket

    def wait(self) -> None:
        """Wait for the last copy that was begun.

        Raises:
            BackendError: It failed, as one to a process that has ended.
        """
        if self.ticket is not None:
            self.copier.wait(self.ticket)


class TierCopies:
    """The copies of one plan.

    Args:
        rooms: What leaves in a run goes there.
        choices: The tiers, in the order of the plan.
        placement: Which storage goes where.
        base: Where a room begins in each tier.
        device: Where the step runs.
    """

    def __init__(
        self,
        rooms: "Rooms",
        choices: Sequence[TierChoice],
        placement: TierPlacement,
        base: Sequence[int],
        device: Device,
    ) -> None:
        self._rooms = rooms
        self._choices = choices
        self._places = placement.places
        self._base = base
        self._device = device
        self._state: dict[int, Copier] = {}

    def begin(self) -> Callable[[torch.Tensor, str], TierLeaving]:
        """What begins copies out in one run, which has a room of its own."""
        return partial(self._out, self._rooms.take())

    def _out(self, room: "HeldRoom", tensor: torch.Tensor, storage: str) -> TierLeaving:
        whole = bytes_of(tensor)
        link, offset = self._places[storage]
        host = room.bytes(link, offset - self._base[link], whole.numel())
        copier = room.copier(link)
        return TierLeaving(host, copier, copier.out(whole.numpy(), host.numpy()))

    def back(self, leaving: TierLeaving) -> torch.Tensor:
        """Begin to copy it back; the bytes that it will have."""
        found = torch.empty(leaving.host.numel(), dtype=torch.uint8)
        leaving.ticket = leaving.copier.back(
            leaving.host.numpy(), found.numpy(), _after(leaving)
        )
        return found

    def home(self, tensor: torch.Tensor, leaving: TierLeaving) -> None:
        """Begin to copy the storage of a tensor to where it came from."""
        whole = bytes_of(tensor).numpy()
        leaving.ticket = leaving.copier.out(
            whole, leaving.host.numpy(), _after(leaving)
        )

    def left(self, host: torch.Tensor, storage: str) -> TierLeaving:
        """What is in a tier, and has no copy under way."""
        link = self._places[storage][0]
        room = self._rooms.having(host)
        copier = self._copier(link) if room is None else room.copier(link)
        return TierLeaving(host, copier)

    def settle(self) -> None:
        """Stop all copies that are under way; the next run has a new room."""
        self._rooms.give_up()
        for copier in self._state.values():
            copier.close()
        self._state.clear()

    def memory(self, storage: str, nbytes: int) -> torch.Tensor:
        """Memory for a parameter, or for state, that is to live where it is planned.

        Raises:
            OutOfMemoryError: There is no room.
        """
        link = self._places[storage][0]
        tier = self._choices[link].open(self._device, max(1, nbytes))
        held = memoryview(tier.view(0, max(1, nbytes)))
        return torch.frombuffer(held, dtype=torch.uint8)[:nbytes]

    def _copier(self, link: int) -> Copier:
        """Of parameters and state: the device's own, as the host can read these."""
        if link not in self._state:
            self._state[link] = self._device.copier()
        return self._state[link]


def _after(leaving: TierLeaving) -> tuple[Any, ...]:
    return () if leaving.ticket is None else (leaving.ticket,)


# Rooms in tiers: the bytes of each that what leaves in one run may have.
#
# A room is held by every tensor that has bytes of it, and by the run itself: when the
# last of these is gone, it is free for another run.


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
