"""Local response normalisation across channels (Krizhevsky et al., 2012).

y = x / d^beta, d = k + alpha / size * (sum of x² over neighbouring channels). The
gradient goes through the channels of a pixel in order and may overwrite dy on its way,
so it keeps what the next channels need in the workspace, in a ring of `size` rows.
"""

from typing import Any

from mucudnn.backends.cuda.kernels.program import (
    Attrs,
    KernelCall,
    Operation,
    Program,
    Specs,
    as_ncs,
    flat,
)
from mucudnn.ir.tensor import itemsize

__all__ = ["OPERATIONS", "PROGRAM"]

PROGRAM = Program(
    r"""
__device__ A power(A base, A beta) {
    if (beta == (A)0.75) return sqrt(base) * sqrt(sqrt(base));
    if (beta == (A)0.5) return sqrt(base);
    return beta == 1 ? base : pow(base, beta);
}

// d of channel c; x points at channel 0 of the pixel.
__device__ A base_of(const T* x, I c, I C, I S, I size, double alpha, double k) {
    I first = c - size / 2 > 0 ? c - size / 2 : 0;
    I last = c + (size - 1) / 2 < C - 1 ? c + (size - 1) / 2 : C - 1;
    A sum = 0;
    for (I j = first; j <= last; ++j) sum += (A)x[j * S] * (A)x[j * S];
    return (A)k + sum * (A)(alpha / size);
}

KERNEL lrn(const T* x, T* y, I count, I C, I S, I size, double alpha, double beta,
           double k) {
    EACH(i, count) {
        I c = i / S % C;
        A base = base_of(x + (i - c * S), c, C, S, size, alpha, k);
        y[i] = (T)((A)x[i] / power(base, (A)beta));
    }
}

KERNEL lrn_grad(const T* x, const T* y, const T* dy, T* dx, A* ring, I pixels, I C, I S,
                I size, double alpha, double beta, double k) {
    I before = (size - 1) / 2, after = size / 2;
    A factor = (A)(-2 * alpha * beta / size);
    EACH(pixel, pixels) {
        I start = pixel / S * C * S + pixel % S;
        for (I next = 0; next < C + after; ++next) {
            I slot = next % size * pixels + pixel, i = start + next * S;
            ring[slot] = 0;
            if (next < C)
                ring[slot] = (A)dy[i] * (A)y[i] /
                             base_of(x + start, next, C, S, size, alpha, k);
            I c = next - after;
            if (c < 0) continue;
            A sum = 0;
            for (I j = c - before > 0 ? c - before : 0; j <= next; ++j)
                sum += ring[j % size * pixels + pixel];
            i = start + c * S;
            A own = base_of(x + start, c, C, S, size, alpha, k);
            dx[i] = (T)((A)dy[i] / power(own, (A)beta) + sum * (A)x[i] * factor);
        }
    }
}
"""
)


def lrn(call: KernelCall) -> None:
    """Divide each element by a power of its neighbourhood's mean square."""
    x = call.inputs[0]
    _, C, S = as_ncs(x.shape)
    arguments = x, call.outputs[0], x.size, C, S, *_numbers(call)
    call.launch(PROGRAM, "lrn", flat(x.size), *arguments)


def lrn_grad(call: KernelCall) -> None:
    """Dx_i = dy_i / d_i^beta - 2 alpha beta / size x_i sum_j dy_j y_j / d_j."""
    N, C, S = as_ncs(call.inputs[0].shape)
    operands = *call.inputs, call.outputs[0], call.workspace
    arguments = *operands, N * S, C, S, *_numbers(call)
    call.launch(PROGRAM, "lrn_grad", flat(N * S), *arguments)


def _numbers(call: KernelCall) -> tuple[Any, ...]:
    return call.attrs["size"], *call.numbers("alpha", "beta", "k")


def _ring(inputs: Specs, outputs: Specs, attrs: Attrs) -> int:
    N, _, S = as_ncs(inputs[0].shape)
    size: int = attrs["size"]
    return max(4, itemsize(inputs[0].dtype)) * size * N * S


OPERATIONS: dict[str, Operation] = {
    "lrn": Operation(lrn),
    "lrn_grad": Operation(lrn_grad, _ring),
}
