"""Views as matrices: what buffers are planned without, kernels must get."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from numpy.lib.stride_tricks import as_strided

from mucudnn.backends.cpu.conv.gemm import (
    IMPLICIT_PRECOMP_GEMM,
    Correlation,
    Scattering,
)
from mucudnn.backends.cpu.conv.im2col import as_matrix, even_shares
from mucudnn.ir.conv import ConvProblem, Direction

MIDDLE = 200
MEMORY = np.arange(2.0 * MIDDLE)


def addresses(sizes, strides):
    """Offsets of every element, in row-major order."""
    return [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, sizes))
    ]


def is_blas_matrix(rows, columns):
    """Whether one leading stride, at least a line long, gives the same addresses."""
    m, n = len(rows), len(columns)

    def by_line(lines, items):
        """Items next to each other; lines apart by any stride that fits them."""
        if items != list(range(len(items))):
            return False
        most = max(len(items), *lines)
        strides = range(len(items), most + 1)
        return any(lines == [i * s for i in range(len(lines))] for s in strides)

    assert m * n > 0
    return by_line(rows, columns) or by_line(columns, rows)


AXES = st.lists(
    st.tuples(st.integers(1, 3), st.integers(-2, 12)), min_size=1, max_size=2
)


@example([(1, 7)], [(3, 4)])  # one row of a channels-last tensor of one channel a group
@example([(1, 7)], [(3, 4), (2, 12)])
@example([(3, 4)], [(1, 7)])
@example([(1, 5)], [(1, 5)])
@given(AXES, AXES)
def test_a_view_is_a_matrix_exactly_where_blas_can_read_it(rows, columns):
    sizes, strides = zip(*rows, *columns, strict=True)
    item = MEMORY.itemsize
    view = as_strided(
        MEMORY[MIDDLE:], (2, *sizes), (item, *(s * item for s in strides))
    )
    matrix = as_matrix(view, len(rows), len(columns))
    at = [addresses(*zip(*axes, strict=True)) for axes in (rows, columns)]
    assert (matrix is not None) == is_blas_matrix(*at)
    if matrix is not None:
        m, n = (math.prod(size for size, _ in axes) for axes in (rows, columns))
        np.testing.assert_array_equal(matrix, view.reshape(2, m, n))
        flipped = matrix if matrix.strides[2] == item else matrix.swapaxes(1, 2)
        assert flipped.strides[2] == item
        assert flipped.strides[1] >= flipped.shape[2] * item


@given(st.integers(0, 10000), st.integers(1, 3000))
def test_tiles_of_a_share_are_as_few_and_as_equal_as_they_can_be(share, most):
    tile = even_shares(share, most)
    assert tile <= min(share, most)
    if share:
        count = -(-share // tile)
        assert count == -(-share // most)
        assert tile * count - share < count


@pytest.mark.parametrize(
    ("kernel", "stride", "groups", "kind"),
    [
        (3, 2, 1, Scattering),
        (3, 1, 1, Correlation),
        (1, 2, 1, Correlation),
        (2, 2, 1, Correlation),
        (3, 2, 2, Correlation),
    ],
)
def test_patches_of_backward_data_are_added_up_where_a_stride_makes_them_overlap(
    kernel, stride, groups, kind
):
    problem = ConvProblem(
        direction=Direction.BACKWARD_DATA,
        x_shape=(2, 32 * groups, 9, 9),
        w_shape=(8 * groups, 32, kernel, kernel),
        stride=stride,
        groups=groups,
    )
    assert isinstance(IMPLICIT_PRECOMP_GEMM.kernel(problem, 2), kind)
