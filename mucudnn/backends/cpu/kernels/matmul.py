"""Products of two matrices, in panels of fixed width with a BLAS of one thread each."""

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import KernelCall, Run

__all__ = ["OPERATIONS"]

_PANELS = 16  # enough for a few workers to finish together
_NARROWEST = 64  # columns: below, BLAS packs more than it multiplies


def matmul(call: KernelCall) -> None:
    """Y = a b, either transposed first if asked."""
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
