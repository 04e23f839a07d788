"""Pooling in one to three dimensions, by windows cut out one at a time."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.kernel_cases import close, distinct, normal, run, stale


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
