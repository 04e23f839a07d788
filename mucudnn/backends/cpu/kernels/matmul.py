"""Matrix products, in panels of fixed width with a single-threaded BLAS each."""

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import KernelCall, Run

__all__ = ["OPERATIONS"]

_PANELS = 16  # at most; enough to balance a few workers
_NARROWEST = 64  # columns; below, BLAS spends its time packing


def matmul(call: KernelCall) -> None:
    """Compute y = a b, with optional transpositions."""
    a, b = call.inputs
    a = a.T if call.attrs["transpose_a"] else a
    b = b.T if call.attrs["transpose_b"] else b
    (y,) = call.outputs
    by_rows = y.shape[0] > y.shape[1]
    size = max(y.shape)
    step = max(_NARROWEST, -(-size // _PANELS // _NARROWEST) * _NARROWEST)

    def panel(start: int) -> None:
        part = slice(start, start + step)
        if by_rows:
            np.matmul(a[part], b, out=y[part])
        else:
            np.matmul(a, b[:, part], out=y[:, part])

    call.share(range(0, size, step), panel)


OPERATIONS: dict[str, Run] = {"matmul": matmul}
