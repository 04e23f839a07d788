"""Products of two matrices, by cuBLAS."""

from typing import Any

from mucudnn.backends.cuda.kernels.program import (
    Attrs,
    Inputs,
    Launcher,
    Operation,
    Outputs,
)

__all__ = ["OPERATIONS", "matmul"]


def matmul(
    gpu: Launcher, inputs: Inputs, outputs: Outputs, attrs: Attrs, workspace: Any
) -> None:
    """Y = a b, either transposed first if asked."""
    a, b = inputs
    a = a.T if attrs["transpose_a"] else a
    b = b.T if attrs["transpose_b"] else b
    gpu.matmul(a, b, outputs[0])


OPERATIONS: dict[str, Operation] = {"matmul": Operation(matmul)}
