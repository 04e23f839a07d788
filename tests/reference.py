"""Convolution in float64, one multiply-add a tap: the oracle of every algorithm."""

import itertools

import numpy as np

from mucudnn.ir.conv import ConvProblem, Direction


def operands(problem: ConvProblem, seed=0):
    """Random (a, b) of a problem, as stored."""
    rng = np.random.default_rng(seed)
    a, b, _ = problem.operands()
    return tuple(rng.uniform(-1, 1, spec.shape).astype(spec.dtype) for spec in (a, b))


def reference(problem: ConvProblem, a, b):
    """The result as stored, in float64."""
    last = problem.layout == "NHWC"

    def logical(array):
        array = np.asarray(array, np.float64)
        return np.moveaxis(array, -1, 1) if last else array

    match problem.direction:
        case Direction.FORWARD:
            out = _forward(problem, logical(a), logical(b))
        case Direction.BACKWARD_DATA:
            out = _backward_data(problem, logical(a), logical(b))
        case Direction.BACKWARD_FILTER:
            out = _backward_filter(problem, logical(a), logical(b))
    return np.moveaxis(out, 1, -1) if last else out


def relative_error(actual, expected):
    """Greatest absolute difference over the greatest absolute value."""
    scale = np.abs(expected).max()
    return np.abs(np.asarray(actual, np.float64) - expected).max() / (scale or 1.0)


def _taps(problem, x):
    """Each tap with the view of the padded input that it multiplies."""
    for tap in itertools.product(*map(range, problem.w_shape[2:])):
        window = tuple(
            slice(t * d, t * d + s * (n - 1) + 1, s)
            for t, d, s, n in zip(
                tap, problem.dilation, problem.stride, problem.y_shape[2:], strict=True
            )
        )
        yield (..., *tap), x[(slice(None), slice(None), *window)]


def _padded(problem, x):
    return np.pad(x, [(0, 0), (0, 0), *((p, p) for p in problem.padding)])


def _split(problem, array, axis):
    return np.split(array, problem.groups, axis)


def _forward(problem, x, w):
    y = np.zeros(problem.y_shape)
    groups = zip(
        _split(problem, y, 1),
        _split(problem, _padded(problem, x), 1),
        _split(problem, w, 0),
        strict=True,
    )
    for yg, xg, wg in groups:
        for tap, window in _taps(problem, xg):
            yg += np.einsum("nc...,kc->nk...", window, wg[tap])
    return y


def _backward_data(problem, dy, w):
    dx = _padded(problem, np.zeros(problem.x_shape))
    groups = zip(
        _split(problem, dy, 1),
        _split(problem, dx, 1),
        _split(problem, w, 0),
        strict=True,
    )
    for dyg, dxg, wg in groups:
        for tap, window in _taps(problem, dxg):
            window += np.einsum("nk...,kc->nc...", dyg, wg[tap])
    inner = (
        slice(p, p + n)
        for p, n in zip(problem.padding, problem.x_shape[2:], strict=True)
    )
    return dx[(slice(None), slice(None), *inner)]


def _backward_filter(problem, x, dy):
    dw = np.zeros(problem.w_shape)
    groups = zip(
        _split(problem, dw, 0),
        _split(problem, _padded(problem, x), 1),
        _split(problem, dy, 1),
        strict=True,
    )
    for dwg, xg, dyg in groups:
        for tap, window in _taps(problem, xg):
            axes = (0, *range(2, dyg.ndim))
            dwg[tap] += np.tensordot(dyg, window, (axes, axes))
    return dw
