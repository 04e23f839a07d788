"""Matrix products, by cuBLAS."""

from mucudnn.backends.cuda.kernels.program import KernelCall, Operation

__all__ = ["OPERATIONS"]


def matmul(call: KernelCall) -> None:
    """Compute y = a b, with optional transpositions."""
    a, b = call.inputs
    a = a.T if call.attrs["transpose_a"] else a
    b = b.T if call.attrs["transpose_b"] else b
    call.gpu.matmul(a, b, call.outputs[0])


OPERATIONS: dict[str, Operation] = {"matmul": Operation(matmul)}
