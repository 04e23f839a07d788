"""How sums over samples and pixels are divided among blocks, for each channel.

By shapes alone, so that results are the same bits every time; see `sums` for what the
blocks do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.cuda.kernels.program import (
    THREADS,
    KernelCall,
    Program,
    as_ncs,
)
from mucudnn.backends.cuda.kernels.sums import LANES, ROW
from mucudnn.ir.tensor import TensorSpec, itemsize

__all__ = ["Channels"]

_BLOCKS = 1024
_MOST_PARTS = 64
_FEWEST = 8  # elements of a thread, or the parts are not worth their addition
_SMALL_IMAGE = 8  # elements: below, a row of an image is no full access to memory
_ACCESS = 16  # bytes of a thread's access to memory
_LAST_BLOCKS = 528  # with channels last: four for each multiprocessor of an H100
_MOST_LAST = 264  # parts where channels are last, which one block adds up
_SUMMED = 512  # bytes of a channel at least, of which a part is a sum of 8 bytes


@dataclass(frozen=True)
class Channels:
    """How the sums over an array (N, C, S) are divided.

    A block has `width` times `apiece` channels, each of its threads `apiece`
    neighbouring ones; `parts` blocks have the same ones.
    """

    shape: tuple[int, int, int]
    width: int
    parts: int
    apiece: int = 1

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Channels":
        """How to divide a tensor (N, C, *spatial) that may begin anywhere."""
        N, C, S = as_ncs(shape)
        width = 1 if S >= _SMALL_IMAGE else LANES
        across = -(-C // width)
        worth = N * S // (THREADS // width * _FEWEST)
        parts = min(_MOST_PARTS, -(-_BLOCKS // max(1, across)), worth)
        return cls((N, C, S), width, max(1, parts))

    @classmethod
    def last(cls, shape: Sequence[int], nbytes: int) -> "Channels | None":
        """How, where channels of so many bytes are last and fill whole accesses."""
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
        """How to divide the first of these, all of one shape; None is a missing one."""
        shape, nbytes = images[0].shape, images[0].dtype.itemsize
        found = cls.last(shape, nbytes)
        starts = (call.gpu.address(image) for image in images if image is not None)
        if found is None or any(start % _ACCESS for start in starts):
            return cls.of(shape)
        return found

    @classmethod
    def most_bytes(cls, spec: TensorSpec) -> int:
        """Bytes of the partial sums of a tensor, wherever it begins."""
        other = cls.last(spec.shape, itemsize(spec.dtype))
        return max(cls.of(spec.shape).nbytes, other.nbytes if other else 0)

    @property
    def blocks(self) -> tuple[int, int]:
        """The grid of a kernel that makes a `ChannelsOf`."""
        return -(-self.shape[1] // (self.width * self.apiece)), self.parts

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """N, C, S, width: what a `ChannelsOf` is made of."""
        return (*self.shape, self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of the partial sums."""
        return 8 * self.parts * self.shape[1]

    def kernel(self, name: str) -> str:
        """The kernel of this name for channels that are divided so."""
        return name if self.apiece == 1 else f"{name}_last"

    def finish(self, call: KernelCall, program: Program, parts: Any, out: Any) -> None:
        """Add the parts up; the program has `FINISH`."""
        arguments = out, parts, self.parts, out.size
        blocks = (-(-out.size // LANES),)
        call.launch(program, "finish_channels", blocks, *arguments)

    @property
    def left(self) -> int:
        """Parts to be added up behind a launch whose last block has merged them."""
        return self.parts if self.apiece == 1 else 1

    def arrived(self, call: KernelCall) -> tuple[Any, ...]:
        """The counters of a kernel whose last block adds up; nothing if none does."""
        if self.apiece == 1:
            return ()
        return (call.gpu.table([[0] * self.blocks[0]]),)

    def buffers(self, workspace: Any, count: int) -> list[Any]:
        """The first parts of a workspace, one for each of `count` sums."""
        size = self.nbytes
        return [workspace[i * size : (i + 1) * size] for i in range(count)]
