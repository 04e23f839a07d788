"""Activations, sums and products: one element at a time, any of them in place."""

from mucudnn.backends.cuda.kernels.program import KernelCall, Operation, Program, flat

__all__ = ["OPERATIONS", "PROGRAM"]

PROGRAM = Program(
    r"""
#define ONE(formula)                                                              \
    EACH(i, count) { A x = (A)a[i]; y[i] = (T)(formula); }
#define TWO(formula)                                                              \
    EACH(i, count) { A x = (A)a[i]; A d = (A)b[i]; y[i] = (T)(formula); }

// The probability that a standard normal variable is below x, and its density.
__device__ A below(A x) { return (A)0.5 * (1 + erf(x * (A)0.70710678118654752)); }
__device__ A density(A x) {
    return (A)0.39894228040143268 * exp((A)-0.5 * x * x);
}

KERNEL add(const T* a, const T* b, T* y, I count) { TWO(x + d) }
KERNEL multiply(const T* a, const T* b, T* y, I count) { TWO(x * d) }
KERNEL scale(const T* a, T* y, I count, double factor) { ONE(x * (A)factor) }

KERNEL relu(const T* a, T* y, I count) { ONE(x > 0 || x != x ? x : (A)0) }
KERNEL add_relu(const T* a, const T* b, T* y, I count) {
    TWO(x + d > 0 || x + d != x + d ? x + d : (A)0)
}
KERNEL relu_grad(const T* a, const T* b, T* y, I count) { TWO(x != 0 ? d : (A)0) }

KERNEL leaky_relu(const T* a, T* y, I count, double slope) {
    ONE(x > 0 ? x : (A)slope * x)
}
KERNEL leaky_relu_grad(const T* a, const T* b, T* y, I count, double slope) {
    TWO(x > 0 ? d : (A)slope * d)
}

KERNEL gelu(const T* a, T* y, I count) { ONE(x * below(x)) }
KERNEL gelu_grad(const T* a, const T* b, T* y, I count) {
    TWO(d * (below(x) + x * density(x)))
}

KERNEL sigmoid(const T* a, T* y, I count) { ONE(1 / (1 + exp(-x))) }
KERNEL sigmoid_grad(const T* a, const T* b, T* y, I count) { TWO(d * x * (1 - x)) }

KERNEL tanh_(const T* a, T* y, I count) { ONE(tanh(x)) }
KERNEL tanh_grad(const T* a, const T* b, T* y, I count) { TWO(d * (1 - x * x)) }
"""
)


def _elementwise(kernel: str, *names: str) -> Operation:
    """An operation of one or two tensors and the attributes of these names."""

    def run(call: KernelCall) -> None:
        (y,) = call.outputs
        arguments = *call.inputs, y, y.size, *call.numbers(*names)
        call.launch(PROGRAM, kernel, flat(y.size), *arguments)

    return Operation(run)


_ATTRIBUTES = {
    "leaky_relu": ("slope",),
    "leaky_relu_grad": ("slope",),
    "scale": ("factor",),
}

OPERATIONS: dict[str, Operation] = {
    kernel.removesuffix("_"): _elementwise(kernel, *_ATTRIBUTES.get(kernel, ()))
    for kernel in PROGRAM.kernels
}
