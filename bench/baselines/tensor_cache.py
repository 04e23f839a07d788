"""Tensors under one name wherever their bytes are: the least recently used ones leave.

The tensor cache of SuperNeurons (Wang et al., PPoPP 2018): what is used is brought to
the device and pinned there; when the pool is short, the unpinned tensors that were not
used for longest are copied off the device, so that nothing moves while there is room.
A backward pass uses tensors in the reverse order, which is why the oldest go first.

A tensor that left has a home on a tier of the host from then on, unless the tiers are
full. While the copy there is as new as the one on the device, leaving again costs
nothing.

Copies follow one another and everything waits for them: this is paging on demand.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mucudnn.backends.device import Array, Buffer, Tier
from mucudnn.backends.virtual import VirtualDevice
from mucudnn.errors import OutOfMemoryError
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tensor import TensorSpec
from mucudnn.runtime.executor.arena import Pool
from mucudnn.runtime.executor.tasks import Copies

__all__ = ["CacheStatistics", "TensorCache"]

_COPY = 0
"""Number of every copy: one is waited for before the next is started."""


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What paging did.

    Attributes:
        hits: Uses of a tensor that was on the device.
        misses: Uses of one that had to be copied back.
        evictions: How often a tensor left the device.
        out_bytes: Copied to the host.
        in_bytes: Copied back.
        repacks: How often all unpinned tensors left because the holes between pinned
            ones were too small.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    repacks: int = 0


@dataclass(slots=True)
class _Tensor:
    """Where a tensor is, beside the pool.

    Attributes:
        spec: Shape and type.
        pins: How many users it has now.
        tier: Number of the tier of its home.
        home: Its bytes there; None if it never left.
        dirty: Whether the bytes on the device are newer than those at home.
    """

    spec: TensorSpec
    pins: int = 0
    tier: int = 0
    home: Buffer | None = None
    dirty: bool = False


class TensorCache:
    """Some tensors of which a pool holds those in use.

    A tensor has no contents until it is pinned for the first time; what it holds then
    is undefined.

    Args:
        pool: Holds what is on the device; others may use it, too.
        tiers: Where tensors go that leave, the preferred one first.
        copies: Carries them; whoever runs a step has them finished at its end.
    """

    def __init__(self, pool: Pool, tiers: Sequence[Tier], copies: Copies) -> None:
        self._pool = pool
        self._tiers = tuple(tiers)
        self._host_buffers = [
            Pool(VirtualDevice(), tier.nbytes, tier.name) for tier in tiers
        ]
        self._copies = copies
        self._tensors: dict[str, _Tensor] = {}
        self._resident: dict[str, None] = {}  # the least recently used first
        self._count: Counter[str] = Counter()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def resident(self) -> tuple[str, ...]:
        """What is on the device, the least recently used first."""
        return tuple(self._resident)

    @property
    def statistics(self) -> CacheStatistics:
        """What paging did so far."""
        return CacheStatistics(**self._count)

    def declare(self, spec: TensorSpec) -> None:
        """Make a tensor known; it takes no memory yet.

        Raises:
            ValueError: There is one of that name.
        """
        if spec.name in self._tensors:
            raise ValueError(f"{spec.name!r} is there already; release it first")
        self._tensors[spec.name] = _Tensor(spec)

    @contextmanager
    def pinned(
        self, names: Sequence[str], writes: Sequence[str] = ()
    ) -> Iterator[None]:
        """Have tensors on the device, all at once, until the end of a `with`.

        Where nothing else is in the pool or pinned, they fit whenever the sum of their
        sizes, each rounded up, is not more than the pool: holes that are too small are
        joined by sending everything away that is not pinned elsewhere.

        Args:
            names: What is used.
            writes: Those of them that are changed.

        Raises:
            OutOfMemoryError: The pool cannot hold them beside what is pinned, or the
                tiers cannot hold what would have to leave.
            ValueError: A tensor is not known.
        """
        wanted = {name: self._known(name) for name in names}
        for tensor in wanted.values():
            tensor.pins += 1
        try:
            self._gather(wanted)
            for name in writes:
                wanted[name].dirty = True
            yield
        finally:
            for tensor in wanted.values():
                tensor.pins -= 1

    def view(self, name: str, spec: TensorSpec | None = None) -> Array:
        """A pinned tensor's array, or its bytes as another.

        Raises:
            ValueError: It is not on the device.
        """
        return self._pool.view(name, spec or self._known(name).spec)

    def release(self, name: str) -> None:
        """Forget a tensor, wherever it is.

        Raises:
            ValueError: It is pinned, or not known.
        """
        tensor = self._known(name)
        if tensor.pins:
            raise ValueError(f"{name!r} is in use; release it afterwards")
        self._drop(name)
        if tensor.home is not None:
            self._host_buffers[tensor.tier].free(name)
        del self._tensors[name]

    def clear(self) -> None:
        """Forget all tensors, pinned ones included."""
        for name in self.resident:
            self._drop(name)
        for host_buffers in self._host_buffers:
            for name in [*host_buffers.blocks]:
                host_buffers.free(name)
        self._tensors.clear()

    def _known(self, name: str) -> _Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise ValueError(f"no tensor {name!r} is known; declare it first") from None

    def _gather(self, wanted: dict[str, _Tensor]) -> None:
        """Bring tensors that are pinned already, if need be into an empty pool."""
        self._count["hits"] += sum(name in self._resident for name in wanted)
        try:
            self._bring(wanted)
        except OutOfMemoryError:
            for name in self.resident:
                if self._tensors[name].pins == (name in wanted):
                    self._evict(name)
            self._count["repacks"] += 1
            self._bring(wanted)

    def _bring(self, wanted: dict[str, _Tensor]) -> None:
        """Have tensors on the device; where that fails, none is there half-way."""
        blank = []
        try:
            for name, tensor in wanted.items():
                if name in self._resident:
                    del self._resident[name]
                    self._resident[name] = None
                    continue
                self._place(name, tensor.spec.nbytes)
                blank.append(name)
                if tensor.home is not None:
                    self._copy_back(name, tensor.home)
                    blank.pop()
        except BaseException:
            for name in blank:
                self._drop(name)
            raise
        for name in blank:
            wanted[name].dirty = True

    def _place(self, name: str, nbytes: int) -> None:
        """Find room on the device, sending away what is unpinned and oldest."""
        while nbytes > self._pool.largest_hole:
            unpinned = (n for n in self._resident if not self._tensors[n].pins)
            oldest = next(unpinned, None)
            if oldest is None:
                break
            self._evict(oldest)
        self._pool.allocate(name, nbytes)
        self._resident[name] = None

    def _evict(self, name: str) -> None:
        tensor = self._tensors[name]
        if tensor.dirty:
            if tensor.home is None:
                tensor.tier, tensor.home = self._settled(name, tensor.spec.nbytes)
            self._copy_out(name, tensor.home)
            tensor.dirty = False
        self._drop(name)
        self._count["evictions"] += 1

    def _drop(self, name: str) -> None:
        if name in self._resident:
            del self._resident[name]
            self._pool.free(name)

    def _settled(self, name: str, nbytes: int) -> tuple[int, Buffer]:
        """A home on the first tier with room.

        Where there is none, tensors on the device give theirs up, the last used first:
        they are the last to need one again.
        """
        for other in (None, *reversed(self._resident)):
            if other is not None:
                self._give_up_home(other)
            for number, host_buffers in enumerate(self._host_buffers):
                if nbytes <= host_buffers.largest_hole:
                    offset = host_buffers.allocate(name, nbytes)
                    return number, self._tiers[number].view(offset, nbytes)
        if self._host_buffers:
            self._host_buffers[-1].allocate(name, nbytes)
        raise OutOfMemoryError(
            f"{name!r} of {format_bytes(nbytes)} has to leave the device and there is "
            "nowhere to go; give a tier of host memory or of a disk"
        )

    def _give_up_home(self, name: str) -> None:
        tensor = self._tensors[name]
        if tensor.home is not None:
            self._host_buffers[tensor.tier].free(name)
            tensor.home = None
            tensor.dirty = True

    def _copy_out(self, name: str, home: Buffer) -> None:
        source = self._pool.buffer(name)
        if source.nbytes:
            self._copies.start("out", _COPY, source, home)
            self._copies.wait(_COPY)
            self._count["out_bytes"] += source.nbytes

    def _copy_back(self, name: str, home: Buffer) -> None:
        target = self._pool.buffer(name)
        if target.nbytes:
            self._copies.start("back", _COPY, home, target)
            self._copies.wait(_COPY)
            self._count["in_bytes"] += target.nbytes
        self._count["misses"] += 1
