"""Shapes by the real library: what it says of an output is what `ConvProblem` says."""

import pytest
from hypothesis import given, strategies as st

from mucudnn.backends.cuda.descriptors import Descriptors, ints
from mucudnn.backends.cuda.libcudnn import (
    ConvolutionMode,
    Cudnn,
    DataType,
    TensorFormat,
)
from mucudnn.errors import BackendError
from mucudnn.ir.conv import ConvProblem, Direction
from tests.cudnn_kernel import strides_of
from tests.examples import examples

pytestmark = pytest.mark.cudnn


@pytest.fixture(scope="module")
def calls(cudnn_library):
    return Cudnn(cudnn_library.cdll)


@st.composite
def convolutions(draw):
    """Keywords of `ConvProblem`, the output's size left to chance (it may be empty)."""
    rank = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 4))

    def per_axis(least, most):
        sizes = st.integers(least, most)
        return tuple(draw(st.lists(sizes, min_size=rank, max_size=rank)))

    batch, c, k = (draw(st.integers(1, 6)) for _ in range(3))
    return {
        "x_shape": (batch, c * groups, *per_axis(1, 40)),
        "w_shape": (k * groups, c, *per_axis(1, 7)),
        "stride": per_axis(1, 4),
        "padding": per_axis(0, 6),
        "dilation": per_axis(1, 4),
        "groups": groups,
    }


def library_says(calls, *, x_shape, w_shape, stride, padding, dilation, groups):
    """The shape of the output; 1-D is given as 2-D, of height 1, as there is no 1-D."""
    if len(x_shape) == 3:
        x_shape, w_shape = ((a, b, 1, c) for a, b, c in (x_shape, w_shape))
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    rank, made = len(x_shape), Descriptors(calls)
    kind, cross = DataType.FLOAT, ConvolutionMode.CROSS_CORRELATION
    x = made.tensor(kind, x_shape, strides_of(x_shape, last=False))
    values = kind, TensorFormat.NCHW, rank, ints(w_shape)
    w = made.create("Filter", "FilterNd", *values)
    axes = map(ints, (padding, stride, dilation))
    values = rank - 2, *axes, cross, kind
    conv = made.create("Convolution", "ConvolutionNd", *values)
    calls.call("cudnnSetConvolutionGroupCount", conv, groups)
    shape = ints([0] * rank)
    calls.call("cudnnGetConvolutionNdForwardOutputDim", conv, x, w, rank, shape)
    return tuple(shape)


def ours(arguments):
    """Our shape of the output, None if it would be empty; 1-D as above."""
    try:
        y = ConvProblem(direction=Direction.FORWARD, **arguments).y_shape
    except ValueError as e:
        if "empty output" not in str(e):
            raise
        return None
    return (*y[:2], 1, *y[2:]) if len(y) == 3 else y


@examples(500)
@given(arguments=convolutions())
def test_the_library_gives_the_same_output(calls, arguments):
    expected = ours(arguments)
    if expected is not None:
        assert library_says(calls, **arguments) == expected
    else:
        with pytest.raises(BackendError):
            library_says(calls, **arguments)


@examples(100)
@given(arguments=convolutions(), more=st.integers(1, 5))
def test_both_refuse_channels_that_do_not_fit(calls, arguments, more):
    n, c, *spatial = arguments["x_shape"]
    arguments["x_shape"] = (n, c + more, *spatial)
    with pytest.raises(ValueError, match="channels"):
        ours(arguments)
    with pytest.raises(BackendError):
        library_says(calls, **arguments)
