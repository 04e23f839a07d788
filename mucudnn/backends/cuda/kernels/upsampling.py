"""Upsampling by integer factors: nearest and (bi-, tri-)linear, with gradients.

Linear: pixel i s + k of the result is f = (k + 1/2) / s - 1/2 from pixel i of the
image, so it is the sum of (1 - |f|) of that pixel and |f| of its neighbour on that
side, or of itself at the border. A thread has a pixel of the small image, or neighbours
that fill a 16-byte access, and all pixels of the large image that depend on them, which
it locates without dividing.
"""

from mucudnn.backends.cuda.kernels.launch import KernelCall, Operation, walking
from mucudnn.backends.cuda.kernels.source import Program

PROGRAM = Program.load("kernels/upsampling.cu")


def _resampling(kernel: str) -> Operation:
    """Make an operation between a small image and a large one."""

    def run(call: KernelCall) -> None:
        (given,), (made,) = call.inputs, call.outputs
        small = made if kernel.endswith("_grad") else given
        axes = list(zip(small.shape[2:], call.attrs["scale"], strict=True))
        axes = [(1, 1)] * (3 - len(axes)) + axes
        numbers = (number for axis in axes for number in axis)
        blocks = walking(small.size)
        call.launch(PROGRAM, kernel, blocks, given, made, small.size, *numbers)

    return Operation(run)


OPERATIONS = {kernel: _resampling(kernel) for kernel in PROGRAM.kernels}
