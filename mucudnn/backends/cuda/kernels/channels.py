"""Division of per-channel sums over samples and pixels among blocks.

The division depends on shapes alone, so results are bit-identical every time; see
`sums` for the device code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.cuda.kernels.program import THREADS, KernelCall, Program, as_ncs
from mucudnn.backends.cuda.kernels.sums import LANES, ROW
from mucudnn.ir.tensor import TensorSpec, itemsize

__all__ = ["Channels"]

_BLOCKS = 1024
_MOST_PARTS = 64
_FEWEST = 8  # least elements per thread: with fewer, adding the parts costs more
_SMALL_IMAGE = 8  # elements; below, a row of an image is no full memory access
_ACCESS = 16  # bytes of a thread's memory access
_LAST_BLOCKS = 528  # channels last: four per multiprocessor of an H100
_MOST_LAST = 264  # channels last: most parts, which one block adds up
_SUMMED = 512  # least bytes of a channel per part (a sum of 8 bytes)


@dataclass(frozen=True)
class Channels:
    """Division of the sums over an array (N, C, S).

    A block has `width` times `apiece` channels, each of its threads `apiece`
    neighbouring ones; `parts` blocks share the same channels.
    """

    shape: tuple[int, int, int]
    width: int
    parts: int
    apiece: int = 1

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Channels":
        """Divide a tensor (N, C, *spatial) of any alignment."""
        N, C, S = as_ncs(shape)
        width = 1 if S >= _SMALL_IMAGE else LANES
        across = -(-C // width)
        worth = N * S // (THREADS // width * _FEWEST)
        parts = min(_MOST_PARTS, -(-_BLOCKS // max(1, across)), worth)
        return cls((N, C, S), width, max(1, parts))

    @classmethod
    def last(cls, shape: Sequence[int], nbytes: int) -> "Channels | None":
        """Divide channels-last items of `nbytes`; None unless accesses are whole."""
        N, C, S = as_ncs(shape)
        apiece = _ACCESS // nbytes
        if S != 1 or C == 0 or C % apiece:
            return None
        width = min(ROW, 1 << (C // apiece - 1).bit_length())
        across = -(-C // (width * apiece))
        worth = N * nbytes // _SUMMED
        parts = min(_MOST_LAST, -(-_LAST_BLOCKS // across), worth)
        return cls((N, C, S), width, max(1, parts), apiece)

    @classmethod
    def here(cls, call: KernelCall, *images: Any) -> "Channels":
        """Divide images of one shape by their alignment; None is a missing image."""
        shape, nbytes = images[0].shape, images[0].dtype.itemsize
        found = cls.last(shape, nbytes)
        starts = (call.gpu.address(image) for image in images if image is not None)
        if found is None or any(start % _ACCESS for start in starts):
            return cls.of(shape)
        return found

    @classmethod
    def most_bytes(cls, spec: TensorSpec) -> int:
        """Return the most bytes of a tensor's partial sums, for any alignment."""
        other = cls.last(spec.shape, itemsize(spec.dtype))
        return max(cls.of(spec.shape).nbytes, other.nbytes if other else 0)

    @property
    def blocks(self) -> tuple[int, int]:
        """Grid of a kernel that constructs a `ChannelsOf`."""
        return -(-self.shape[1] // (self.width * self.apiece)), self.parts

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """N, C, S, width: constructor arguments of a `ChannelsOf`."""
        return (*self.shape, self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of the partial sums."""
        return 8 * self.parts * self.shape[1]

    def kernel(self, name: str) -> str:
        """Return the name of the kernel variant for this division."""
        return name if self.apiece == 1 else f"{name}_last"

    def finish(self, call: KernelCall, program: Program, parts: Any, out: Any) -> None:
        """Add up the parts into `out`; the program must include `FINISH`."""
        arguments = out, parts, self.parts, out.size
        blocks = (-(-out.size // LANES),)
        call.launch(program, "finish_channels", blocks, *arguments)

    @property
    def left(self) -> int:
        """Parts that remain after a launch whose last block has merged them."""
        return self.parts if self.apiece == 1 else 1

    def arrived(self, call: KernelCall) -> tuple[Any, ...]:
        """Return the counters of a kernel whose last block adds up, or nothing."""
        if self.apiece == 1:
            return ()
        return (call.gpu.table([[0] * self.blocks[0]]),)

    def buffers(self, workspace: Any, count: int) -> list[Any]:
        """Return the first `count` buffers of partial sums in a workspace."""
        size = self.nbytes
        return [workspace[i * size : (i + 1) * size] for i in range(count)]
