"""Offload targets of a PyTorch step: host memory, files, other processes.

Memory and copies are those of the executor in `runtime`: a tier has bytes and two copy
queues. What one run offloads is kept in an arena, which is the bytes of each tier that
the plan uses. An arena is free for the next run once no tensor holds any of its bytes:
a step that runs again and again has one arena, and several forward passes in flight
have one each.

After a failure nothing is copied any more, and the next run begins in a new arena: what
another process lost belonged to one run only. Parameters and state are offloaded only
to tiers that can be read between two steps, and have memory of their own there.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mucudnn.backends import Device, get_backend
from mucudnn.backends.device import Copier, Tier
from mucudnn.errors import UnsupportedError
from mucudnn.ir.profile import MemoryTier
from mucudnn.passes.liveness import rounded
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.executor.tiers import TierChoice
from mucudnn.runtime.profiling.links import LINK_BYTES, measured_tiers
from mucudnn.torch.execution.copies import OffloadedStorage, bytes_of


class StepTiers:
    """The tiers that steps on the CPU offload to.

    Args:
        choices: The tiers; several are filled fastest first.
        shared: Whether steps run one at a time, so that plans may share arenas.
    """

    def __init__(self, choices: Sequence[TierChoice], *, shared: bool) -> None:
        self._choices = {str(choice): choice for choice in choices}
        self._device = get_backend("cpu").device
        self._tiers: tuple[MemoryTier, ...] | None = None
        self._arenas = ArenaPool(self._device) if shared else None

    def measured(self, device: torch.device) -> tuple[MemoryTier, ...]:
        """Return the tiers for planners; their links are measured once.

        Raises:
            UnsupportedError: Steps do not run on the CPU.
            ValueError: A folder or device does not exist.
            OutOfMemoryError: There is not enough memory to measure in.
        """
        if device.type != "cpu":
            raise UnsupportedError(
                f"a step on {device} offloads to host memory only; tiers are for steps "
                "on the CPU"
            )
        if self._tiers is None:
            choices = tuple(self._choices.values())
            self._tiers = measured_tiers(self._device, choices, LINK_BYTES)
        return self._tiers

    def copies(self, plan: StepPlan) -> "TierCopies | None":
        """Return the copies of a plan; None if it was made without tiers.

        Raises:
            OutOfMemoryError: A tier no longer has the bytes that the plan uses.
        """
        placement = plan.prediction.placement
        if placement is None:
            return None
        choices = [self._choices[tier.name] for tier in placement.tiers]
        arenas = self._arenas or ArenaPool(self._device)
        # Parameters and state come first in each tier and have memory of their own.
        base = [0] * len(placement.tiers)
        tensors = plan.schedule.graph.tensors
        for name in plan.schedule.hosted:
            tier, offset = placement.places[name]
            base[tier] = max(base[tier], offset + rounded(tensors[name].nbytes))
        sizes = [n - first for n, first in zip(placement.used, base, strict=True)]
        arenas.reserve(choices, sizes)
        return TierCopies(arenas, choices, placement.places, base, self._device)


@dataclass(eq=False)
class TierCopies:
    """The copies of one plan.

    Attributes:
        arenas: Memory for what a run offloads.
        choices: The tiers, in the order of the plan.
        places: The tier and offset of each storage.
        base: Offset in each tier at which an arena begins.
    """

    arenas: "ArenaPool"
    choices: Sequence[TierChoice]
    places: Mapping[str, tuple[int, int]]
    base: Sequence[int]
    device: Device
    _state: dict[int, Copier] = field(default_factory=dict, init=False)

    def start_run(self) -> Callable[[torch.Tensor, str], OffloadedStorage]:
        """Return the function that offloads tensors in one run, to its own arena."""
        return partial(self._offload, self.arenas.take())

    def _offload(
        self, arena: "HeldArena", tensor: torch.Tensor, storage: str
    ) -> OffloadedStorage:
        tier, offset = self.places[storage]
        nbytes = tensor.untyped_storage().nbytes()
        host = arena.bytes(tier, offset - self.base[tier], nbytes)
        offloaded = OffloadedStorage(host, arena.copier(tier))
        self.write_back(tensor, offloaded)
        return offloaded

    def prefetch(self, offloaded: OffloadedStorage) -> torch.Tensor:
        """Begin to copy an offloaded storage back; return its new bytes."""
        found = torch.empty(offloaded.host.numel(), dtype=torch.uint8, device="cpu")
        start = offloaded.copier.prebind("back", offloaded.host.numpy(), found.numpy())
        offloaded.done = start(_after(offloaded))
        return found

    def write_back(self, tensor: torch.Tensor, offloaded: OffloadedStorage) -> None:
        """Begin to copy the storage of a tensor to the bytes that it came from."""
        ends = bytes_of(tensor).numpy(), offloaded.host.numpy()
        offloaded.done = offloaded.copier.prebind("out", *ends)(_after(offloaded))

    def on_host(self, host: torch.Tensor, storage: str) -> OffloadedStorage:
        """Return a storage that is in a tier, with no copy in flight."""
        tier = self.places[storage][0]
        arena = self.arenas.containing(host)
        if arena is not None:
            return OffloadedStorage(host, arena.copier(tier))
        # Parameters and state: the host can read them, so the device's own copier does.
        if tier not in self._state:
            self._state[tier] = self.device.copier()
        return OffloadedStorage(host, self._state[tier])

    def synchronize(self) -> None:
        """Stop all copies in flight; the next run has a new arena."""
        self.arenas.discard()
        for copier in self._state.values():
            copier.close()
        self._state.clear()

    def memory(self, storage: str, nbytes: int) -> torch.Tensor:
        """Allocate memory for a parameter, or for state, in the tier of the plan.

        Raises:
            OutOfMemoryError: The tier has not enough memory.
        """
        tier = self.places[storage][0]
        memory = self.choices[tier].open(self.device, max(1, nbytes))
        held = memoryview(memory.view(0, max(1, nbytes)))
        return torch.frombuffer(held, dtype=torch.uint8)[:nbytes]


def _after(offloaded: OffloadedStorage) -> tuple[Any, ...]:
    """Return the tickets that the next copy has to wait for."""
    return () if offloaded.done is None else (offloaded.done,)


class TierArena:
    """Bytes of some tiers, and the copiers to them and back.

    Attributes:
        stale: Whether to close it as soon as nobody holds it.

    Raises:
        OutOfMemoryError: A tier has not enough memory.
    """

    def __init__(self, device: Device, sizes: Mapping[TierChoice, int]) -> None:
        self.stale = False
        self._device = device
        self._copiers: dict[int, Copier] = {}
        self._tiers: list[Tier] = []
        try:
            for choice, nbytes in sizes.items():
                self._tiers.append(choice.open(device, nbytes))
        except BaseException:
            self.close()
            raise

    def views(self) -> list[memoryview]:
        """Return all bytes of each tier."""
        return [memoryview(tier.view(0, tier.nbytes)) for tier in self._tiers]

    def contains(self, address: int) -> bool:
        """Return whether a byte is in this arena."""
        views = (tier.view(0, tier.nbytes) for tier in self._tiers)
        return any(0 <= address - v.ctypes.data < v.nbytes for v in views)

    def copier(self, tier: int) -> Copier:
        """Return the copier of a tier, which its first copy opens."""
        if tier not in self._copiers:
            self._copiers[tier] = self._tiers[tier].copier(self._device)
        return self._copiers[tier]

    def stop(self) -> None:
        """Wait for the copies that run, and drop the queued ones."""
        copiers, self._copiers = self._copiers, {}
        for copier in copiers.values():
            copier.close()

    def close(self) -> None:
        """Release its bytes as soon as no tensor holds them."""
        self.stop()
        for tier in self._tiers:
            tier.close()


class HeldArena:
    """An arena in use by a run, and by every tensor that holds bytes of it.

    Args:
        arena: The arena.
        release: Called once neither the run nor any tensor holds it any more.
    """

    def __init__(self, arena: TierArena, release: Callable[[TierArena], None]) -> None:
        self.copier = arena.copier
        self._views = arena.views()
        held = {id(view) for view in self._views}

        def drop(view: int) -> None:
            held.discard(view)
            if not held:
                release(arena)

        for view in self._views:
            weakref.finalize(view, drop, id(view)).atexit = False

    def bytes(self, tier: int, offset: int, nbytes: int) -> torch.Tensor:
        """Return some bytes of a tier, which keep the arena in use."""
        view = self._views[tier]
        return torch.frombuffer(view, dtype=torch.uint8, count=nbytes, offset=offset)


class ArenaPool:
    """Arenas of one size, which is the largest that was requested of each tier."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sizes: dict[TierChoice, int] = {}
        self._free: list[TierArena] = []
        self._open: list[TierArena] = []

    def reserve(self, choices: Sequence[TierChoice], sizes: Sequence[int]) -> None:
        """Have an arena with at least this many bytes of these tiers.

        Raises:
            OutOfMemoryError: A tier has not enough memory.
        """
        known = self._sizes
        wanted = dict(zip(choices, sizes, strict=True))
        self._sizes = {c: max(n, known.get(c, 0)) for c, n in wanted.items()}
        if self._sizes != known:
            self.discard()
        try:
            if not self._free:
                self._free.append(self._opened())
        except BaseException:
            self._sizes = known
            raise

    def take(self) -> HeldArena:
        """Return an arena that nobody holds."""
        try:
            arena = self._free.pop()
        except IndexError:
            arena = self._opened()
        return HeldArena(arena, self._take_back)

    def containing(self, host: torch.Tensor) -> TierArena | None:
        """Return the arena that contains some bytes; None if none does."""
        address = host.data_ptr()
        return next((arena for arena in self._open if arena.contains(address)), None)

    def discard(self) -> None:
        """Stop all copies, and do not reuse any arena that is open now."""
        free, self._free = self._free, []
        for arena in tuple(self._open):
            arena.stop()
            arena.stale = True
        for arena in free:
            self._take_back(arena)

    def _opened(self) -> TierArena:
        arena = TierArena(self._device, self._sizes)
        self._open.append(arena)
        return arena

    def _take_back(self, arena: TierArena) -> None:
        if arena.stale:
            self._open.remove(arena)
            arena.close()
        else:
            self._free.append(arena)
