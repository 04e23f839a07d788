"""Bias, channel sums in a fixed order, and matrix products.

A block takes one channel or, where images are small, 32 neighbouring ones, and a part
of their samples and pixels, so that there are enough blocks. Each writes a sum in
double precision to the workspace, as (parts, C); the reader adds up the parts. With
channels last, a thread has the neighbours of one 16-byte access, and a block rows of
128 bytes. There are many short parts then: the last block to finish adds up those of
its channels, in the order of the blocks.

Parts depend on shapes alone (see `Channels`) and no number is added atomically: results
are reproducible.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mucudnn.backends.cuda.kernels.launch import (
    THREADS,
    KernelCall,
    Operation,
    Program,
    as_ncs,
    read_constant,
)
from mucudnn.ir.tensor import TensorSpec, itemsize

PROGRAM = Program.load("kernels/reductions.cu")
PARTIALS = 512
"""Most blocks of a sum over everything."""

_LANES = 32  # neighbouring channels of a block, where images are small
_ROW = read_constant("channels.cuh", "MOST_WIDTH")  # threads that read 128 bytes
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
        width = 1 if S >= _SMALL_IMAGE else _LANES
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
        width = min(_ROW, 1 << (C // apiece - 1).bit_length())
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

    def launch(
        self,
        call: KernelCall,
        program: Program,
        kernel: str,
        *arguments: Any,
        beside: Any = None,
    ) -> None:
        """Launch the variant of a kernel for this division."""
        name = kernel if self.apiece == 1 else f"{kernel}_last"
        call.launch(program, name, self.blocks, *arguments, beside=beside)

    def finish(self, call: KernelCall, program: Program, parts: Any, out: Any) -> None:
        """Add up the parts into `out`; the program must include `finish.cuh`."""
        arguments = out, parts, self.parts, out.size
        blocks = (-(-out.size // _LANES),)
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


def partials(count: int) -> int:
    """Return the blocks of a sum over `count` items; each thread has at least one."""
    return max(1, min(PARTIALS, math.ceil(count / THREADS)))


def channel_sums(count: int) -> Callable[..., int]:
    """Return a workspace rule: the bytes of so many sums per channel of an input."""
    return lambda inputs, *_: count * Channels.most_bytes(inputs[0])


def _add_bias(call: KernelCall, *, relu: bool) -> None:
    """Compute y = x + b, b of shape (C,) along axis 1, or max(x + b, 0)."""
    (x, b), (y,) = call.inputs, call.outputs
    channels = Channels.here(call, x, y)
    arguments = x, b, y, int(relu), *channels.arguments
    channels.launch(call, PROGRAM, "bias", *arguments, beside=b)


def bias_grad(call: KernelCall) -> None:
    """Sum dy over samples and pixels."""
    dy, db = call.inputs[0], call.outputs[0]
    _sum_channels(call, "bias_grad", (dy,), db)


def bias_relu_grad(call: KernelCall) -> None:
    """Compute dy where y is not 0, and its sum over samples and pixels."""
    (y, dy), (dx, db) = call.inputs, call.outputs
    _sum_channels(call, "bias_relu_grad", (y, dy, dx), db)


def _sum_channels(
    call: KernelCall, kernel: str, images: tuple[Any, ...], db: Any
) -> None:
    channels = Channels.here(call, *images)
    (parts,) = channels.buffers(call.workspace, 1)
    if channels.apiece == 1:
        channels.launch(call, PROGRAM, kernel, *images, parts, *channels.arguments)
        channels.finish(call, PROGRAM, parts, db)
        return
    arguments = *images, db, parts, *channels.arrived(call), *channels.arguments
    channels.launch(call, PROGRAM, kernel, *arguments, beside=db)


def matmul(call: KernelCall) -> None:
    """Compute y = a b, with optional transpositions."""
    a, b = call.inputs
    a = a.T if call.attrs["transpose_a"] else a
    b = b.T if call.attrs["transpose_b"] else b
    call.gpu.matmul(a, b, call.outputs[0])


OPERATIONS: dict[str, Operation] = {
    "bias": Operation(partial(_add_bias, relu=False)),
    "bias_grad": Operation(bias_grad, channel_sums(1)),
    "bias_relu": Operation(partial(_add_bias, relu=True)),
    "bias_relu_grad": Operation(bias_relu_grad, channel_sums(1)),
    "matmul": Operation(matmul),
}
