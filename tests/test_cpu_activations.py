"""Elementwise operations, biases, products and dropout."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.backends.cpu.kernels.elementwise import erf
from tests.examples import examples
from tests.kernel_cases import close, distinct, normal, numeric_gradient, run, stale


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
