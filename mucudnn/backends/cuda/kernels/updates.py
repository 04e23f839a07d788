"""Optimizer steps, in PyTorch's conventions; each overwrites weights and state at once.

Half-precision weights are computed with in float32 and rounded once; their learning
rate has the type of the weights.
"""

from mucudnn.backends.cuda.kernels.program import KernelCall, Operation, Program, flat

__all__ = ["OPERATIONS", "PROGRAM"]

PROGRAM = Program(
    r"""
// The gradient, scaled, with the weight decay's.
__device__ A gradient(T w, T dw, double decay, double factor) {
    A g = (A)dw * (A)factor;
    return decay != 0 ? g + (A)w * (A)decay : g;
}

KERNEL sgd(T* w, const T* dw, const T* lr, I count, double decay, double factor) {
    A rate = (A)lr[0];
    EACH(i, count) w[i] = (T)((A)w[i] - rate * gradient(w[i], dw[i], decay, factor));
}

KERNEL momentum(T* w, const T* dw, const T* lr, T* m, I count, double decay,
                double factor, double mu, I nesterov) {
    A rate = (A)lr[0];
    EACH(i, count) {
        A g = gradient(w[i], dw[i], decay, factor);
        A moved = (A)mu * (A)m[i] + g;
        m[i] = (T)moved;
        w[i] = (T)((A)w[i] - rate * (nesterov ? g + (A)mu * moved : moved));
    }
}

KERNEL adam(T* w, const T* dw, const T* lr, const long long* step, T* m, T* v, I count,
            double decay, double factor, double beta1, double beta2, double eps,
            I decoupled) {
    __shared__ double shared[2];
    if (threadIdx.x == 0) {
        shared[0] = (double)lr[0] / (1 - pow(beta1, (double)(*step + 1)));
        shared[1] = 1 / sqrt(1 - pow(beta2, (double)(*step + 1)));
    }
    __syncthreads();
    A rate = (A)shared[0], root = (A)shared[1];
    A kept = decoupled ? (A)(1 - (double)lr[0] * decay) : (A)1;
    EACH(i, count) {
        A g = gradient(w[i], dw[i], decoupled ? 0 : decay, factor);
        A first = (A)beta1 * (A)m[i] + (A)(1 - beta1) * g;
        A second = (A)beta2 * (A)v[i] + (A)(1 - beta2) * (g * g);
        m[i] = (T)first;
        v[i] = (T)second;
        w[i] = (T)((A)w[i] * kept - rate * (first / (sqrt(second) * root + (A)eps)));
    }
}

KERNEL adagrad(T* w, const T* dw, const T* lr, T* s, I count, double decay,
               double factor, double eps) {
    A rate = (A)lr[0];
    EACH(i, count) {
        A g = gradient(w[i], dw[i], decay, factor);
        A sum = (A)s[i] + g * g;
        s[i] = (T)sum;
        w[i] = (T)((A)w[i] - rate * (g / (sqrt(sum) + (A)eps)));
    }
}

KERNEL rmsprop(T* w, const T* dw, const T* lr, T* s, I count, double decay,
               double factor, double alpha, double eps) {
    A rate = (A)lr[0];
    EACH(i, count) {
        A g = gradient(w[i], dw[i], decay, factor);
        A mean = (A)alpha * (A)s[i] + (A)(1 - alpha) * (g * g);
        s[i] = (T)mean;
        w[i] = (T)((A)w[i] - rate * (g / (sqrt(mean) + (A)eps)));
    }
}

KERNEL accumulate(T* total, const T* part, I count, double factor) {
    EACH(i, count) total[i] = (T)((A)total[i] + (A)factor * (A)part[i]);
}
"""
)

_COMMON = ("weight_decay", "gradient_scale")


def _update(kernel: str, *names: str, flags: tuple[str, ...] = ()) -> Operation:
    """An update with the attributes of these names, in the kernel's order."""

    def run(call: KernelCall) -> None:
        size = call.inputs[0].size
        numbers = *call.numbers(*names), *(int(call.attrs[name]) for name in flags)
        call.launch(PROGRAM, kernel, flat(size), *call.inputs, size, *numbers)

    return Operation(run)


OPERATIONS: dict[str, Operation] = {
    "accumulate": _update("accumulate", "factor"),
    "adagrad": _update("adagrad", *_COMMON, "eps"),
    "adam": _update("adam", *_COMMON, "beta1", "beta2", "eps", flags=("decoupled",)),
    "momentum": _update("momentum", *_COMMON, "momentum", flags=("nesterov",)),
    "rmsprop": _update("rmsprop", *_COMMON, "alpha", "eps"),
    "sgd": _update("sgd", *_COMMON),
}
