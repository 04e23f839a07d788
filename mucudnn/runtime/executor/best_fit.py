"""Offsets for what comes and goes unforeseen: best fit with coalescing.

A block takes the smallest hole that holds it, in units of 512 bytes, and merges with
the holes on both sides when it is freed, so that what is empty is one hole again. A
request that finds no room is answered with the names of what is alive.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from mucudnn.errors import OutOfMemoryError
from mucudnn.ir.sizes import format_bytes
from mucudnn.passes.liveness import ALIGNMENT, rounded
from mucudnn.runtime.training.working_set import largest_first

__all__ = ["BestFit", "PoolStatistics"]


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """How full a pool is, and was.

    Attributes:
        nbytes: Of the whole arena.
        reserved_bytes: In blocks, each rounded up to the granularity.
        used_bytes: Of these, what was asked for.
        peak_bytes: The most that were ever reserved at once.
        largest_hole: The largest block that it could give now, in bytes.
        holes: How many pieces the free bytes are in.
        blocks: How many are alive.
        allocations: How many were ever given.
        failures: How many requests were refused.
    """

    nbytes: int
    reserved_bytes: int
    used_bytes: int
    peak_bytes: int
    largest_hole: int
    holes: int
    blocks: int
    allocations: int
    failures: int

    @property
    def free_bytes(self) -> int:
        """Bytes in no block."""
        return self.nbytes - self.reserved_bytes

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes that the largest hole does not have."""
        return 1 - self.largest_hole / self.free_bytes if self.free_bytes else 0.0


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes of a name: where, how many were asked for, and how many it occupies."""

    offset: int
    nbytes: int
    reserved: int

    @property
    def end(self) -> int:
        return self.offset + self.reserved


class BestFit:
    """Offsets for named blocks in a range of bytes; it has no memory itself.

    Where the range is no multiple of the granularity, the block at its end may be.

    Args:
        nbytes: Length of the range.
        where: What the bytes are of, for messages.
        granularity: Bytes that every offset is a multiple of.

    Raises:
        ValueError: The length is negative.
    """

    def __init__(
        self, nbytes: int, where: str = "the pool", *, granularity: int = ALIGNMENT
    ) -> None:
        if nbytes < 0:
            raise ValueError(f"a pool cannot have {nbytes} bytes; 0 is the least")
        self.nbytes = nbytes
        self._where = where
        self._granularity = granularity
        self._peak = self._allocations = self._failures = 0
        self._blocks: dict[str, _Block] = {}
        self._holes: list[tuple[int, int]] = []  # (size, offset), ascending
        self._sizes: dict[int, int] = {}  # offset of a hole -> its size
        self._starts: dict[int, int] = {}  # end of a hole -> its offset
        self._reserved = self._used = 0
        self.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._blocks

    def __iter__(self) -> Iterator[str]:
        """Names of the blocks alive, the oldest first."""
        return iter(self._blocks)

    def offset(self, name: str) -> int:
        """Where a block begins.

        Raises:
            ValueError: There is none of that name.
        """
        return self._block(name).offset

    def size(self, name: str) -> int:
        """Bytes that were asked for under a name.

        Raises:
            ValueError: There is no block of that name.
        """
        return self._block(name).nbytes

    def fits(self, nbytes: int) -> bool:
        """Whether a block of so many bytes could be had now."""
        return nbytes <= self.largest_hole

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest block that could be had now."""
        return self._holes[-1][0] if self._holes else 0

    def allocate(self, name: str, nbytes: int) -> int:
        """Reserve bytes in the smallest hole that has them, the first of equals.

        Returns:
            The offset.

        Raises:
            OutOfMemoryError: No hole is large enough; says what is alive, and what
                would make room.
            ValueError: The name has a block already, or the size is negative.
        """
        if name in self._blocks:
            raise ValueError(
                f"{name!r} already has {format_bytes(self.size(name))} of "
                f"{self._where}; free it first"
            )
        if nbytes < 0:
            raise ValueError(f"{name!r} cannot have {nbytes} bytes; 0 is the least")
        if not self.fits(nbytes):
            self._failures += 1
            raise OutOfMemoryError(self._shortage(name, nbytes))
        self._blocks[name] = block = self._placed(nbytes)
        self._used += nbytes
        self._reserved += block.reserved
        self._peak = max(self._peak, self._reserved)
        self._allocations += 1
        return block.offset

    def free(self, name: str) -> None:
        """Give a block back.

        Raises:
            ValueError: There is none of that name.
        """
        block = self._block(name)
        del self._blocks[name]
        self._used -= block.nbytes
        self._reserved -= block.reserved
        if not block.reserved:
            return
        start, end = self._around(block)
        if start < block.offset:
            self._remove(start)
        if end > block.end:
            self._remove(block.end)
        self._add(start, end - start)

    def clear(self) -> None:
        """Give all blocks back."""
        self._blocks.clear()
        self._holes.clear()
        self._sizes.clear()
        self._starts.clear()
        self._reserved = self._used = 0
        if self.nbytes:
            self._add(0, self.nbytes)

    @property
    def statistics(self) -> PoolStatistics:
        """How full it is, and was."""
        return PoolStatistics(
            nbytes=self.nbytes,
            reserved_bytes=self._reserved,
            used_bytes=self._used,
            peak_bytes=self._peak,
            largest_hole=self.largest_hole,
            holes=len(self._holes),
            blocks=len(self._blocks),
            allocations=self._allocations,
            failures=self._failures,
        )

    def _block(self, name: str) -> _Block:
        try:
            return self._blocks[name]
        except KeyError:
            raise ValueError(
                f"{name!r} has no bytes of {self._where}; {self._alive()}"
            ) from None

    def _placed(self, nbytes: int) -> _Block:
        """A block cut from the front of the best hole, which is large enough."""
        if nbytes == 0:
            return _Block(0, 0, 0)
        size, offset = self._holes[bisect.bisect_left(self._holes, (nbytes, 0))]
        reserved = min(rounded(nbytes, self._granularity), size)
        self._remove(offset)
        if size > reserved:
            self._add(offset + reserved, size - reserved)
        return _Block(offset, nbytes, reserved)

    def _around(self, block: _Block) -> tuple[int, int]:
        """The hole that freeing a block would leave: its first byte and its end."""
        start = self._starts.get(block.offset, block.offset)
        return start, block.end + self._sizes.get(block.end, 0)

    def _add(self, offset: int, size: int) -> None:
        bisect.insort(self._holes, (size, offset))
        self._sizes[offset] = size
        self._starts[offset + size] = offset

    def _remove(self, offset: int) -> None:
        size = self._sizes.pop(offset)
        del self._starts[offset + size]
        del self._holes[bisect.bisect_left(self._holes, (size, offset))]

    def _shortage(self, name: str, nbytes: int) -> str:
        """Why there is no room, and for what there would be."""
        now = self.statistics
        return (
            f"no room for {name!r} of {format_bytes(nbytes)} in {self._where} of "
            f"{format_bytes(self.nbytes)}: {format_bytes(now.free_bytes)} are free, "
            f"the largest hole is {format_bytes(now.largest_hole)}; {self._alive()}; "
            f"{self._remedy(nbytes)}"
        )

    def _alive(self) -> str:
        if not self._blocks:
            return "nothing is alive"
        alive = largest_first({n: block.nbytes for n, block in self._blocks.items()})
        return f"alive are {alive}"

    def _remedy(self, nbytes: int) -> str:
        wanted = self._reserved + rounded(nbytes, self._granularity)
        larger = f"a pool of {wanted} bytes would do"
        if wanted <= self.nbytes:
            larger = f"its {len(self._holes)} holes would do if they were one"
        enough = []
        for name, block in self._blocks.items():
            start, end = self._around(block)
            if block.reserved and end - start >= nbytes:
                enough.append((block.nbytes, name))
        if not enough:
            return larger
        return f"freeing {min(enough)[1]!r} would make room, {larger}"
