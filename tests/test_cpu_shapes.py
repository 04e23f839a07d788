"""Copies, padding, and enlarging."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.kernel_cases import close, normal, run


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
