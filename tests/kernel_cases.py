"""What the tests of training kernels share: a way to call one, and inputs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels import bind
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.tensor import TensorSpec

KERNELS = bind(Workers(2))
PLAIN = {"weight_decay": 0.0, "gradient_scale": 1.0}
DECAYED = {"weight_decay": 0.01, "gradient_scale": 0.5}
ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decoupled": False}


def close(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def run(
    op: str,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    attrs: Mapping[str, Any] | None = None,
    kernels: Mapping[str, Any] = KERNELS,
) -> Sequence[Any]:
    """Outputs are arrays, or (shape, dtype) of arrays to be made, full of NaN."""
    made = [o if isinstance(o, np.ndarray) else stale(*o) for o in outputs]
    kernels[op].run(list(inputs), made, attrs or {}, None)
    return made


def prepared(
    kernel: Any,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    attrs: Mapping[str, Any],
    wrap: Callable[[Any], Any] = lambda a: a,
) -> tuple[Callable[[], None], Any]:
    """A call of a kernel on wrapped arrays; its workspace, of its bytes, all NaN."""
    specs = [
        [TensorSpec("t", a.shape, a.dtype.name) for a in some]
        for some in (inputs, outputs)
    ]
    scratch = np.full(kernel.workspace(*specs, attrs), 0xFF, np.uint8)
    arrays = [[wrap(a) for a in some] for some in (inputs, outputs)]
    workspace = wrap(scratch) if scratch.size else None
    return kernel.call(*arrays, attrs, workspace), scratch


def within(found: Any, expected: Any, tolerance: float) -> None:
    """Each array agrees, relative to the greatest number of the expected one."""
    for one, other in zip(found, expected, strict=True):
        scale = max(1.0, np.abs(other).max())
        assert np.abs(one - other).max() <= tolerance * scale


def stale(shape: Sequence[int], dtype: Any = np.float64) -> Any:
    """An array of what no kernel should leave or read."""
    full = math.nan if np.dtype(dtype).kind == "f" else 113
    return np.full(shape, full, dtype)


def normal(*shape: int, seed: int = 0, dtype: Any = np.float64) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def distinct(*shape: int, seed: int = 0) -> Any:
    """No two elements closer than a step of numeric differentiation."""
    values = np.random.default_rng(seed).permutation(math.prod(shape))
    return (values.reshape(shape) - values.size / 2) * 0.02 + 0.005


def numeric_gradient(fn: Callable[[], float], x: Any, step: float = 1e-5) -> Any:
    """Central differences of `fn()` with respect to every element of `x`."""
    gradient = np.empty_like(x)
    for place in np.ndindex(x.shape):
        value = x[place]
        x[place] = value + step
        above = fn()
        x[place] = value - step
        below = fn()
        x[place] = value
        gradient[place] = (above - below) / (2 * step)
    return gradient


def large_cases(dtype, N=16):
    """Every operation on a tensor of several tiles: (op, inputs, outputs, attrs)."""
    x = normal(N, 32, 128, 128, dtype=dtype)
    y = np.empty_like(x)
    half = np.empty((N, 32, 64, 64), dtype)
    which = np.empty(half.shape, np.uint8)
    gamma, beta, mean, var = (
        normal(32, seed=i, dtype=dtype) ** 2 + 1 for i in range(4)
    )
    flat = x.reshape(-1, 32)
    labels = np.random.default_rng(0).integers(0, 32, (N, 128, 128))
    scalar, step, count = np.full((), 0.1, dtype), np.array(3), np.zeros((), np.int64)
    lrn = {"size": 5, "alpha": 1e-4, "beta": 0.75, "k": 1.0}
    pool = {
        "kernel": (3, 3),
        "stride": (2, 2),
        "padding": (1, 1),
        "extra": (0, 0),
        "count_include_pad": False,
    }
    middle = np.full_like(which, 4)  # of the window
    group = {"groups": 4, "eps": 1e-5, "per_element": False}
    stats = [np.ones((N, 4), dtype) for _ in range(2)]
    norm = {"eps": 1e-5, "momentum": 0.1, "update": False}
    sides = {"scale": (2, 2)}
    twice = np.empty((N, 8, 256, 256), dtype)
    slope = {"slope": 0.1}
    one, other = np.ones_like(x), np.ones_like(x)
    for op in ("relu", "gelu", "sigmoid", "tanh"):
        yield op, [x], [y], {}
        yield f"{op}_grad", [x, x], [y], {}
    yield "leaky_relu", [x], [y], slope
    yield "leaky_relu_grad", [x, x], [y], slope
    yield "add", [x, x], [y], {}
    yield "multiply", [x, x], [y], {}
    yield "scale", [x], [y], {"factor": 2.0}
    yield "identity", [x], [y], {}
    yield "cast", [x], [y], {}
    last = np.empty((N, 128, 128, 32), dtype)
    yield "to_channels_last", [x], [last], {}
    yield "to_channels_first", [last], [y], {}
    yield "fill", [], [y], {"value": 1.0}
    yield "dropout", [x, step], [y], {"p": 0.3, "seed": 1}
    yield "add_relu", [x, x], [y], {}
    yield "bias", [x, gamma], [y], {}
    yield "bias_relu", [x, gamma], [y], {}
    yield "bias_relu_grad", [x, x], [y, gamma.copy()], {}
    yield "bias_grad", [x], [gamma.copy()], {}
    turned = {"transpose_a": True, "transpose_b": False}
    yield "matmul", [flat, flat], [np.empty((32, 32), dtype)], turned
    yield "batch_norm", [x, gamma, beta, mean, var], [y, mean * 0, var * 0], norm
    yield "batch_norm_eval", [x, gamma, beta, mean, var], [y], norm
    yield "batch_norm_grad", [x, x, gamma, mean, var], [y, mean * 0, var * 0], {}
    yield from _large_norms(x, y, (gamma, beta, mean, var), norm)
    moments = np.ones((3, 32))
    sizes = {"count": N * 128 * 128}
    yield "batch_norm_sums", [x], [moments * 0], {}
    yield "batch_norm_merge", [moments, moments, mean, var], [mean * 0, var * 0], norm
    yield "batch_norm_apply", [x, gamma, beta, mean, var], [y], {}
    yield "batch_norm_grad_sums", [x, x, mean, var], [mean * 0, var * 0], {}
    gradients = [x, x, gamma, mean, var, mean * 0, var * 0]
    yield "batch_norm_grad_apply", gradients, [y], sizes
    yield "group_norm", [x, gamma, beta], [y, *(s * 0 for s in stats)], group
    yield "group_norm_grad", [x, x, gamma, *stats], [y, mean * 0, var * 0], group
    sums, groups = np.ones((3, N, 4)), np.ones((2, N, 4), dtype)
    yield "group_norm_sums", [x], [sums * 0], group
    yield "group_norm_merge", [sums, sums], [s * 0 for s in stats], group
    yield "group_norm_apply", [x, gamma, beta, *stats], [y], group
    inputs, parts = [x, x, gamma, *stats], [mean * 0, var * 0, groups * 0]
    yield "group_norm_grad_sums", inputs, parts, group
    counted = group | {"count": 8 * 128 * 128}
    yield "group_norm_grad_apply", [*inputs, groups], [y], counted
    yield "lrn", [x], [y], lrn
    yield "lrn_grad", [x, x, x], [y], lrn
    yield "max_pool", [x], [half, which], pool
    yield "max_pool_grad", [x[:, :, ::2, ::2].copy(), middle], [y], pool
    yield "avg_pool", [x], [half], pool
    yield "avg_pool_grad", [x[:, :, ::2, ::2].copy()], [y], pool
    yield "concat", [x[:, :8].copy(), x[:, 8:].copy()], [y], {"axis": 1}
    corner = {"starts": (0, 1, 3, 5), "stops": (N, 32, 128, 128)}
    yield "slice", [x], [np.empty((N, 31, 125, 123), dtype)], corner
    margins = {"before": (0, 0, 1, 1), "after": (0, 0, 1, 1)}
    yield "pad", [x], [np.empty((N, 32, 130, 130), dtype)], margins
    for kind in ("nearest", "bilinear"):
        small = x[:, :8].copy()
        yield f"upsample_{kind}", [small], [twice], sides
        yield f"upsample_{kind}_grad", [twice], [small * 0], sides
    yield "softmax_cross_entropy", [x, labels], [np.empty((), dtype), y], {}
    yield "softmax_cross_entropy_grad", [y, labels, scalar], [y.copy()], {}
    yield "mean_squared_error", [x, y], [np.empty((), dtype)], {}
    yield "mean_squared_error_grad", [x, y, scalar], [y.copy()], {}
    yield "accuracy", [x, labels], [count], {"k": 5}
    nesterov = DECAYED | {"momentum": 0.9, "nesterov": True}
    yield "sgd", [y, x, scalar], [], DECAYED
    yield "momentum", [y, x, scalar, x.copy()], [], nesterov
    yield "adam", [y, x, scalar, step, one, other], [], DECAYED | ADAM
    yield "adagrad", [y, x, scalar, one], [], DECAYED | {"eps": 1e-8}
    yield "rmsprop", [y, x, scalar, one], [], DECAYED | {"eps": 1e-8, "alpha": 0.9}
    yield "accumulate", [y, x], [], {"factor": 0.5}
    yield "find_overflow", [x, np.zeros(3, np.int64)], [], {}
    scaling = {"growth": 2.0, "backoff": 0.5, "interval": 9, "least": 0.5, "most": 8.0}
    inputs = [np.full((), 2, dtype), np.zeros(3, np.int64)]
    yield "adjust_loss_scale", inputs, [], scaling


def _large_norms(x, y, channels, norm):
    """Batch normalisation with what follows it."""
    gamma, beta, mean, var = channels
    small = [mean * 0, var * 0]
    inputs = [x, gamma, beta, mean, var]
    yield "batch_norm_relu", inputs, [y, *small], norm
    yield "batch_norm_add_relu", [*inputs, x], [y, *small], norm
    inputs = [x, x, gamma, beta, mean, var]
    yield "batch_norm_relu_grad", inputs, [y, *small], {}
    inputs = [x, x, x, gamma, mean, var]
    yield "batch_norm_add_relu_grad", inputs, [y, y.copy(), *small], {}
