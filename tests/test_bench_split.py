"""Benchmarks of splitting: how batches are searched for, what gradients differ by."""

import numpy as np
import pytest

from bench.papers import tsplit
from bench.split_distance import gradient_distance
from mucudnn.models import unet2d, unet3d
from mucudnn.models.unet import narrow_unet2d, narrow_unet3d


@pytest.mark.parametrize("first", range(len(tsplit.TIMES)))
@pytest.mark.parametrize("most", [0.0, *tsplit.TIMES])
def test_the_largest_multiple_is_found_from_anywhere(first, most):
    tried = []

    def kept(times):
        tried.append(times)
        return times <= most

    assert tsplit._largest(kept, first) == most
    assert len(tried) == len(set(tried)) <= 1 + len(tsplit.TIMES) // 2 + 1


def test_a_gradient_that_is_all_but_zero_has_no_distance_of_its_own():
    """Such as that of a bias ahead of batch norm: rounding, relative to rounding."""
    one = {"gradients": {"w": np.array([3.0, 4.0]), "bias": np.array([1e-17])}}
    other = {"gradients": {"w": np.array([3.0, 4.005]), "bias": np.array([1e-8])}}
    found = gradient_distance(one, other)
    assert found["largest_of"] == "w"
    assert found["largest"] == pytest.approx(1e-3)


def test_narrow_u_nets_are_the_originals_at_their_width():
    assert narrow_unet2d(64)(1) == unet2d(1)
    assert narrow_unet3d(32)(1) == unet3d(1)
    counts = [narrow_unet2d(width)(1).parameter_count for width in (4, 8, 64)]
    assert counts == sorted(counts)
    with pytest.raises(ValueError, match="channels must be at least 1"):
        narrow_unet3d(0)
