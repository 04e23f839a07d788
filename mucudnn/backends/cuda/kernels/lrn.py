"""Local response normalisation across channels (Krizhevsky et al., 2012).

y = x / d^beta, d = k + alpha / size * (sum of x² over neighbouring channels). A thread
processes the channels of one pixel, or of neighbouring pixels that fill a memory
access, in order, so values read for one channel are cached for the next. The gradient
may overwrite dy on its way, so it saves the values that later channels need, the last
`size` of dy y / d, in a ring: in shared memory, or in the workspace if that is too
small. For images of few pixels, neighbouring threads process a pixel's channels.
"""

from typing import Any

from mucudnn.backends.cuda.kernels.launch import (
    Attrs,
    KernelCall,
    Operation,
    Specs,
    as_ncs,
    flat,
    walking,
)
from mucudnn.backends.cuda.kernels.source import THREADS, Program, read_constant

PROGRAM = Program.load("kernels/lrn.cu")
_BLOCKS = 1024
_FEWEST = 8  # least channels per thread, to amortise locating its pixel
_SHARED_ROWS = read_constant("lrn.cu", "SHARED_ROWS")  # of the ring


def lrn(call: KernelCall) -> None:
    """Divide each element by a power of its neighbourhood's mean square."""
    x, y = call.inputs[0], call.outputs[0]
    N, C, S = as_ncs(x.shape)
    if S < _FEWEST:
        arguments = x, y, x.size, C, S, *_numbers(call)
        call.launch(PROGRAM, "lrn_last", walking(x.size), *arguments)
        return
    (across,) = flat(N * S)
    parts = max(1, min(C // _FEWEST, _BLOCKS // max(1, across)))
    run = -(-C // parts)
    arguments = x, y, N * S, run, C, S, *_numbers(call)
    call.launch(PROGRAM, "lrn", (across, -(-C // run) if run else 0), *arguments)


def lrn_grad(call: KernelCall) -> None:
    """Compute dx_i = dy_i / d_i^beta - 2 alpha beta / size x_i sum_j dy_j y_j / d_j."""
    N, C, S = as_ncs(call.inputs[0].shape)
    operands = *call.inputs, call.outputs[0], call.workspace
    arguments = *operands, N * S, C, S, *_numbers(call)
    call.launch(PROGRAM, "lrn_grad", walking(N * S), *arguments)


def _numbers(call: KernelCall) -> tuple[Any, ...]:
    return call.attrs["size"], *call.numbers("alpha", "beta", "k")


def _ring(inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    """Return the bytes of the ring if it does not fit shared memory."""
    N, _, S = as_ncs(inputs[0].shape)
    size: int = attrs["size"]
    return 0 if size <= _SHARED_ROWS else 16 * size * walking(N * S)[0] * THREADS


OPERATIONS: dict[str, Operation] = {
    "lrn": Operation(lrn),
    "lrn_grad": Operation(lrn_grad, _ring),
}
