"""Normalisations against their formulas, and their gradients by differences."""

import numpy as np
import pytest

from tests.kernel_cases import close, normal, numeric_gradient, run, stale


def standardised(x, axes, eps):
    mean = x.mean(axis=axes, keepdims=True)
    var = ((x - mean) ** 2).mean(axis=axes, keepdims=True)
    return (x - mean) / np.sqrt(var + eps), mean, 1 / np.sqrt(var + eps)


def per_channel(v, x):
    return v.reshape(-1, *[1] * (x.ndim - 2))


SHAPES = [(6, 5), (4, 3, 7), (3, 19, 5, 4), (2, 4, 3, 2, 5), (200, 3, 30, 40)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("update", [False, True])
def test_batch_norm(shape, update):
    x = normal(*shape) * 3 + 2
    gamma, beta, running_mean, running_var = (
        normal(shape[1], seed=i) for i in range(4)
    )
    before = running_mean.copy(), running_var.copy()
    axes = (0, *range(2, len(shape)))
    attrs = {"eps": 1e-3, "momentum": 0.2, "update": update}
    inputs = [x, gamma, beta, running_mean, running_var]
    outputs = [(shape,), (shape[1:2],), (shape[1:2],)]
    y, mean, inv_std = run("batch_norm", inputs, outputs, attrs)
    normed, centre, inverse = standardised(x, axes, 1e-3)
    close(y, normed * per_channel(gamma, x) + per_channel(beta, x))
    close(mean, centre.ravel())
    close(inv_std, inverse.ravel())
    if update:
        close(running_mean, 0.8 * before[0] + 0.2 * x.mean(axis=axes))
        close(running_var, 0.8 * before[1] + 0.2 * x.var(axis=axes, ddof=1))
    else:
        assert np.array_equal(running_mean, before[0])
        assert np.array_equal(running_var, before[1])
    running_var[...] = np.abs(running_var)
    (y,) = run("batch_norm_eval", inputs, [(shape,)], {"eps": 1e-3})
    scale = gamma / np.sqrt(running_var + 1e-3)
    close(
        y,
        (x - per_channel(running_mean, x)) * per_channel(scale, x)
        + per_channel(beta, x),
    )


@pytest.mark.parametrize("offset", [0, 1e3])
def test_batch_norm_of_float32_far_from_zero(offset):
    x = normal(8, 3, 40, 41, dtype="f4") + np.float32(offset)
    ones, zeros = np.ones(3, "f4"), np.zeros(3, "f4")
    attrs = {"eps": 1e-5, "momentum": 0.1, "update": False}
    outputs = [(x.shape, "f4"), ((3,), "f4"), ((3,), "f4")]
    y, mean, inv_std = run("batch_norm", [x, ones, zeros, zeros, ones], outputs, attrs)
    exact, centre, inverse = standardised(x.astype(float), (0, 2, 3), 1e-5)
    np.testing.assert_allclose(mean, centre.ravel(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(inv_std, inverse.ravel(), rtol=2e-6)
    assert np.abs(y - exact).max() < max(5e-6, offset * 1e-7)


@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 7), (3, 4, 3, 2)])
@pytest.mark.parametrize("in_place", [False, True])
def test_batch_norm_grad(shape, in_place):
    C = shape[1]
    x, dy = normal(*shape) + 1, normal(*shape, seed=1)
    gamma, beta = normal(C, seed=2), normal(C, seed=3)
    attrs = {"eps": 1e-3, "momentum": 0.1, "update": False}
    state = [np.zeros(C), np.ones(C)]

    def forward():
        outputs = [(shape,), ((C,),), ((C,),)]
        return run("batch_norm", [x, gamma, beta, *state], outputs, attrs)

    def loss():
        return float((forward()[0] * dy).sum())

    expected = [numeric_gradient(loss, v) for v in (x, gamma, beta)]
    _, mean, inv_std = forward()
    target = dy if in_place else stale(shape)
    inputs = [x, dy, gamma, mean, inv_std]
    actual = run("batch_norm_grad", inputs, [target, ((C,),), ((C,),)])
    for a, e in zip(actual, expected, strict=True):
        close(a, e, 1e-7)


GROUPED = [
    ((3, 6, 4, 5), 3, False),
    ((3, 6, 4, 5), 1, True),
    ((2, 6), 2, False),
    ((5, 7), 1, True),
    ((2, 4, 9), 4, False),
    ((2, 4, 3, 2, 2), 2, True),
]


def grouped(shape, groups, eps, per_element, x):
    """What a group norm computes of `x`, what it should, and what is known besides."""
    wide = shape[1:] if per_element else shape[1:2]
    gamma, beta = normal(*wide, seed=2), normal(*wide, seed=3)
    attrs = {"groups": groups, "eps": eps, "per_element": per_element}
    small = ((shape[0], groups),)

    def forward():
        return run("group_norm", [x, gamma, beta], [(shape,), small, small], attrs)

    normed, centre, inverse = standardised(x.reshape(shape[0], groups, -1), (2,), eps)
    g, b = (
        (gamma, beta) if per_element else (per_channel(gamma, x), per_channel(beta, x))
    )
    y, mean, inv_std = forward()
    close(y, normed.reshape(shape) * g + b)
    close(mean, centre[..., 0])
    close(inv_std, inverse[..., 0])
    return forward, attrs, (gamma, beta), g, normed, inverse, (mean, inv_std)


@pytest.mark.parametrize(("shape", "groups", "per_element"), GROUPED)
@pytest.mark.parametrize("in_place", [False, True])
def test_group_norm_and_its_gradient(shape, groups, per_element, in_place):
    x, dy = normal(*shape) * 2 + 1, normal(*shape, seed=1)
    forward, attrs, weights, _, _, _, known = grouped(
        shape, groups, 1e-3, per_element, x
    )
    gamma, beta = weights

    def loss():
        return float((forward()[0] * dy).sum())

    expected = [numeric_gradient(loss, v) for v in (x, gamma, beta)]
    outputs = [dy if in_place else (shape,), (gamma.shape,), (gamma.shape,)]
    actual = run("group_norm_grad", [x, dy, gamma, *known], outputs, attrs)
    for a, e in zip(actual, expected, strict=True):
        close(a, e, 1e-7)


@pytest.mark.parametrize(
    "shape", [(2, 40, 100, 90), (300, 600), (3, 2, 40000), (1200, 50, 7)]
)
@pytest.mark.parametrize("per_element", [False, True])
def test_group_norm_in_tiles(shape, per_element):
    """Large enough for every way to divide the work."""
    x, dy = normal(*shape), normal(*shape, seed=1)
    _, attrs, (gamma, _), g, normed, inverse, known = grouped(
        shape, 2, 1e-5, per_element, x
    )
    outputs = [(shape,), (gamma.shape,), (gamma.shape,)]
    inputs = [x, dy, gamma, *known]
    dx, dgamma, dbeta = run("group_norm_grad", inputs, outputs, attrs)
    xhat = normed.reshape(shape)
    axes = (0,) if per_element else (0, *range(2, len(shape)))
    close(dgamma, (dy * xhat).sum(axis=axes), 1e-9)
    close(dbeta, dy.sum(axis=axes), 1e-9)
    weighted = (dy * g).reshape(normed.shape)
    mean_of = weighted.mean(axis=2, keepdims=True)
    along = (weighted * normed).mean(axis=2, keepdims=True)
    close(dx.reshape(normed.shape), inverse * (weighted - mean_of - normed * along))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("beta", [0.75, 0.5, 1.0, 0.6])
def test_lrn(size, beta):
    x = normal(2, 6, 3, 3)
    attrs = {"size": size, "alpha": 0.3, "beta": beta, "k": 1.5}
    (y,) = run("lrn", [x], [(x.shape,)], attrs)
    for c in range(6):
        near = x[:, max(0, c - size // 2) : c + (size - 1) // 2 + 1] ** 2
        close(y[:, c], x[:, c] / (1.5 + 0.3 / size * near.sum(axis=1)) ** beta)


@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("in_place", [False, True])
def test_lrn_grad(size, in_place):
    x, dy = normal(2, 6, 2, 2), normal(2, 6, 2, 2, seed=1)
    attrs = {"size": size, "alpha": 0.3, "beta": 0.75, "k": 1.5}

    def loss():
        return float((run("lrn", [x], [(x.shape,)], attrs)[0] * dy).sum())

    expected = numeric_gradient(loss, x)
    (y,) = run("lrn", [x], [(x.shape,)], attrs)
    target = dy if in_place else stale(x.shape)
    (dx,) = run("lrn_grad", [x, y, dy], [target], attrs)
    close(dx, expected, 1e-8)
