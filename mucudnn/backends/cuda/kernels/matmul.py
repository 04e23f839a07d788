"""Products of two matrices, by cuBLAS."""

from mucudnn.backends.cuda.kernels.program import KernelCall, Operation

__all__ = ["OPERATIONS"]


def matmul(call: KernelCall) -> None:
    """Y = a b, either transposed first if asked."""
    a, b = call.inputs
    a = a.T if call.attrs["transpose_a"] else a
    b = b.T if call.attrs["transpose_b"] else b
    call.gpu.matmul(a, b, call.outputs[0])


OPERATIONS: dict[str, Operation] = {"matmul": Operation(matmul)}
