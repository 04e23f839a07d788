"""Copies of whole tensors and of parts, and constants; by CuPy's assignments.

They run on the current stream and need no memory besides the output.
"""

from mucudnn.backends.cuda.kernels.program import KernelCall, Operation
from mucudnn.backends.shaping import SHAPING, Copies

__all__ = ["OPERATIONS"]


def _operation(copies: Copies) -> Operation:
    def run(call: KernelCall) -> None:
        for source, target in copies(call.inputs, call.outputs[0], call.attrs):
            call.gpu.copy(source, target)

    return Operation(run)


OPERATIONS: dict[str, Operation] = {
    name: _operation(copies) for name, copies in SHAPING.items()
}
