"""Kernels of the CPU backend, against formulas and finite differences."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.backends.cpu.kernels.elementwise import erf
from tests.examples import examples
from tests.kernel_cases import (
    ADAM,
    DECAYED,
    PLAIN,
    close,
    distinct,
    normal,
    numeric_gradient,
    run,
    stale,
)


def test_erf_is_exact_in_float64_and_fine_in_float32():
    x = np.linspace(-8, 8, 20001)
    exact = np.array([math.erf(v) for v in x])
    assert np.abs(erf(x) - exact).max() < 1e-15
    single = x.astype(np.float32)
    exact = np.array([math.erf(v) for v in single])
    assert np.abs(erf(single) - exact).max() < 5e-7
    assert erf(np.array([np.inf, -np.inf])).tolist() == [1, -1]
    assert np.isnan(erf(np.array([np.nan]))).all()


FORWARD = {
    "relu": ({}, lambda x: max(x, 0.0)),
    "leaky_relu": ({"slope": 0.1}, lambda x: x if x > 0 else 0.1 * x),
    "gelu": ({}, lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
    "sigmoid": ({}, lambda x: 1 / (1 + math.exp(-x))),
    "tanh": ({}, math.tanh),
    "scale": ({"factor": -1.5}, lambda x: -1.5 * x),
    "identity": ({}, lambda x: x),
}


@pytest.mark.parametrize("op", FORWARD)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("f8", 1e-14), ("f4", 2e-6)])
def test_functions_of_one_element(op, in_place, dtype, tolerance):
    attrs, formula = FORWARD[op]
    x = normal(3, 7, 41, dtype=dtype) * 2
    expected = np.vectorize(formula, otypes=[float])(x.astype(float))
    (y,) = run(op, [x], [x if in_place else (x.shape, dtype)], attrs)
    close(y, expected, tolerance)


@pytest.mark.parametrize("op", ["relu", "leaky_relu", "gelu", "sigmoid", "tanh"])
@pytest.mark.parametrize("in_place", [False, True])
def test_their_gradients(op, in_place):
    attrs, _ = FORWARD[op]
    x, dy = distinct(5, 13), normal(5, 13, seed=1)
    (y,) = run(op, [x], [(x.shape,)], attrs)
    known = x if op == "gelu" else y

    def loss():
        return float((run(op, [x], [(x.shape,)], attrs)[0] * dy).sum())

    expected = numeric_gradient(loss, x)
    target = dy.copy() if in_place else stale(x.shape)
    given_dy = target if in_place else dy
    (dx,) = run(f"{op}_grad", [known, given_dy], [target], attrs)
    close(dx, expected, 1e-8)


@pytest.mark.filterwarnings("error")
def test_functions_at_their_limits():
    x = np.array([-np.inf, -1e4, -0.0, 0.0, 1e4, np.inf])
    (y,) = run("sigmoid", [x], [(6,)])
    close(y, [0, 0, 0.5, 0.5, 1, 1])
    (dx,) = run(
        "relu_grad", [np.array([-0.0, 0.0, 1, np.nan]), np.full(4, np.inf)], [(4,)]
    )
    assert dx.tolist() == [0, 0, np.inf, np.inf]
    (y,) = run("relu", [np.array([np.nan, -np.inf])], [(2,)])
    assert np.isnan(y[0])
    assert y[1] == 0


@pytest.mark.parametrize("place", [None, 0, 1])
def test_sum_and_product(place):
    for op, ufunc in (("add", np.add), ("multiply", np.multiply)):
        pair = [normal(2, 3, 5), normal(2, 3, 5, seed=1)]
        expected = ufunc(*pair)
        target = (2, 3, 5), "f8"
        (y,) = run(op, pair, [target if place is None else pair[place]])
        assert np.array_equal(y, expected)


# Linear.


@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.lists(st.integers(1, 6), max_size=3),
    st.booleans(),
)
def test_bias(N, C, spatial, in_place):
    x, b = normal(N, C, *spatial), normal(C, seed=1)
    expected = x + b.reshape(-1, *[1] * len(spatial))
    (y,) = run("bias", [x, b], [x if in_place else (expected.shape,)])
    assert np.array_equal(y, expected)
    (db,) = run("bias_grad", [expected], [(C,)])
    close(db, expected.sum(axis=(0, *range(2, x.ndim))))


@given(
    st.integers(1, 150),
    st.integers(1, 150),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
)
@examples(40)
def test_matmul(M, N, K, turn_a, turn_b):
    a, b = normal(M, K), normal(K, N, seed=1)
    given_a = np.ascontiguousarray(a.T) if turn_a else a
    given_b = np.ascontiguousarray(b.T) if turn_b else b
    attrs = {"transpose_a": turn_a, "transpose_b": turn_b}
    (y,) = run("matmul", [given_a, given_b], [((M, N),)], attrs)
    close(y, np.einsum("mk,kn->mn", a, b))


# Dropout.


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_keeps_a_share_and_scales_it(p):
    x = np.ones((3, 100, 1001))
    attrs = {"p": p, "seed": 7}
    (y,) = run("dropout", [x, np.array(2)], [(x.shape,)], attrs)
    kept = y != 0
    assert abs(kept.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / x.size) + 1e-5
    if p < 1:
        close(y[kept], 1 / (1 - p))


def test_dropout_is_a_function_of_seed_step_and_position():
    def mask(seed, step, size=200_000, target=None):
        x = np.ones(size)
        outputs = [x if target else (x.shape,)]
        return (
            run("dropout", [x, np.array(step)], outputs, {"p": 0.5, "seed": seed})[0]
            > 0
        )

    once = mask(1, 5)
    assert np.array_equal(once, mask(1, 5, target="in place"))
    assert np.array_equal(once[:70_000], mask(1, 5, size=70_000))
    for other in (mask(2, 5), mask(1, 6), np.roll(once, 65536), np.roll(once, 1)):
        assert abs((once == other).mean() - 0.5) < 0.01


# Copies, padding, and enlarging.


def test_copies():
    x = normal(2, 3, 5, 4)
    (y,) = run("cast", [x], [(x.shape, "f4")])
    assert np.array_equal(y, x.astype("f4"))
    (y,) = run("fill", [], [((3, 4),)], {"value": 2.5})
    assert (y == 2.5).all()
    (y,) = run("fill", [], [((),)], {"value": 1})
    assert y == 1
    for axis in range(4):
        (y,) = run(
            "concat", [x, x * 2], [np.concatenate([x, x], axis) * 0], {"axis": axis}
        )
        assert np.array_equal(y, np.concatenate([x, x * 2], axis))
    attrs = {"starts": (0, 1, 2, 0), "stops": (2, 3, 4, 4)}
    (y,) = run("slice", [x], [((2, 2, 2, 4),)], attrs)
    assert np.array_equal(y, x[:2, 1:3, 2:4, :4])


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 2), min_size=4, max_size=4))
def test_pad(widths):
    x = normal(2, 3, 4, 2)
    before, after = zip(*widths, strict=True)
    expected = np.pad(x, widths)
    (y,) = run("pad", [x], [(expected.shape,)], {"before": before, "after": after})
    assert np.array_equal(y, expected)


SCALES = [((5,), (2,)), ((4, 3), (2, 3)), ((1, 6), (4, 1)), ((2, 3, 2), (2, 2, 2))]


@pytest.mark.parametrize(("spatial", "scale"), SCALES)
def test_upsample(spatial, scale):
    x = normal(2, 3, *spatial)
    large = (2, 3, *(n * s for n, s in zip(spatial, scale, strict=True)))
    (near,) = run("upsample_nearest", [x], [(large,)], {"scale": scale})
    expected, linear = x, x
    for axis, s in enumerate(scale, 2):
        expected = expected.repeat(s, axis)
        n = x.shape[axis]
        where = np.clip((np.arange(n * s) + 0.5) / s - 0.5, 0, n - 1)
        linear = np.apply_along_axis(
            lambda v, n=n, where=where: np.interp(where, np.arange(n), v), axis, linear
        )
    assert np.array_equal(near, expected)
    (smooth,) = run("upsample_bilinear", [x], [(large,)], {"scale": scale})
    close(smooth, linear)
    dy = normal(*large, seed=1)
    for kind, y in (("nearest", near), ("bilinear", smooth)):
        (dx,) = run(f"upsample_{kind}_grad", [dy], [(x.shape,)], {"scale": scale})
        probe = normal(*x.shape, seed=2)
        (image,) = run(f"upsample_{kind}", [probe], [(large,)], {"scale": scale})
        close((dx * probe).sum(), (dy * image).sum())  # linear: adjoint is gradient
        assert y.shape == large


@st.composite
def pools(draw):
    """(image, attributes, output) with windows that may reach over the end."""
    rank = draw(st.integers(1, 3))
    axes = []
    for _ in range(rank):
        kernel = draw(st.integers(1, 4))
        stride = draw(st.integers(1, 4))
        padding = draw(st.integers(0, kernel // 2))
        size = draw(st.integers(max(1, kernel - 2 * padding), 9))
        rest = (size + 2 * padding - kernel) % stride
        extra = draw(st.sampled_from([0, stride - rest])) if rest else 0
        last = (size + 2 * padding + extra - kernel) // stride
        if last * stride >= size + padding:  # no window begins beyond the image
            extra = 0
        axes.append((size, kernel, stride, padding, extra))
    sizes, kernels, strides, paddings, extras = (
        tuple(int(v) for v in values) for values in zip(*axes, strict=True)
    )
    out = tuple(
        (n + 2 * p + e - k) // s + 1
        for n, k, s, p, e in zip(sizes, kernels, strides, paddings, extras, strict=True)
    )
    attrs = {
        "kernel": kernels,
        "stride": strides,
        "padding": paddings,
        "extra": extras,
        "count_include_pad": draw(st.booleans()),
    }
    return sizes, attrs, out


def windows(sizes, attrs, out):
    """(place of the output, element of the window, place in the image or None)."""
    for place in np.ndindex(out):
        for number, tap in enumerate(np.ndindex(attrs["kernel"])):
            where = tuple(
                o * s + t - p
                for o, s, t, p in zip(
                    place, attrs["stride"], tap, attrs["padding"], strict=True
                )
            )
            inside = all(0 <= w < n for w, n in zip(where, sizes, strict=True))
            padded = all(
                -p <= w < n + p
                for w, n, p in zip(where, sizes, attrs["padding"], strict=True)
            )
            yield place, number, where if inside else None, padded


@given(pools(), st.integers(1, 3), st.booleans())
def test_max_pool(case, planes, ties):
    sizes, attrs, out = case
    x = distinct(planes, 1, *sizes)
    if ties:
        x = np.sign(x)
    best = np.full((planes, 1, *out), -np.inf)
    which = np.zeros(best.shape, np.uint8)
    dx, dy = np.zeros_like(x), normal(*best.shape)
    origin = {}
    for place, number, where, _ in windows(sizes, attrs, out):
        if where is None:
            continue
        for n in range(planes):
            if x[(n, 0, *where)] > best[(n, 0, *place)]:
                best[(n, 0, *place)] = x[(n, 0, *where)]
                which[(n, 0, *place)] = number
                origin[(n, 0, *place)] = (n, 0, *where)
    for place, where in origin.items():
        dx[where] += dy[place]
    y, index = run("max_pool", [x], [(best.shape,), (best.shape, np.uint8)], attrs)
    assert np.array_equal(y, best)
    assert np.array_equal(index, which)
    (actual,) = run("max_pool_grad", [dy, index], [(x.shape,)], attrs)
    close(actual, dx)


@given(pools(), st.integers(1, 3))
def test_avg_pool(case, planes):
    sizes, attrs, out = case
    x, dy = normal(1, planes, *sizes), normal(1, planes, *out, seed=1)
    total, dx = np.zeros(dy.shape), np.zeros(x.shape)
    count = np.zeros(out)
    members = []
    for place, _, where, padded in windows(sizes, attrs, out):
        count[place] += padded if attrs["count_include_pad"] else where is not None
        if where is not None:
            members.append((place, where))
    for place, where in members:
        total[(0, slice(None), *place)] += x[(0, slice(None), *where)]
        dx[(0, slice(None), *where)] += dy[(0, slice(None), *place)] / count[place]
    (y,) = run("avg_pool", [x], [(dy.shape,)], attrs)
    close(y, total / count)
    (actual,) = run("avg_pool_grad", [dy], [(x.shape,)], attrs)
    close(actual, dx)


@pytest.mark.parametrize("spatial", [(40000,), (300, 170), (5, 130, 150)])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 2, 1), (2, 2, 0), (3, 1, 1)]
)
def test_images_larger_than_a_tile(spatial, kernel, stride, padding):
    """Tiles meet without a seam: shifted images of infinite padding agree."""
    rank = len(spatial)
    x = distinct(2, 3, *spatial)
    out = tuple((n + 2 * padding - kernel) // stride + 1 for n in spatial)
    attrs = {
        "kernel": (kernel,) * rank,
        "stride": (stride,) * rank,
        "padding": (padding,) * rank,
        "extra": (0,) * rank,
        "count_include_pad": True,
    }
    margins = [(0, 0)] * 2 + [(padding, padding + stride)] * rank
    wide = np.pad(x, margins, constant_values=-np.inf)
    taps = [
        wide[
            (
                ...,
                *(
                    slice(t, t + stride * n, stride)
                    for t, n in zip(tap, out, strict=True)
                ),
            )
        ]
        for tap in itertools.product(range(kernel), repeat=rank)
    ]
    taps = [tap[(..., *(slice(0, n) for n in out))] for tap in taps]
    y, index = run(
        "max_pool", [x], [(taps[0].shape,), (taps[0].shape, np.uint8)], attrs
    )
    assert np.array_equal(y, np.max(taps, axis=0))
    assert np.array_equal(index, np.argmax(taps, axis=0))
    dy = normal(*y.shape)
    (dx,) = run("max_pool_grad", [dy, index], [(x.shape,)], attrs)
    assert math.isclose((dx * x).sum(), (dy * y).sum(), rel_tol=1e-9)
    (mean,) = run("avg_pool", [x], [(y.shape,)], attrs)
    finite = [np.where(np.isinf(tap), 0, tap) for tap in taps]
    close(mean, sum(finite) / kernel**rank)
    (dx,) = run("avg_pool_grad", [dy], [(x.shape,)], attrs)
    assert math.isclose((dx * x).sum(), (dy * mean).sum(), rel_tol=1e-9)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_numbers_that_are_none_stay_inside_the_image(value):
    x = np.full((1, 2, 5, 6), value)
    x[0, 1, 1, 1] = 3.0
    attrs = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "extra": (0, 1)}
    shape = (1, 2, 3, 4)
    y, index = run("max_pool", [x], [(shape,), (shape, np.uint8)], attrs)
    if np.isnan(value):
        assert np.isnan(y).all()
    else:
        assert (y[0, 1, :2, :2] == 3).all()
        assert (y[0, 0] == value).all()
    assert index[0, 0, :, 0].tolist() == [4, 1, 1]
    assert index[0, 0, 0].tolist() == [4, 3, 3, 3]
    (dx,) = run("max_pool_grad", [np.ones(shape), index], [stale(x.shape)], attrs)
    assert dx[0, 0].sum() == dx[0, 1].sum() == 12


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


@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 6), (2, 3, 50, 70), (2, 70000)])
def test_softmax_cross_entropy(shape):
    x = normal(*shape) * 5 + 1000
    labels = np.random.default_rng(1).integers(0, shape[1], (shape[0], *shape[2:]))
    loss, p = run("softmax_cross_entropy", [x, labels], [((),), (shape,)])
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    expected = weights / weights.sum(axis=1, keepdims=True)
    close(np.exp(p), expected)
    right = np.take_along_axis(expected, labels[:, None], axis=1)
    close(loss, -np.log(right).mean())
    onehot = np.zeros(shape)
    np.put_along_axis(onehot, labels[:, None], 1, axis=1)
    for target in (stale(shape), p):
        inputs = [p, labels, np.array(3.0)]
        (dx,) = run("softmax_cross_entropy_grad", inputs, [target])
        close(dx, (expected - onehot) * 3 / labels.size)


def test_labels_that_are_no_classes():
    x = normal(3, 4)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=f"label {wrong} is not a class"):
            run(
                "softmax_cross_entropy",
                [x, np.array([0, wrong, 1])],
                [((),), ((3, 4),)],
            )


def test_mean_squared_error():
    a, b = normal(3, 4, 50, 60), normal(3, 4, 50, 60, seed=1)
    (loss,) = run("mean_squared_error", [a, b], [((),)])
    close(loss, ((a - b) ** 2).mean())
    (da,) = run("mean_squared_error_grad", [a, b, np.array(0.5)], [(a.shape,)])
    close(da, (a - b) / a.size)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.data())
def test_accuracy(N, C, S, data):
    values = st.integers(0, 3)
    x = np.array(
        data.draw(st.lists(values, min_size=N * C * S, max_size=N * C * S)), float
    ).reshape(N, C, S)
    labels = np.array(
        data.draw(st.lists(st.integers(0, C - 1), min_size=N * S, max_size=N * S))
    ).reshape(N, S)
    k = data.draw(st.integers(1, C))
    (count,) = run("accuracy", [x, labels], [((), "i8")], {"k": k})
    expected = sum(
        sum(x[n, :, s] > x[n, labels[n, s], s]) < k for n in range(N) for s in range(S)
    )
    assert count == expected


# Updates.


def weights(seed=0):
    return normal(70, 11, seed=seed), normal(70, 11, seed=seed + 1)


@pytest.mark.parametrize("common", [PLAIN, DECAYED])
def test_updates(common):
    w, dw = weights()
    lr = np.array(0.1)
    g = dw * common["gradient_scale"] + w * common["weight_decay"]
    state = np.abs(normal(70, 11, seed=5))

    def after(op, *more, **attrs):
        changed = w.copy()
        arrays = [v.copy() if v.ndim else v for v in more]
        run(op, [changed, dw, lr, *arrays], [], common | attrs)
        return changed, *arrays

    close(after("sgd")[0], w - 0.1 * g)
    m = 0.9 * state + g
    for nesterov, step in ((False, m), (True, g + 0.9 * m)):
        new = after("momentum", state, momentum=0.9, nesterov=nesterov)
        close(new[0], w - 0.1 * step)
        close(new[1], m)
    new = after("adagrad", state, eps=1e-3)
    close(new[1], state + g * g)
    close(new[0], w - 0.1 * g / (np.sqrt(new[1]) + 1e-3))
    new = after("rmsprop", state, eps=1e-3, alpha=0.9)
    close(new[1], 0.9 * state + 0.1 * g * g)
    close(new[0], w - 0.1 * g / (np.sqrt(new[1]) + 1e-3))


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam(decoupled):
    w, dw = weights()
    m, v = normal(70, 11, seed=4), np.abs(normal(70, 11, seed=5))
    attrs = ADAM | DECAYED | {"decoupled": decoupled}
    g = dw * 0.5 + (0 if decoupled else 0.01 * w)
    new_m, new_v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    base = w * (1 - 0.1 * 0.01) if decoupled else w
    unbiased = new_m / (1 - 0.9**4), new_v / (1 - 0.99**4)
    expected = base - 0.1 * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
    run("adam", [w, dw, np.array(0.1), np.array(3), m, v], [], attrs)
    close(w, expected)
    close(m, new_m)
    close(v, new_v)


def test_accumulate():
    total, part = weights()
    expected = total + 0.25 * part
    run("accumulate", [total, part], [], {"factor": 0.25})
    close(total, expected)
