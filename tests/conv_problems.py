"""Random convolutions: every corner of the geometry, in sizes that cost little."""

from hypothesis import strategies as st

from mucudnn import conv1d, conv2d, conv3d, conv_backward_data, conv_backward_filter
from mucudnn.ir.conv import ConvProblem, Direction

_EXTRA = {1: 30, 2: 9, 3: 4}
"""Most positions an axis beyond what the filter needs, by the number of axes."""

_KERNEL = {1: 7, 2: 4, 3: 3}

KINDS = ("any", "pointwise", "depthwise", "unseen", "wide", "winograd")
"""Unseen: all that outputs see of the input is padding. Wide: many input channels."""


@st.composite
def conv_problems(draw, kinds=KINDS, dtypes=("float32", "float64")):
    """Any convolution of 1, 2 or 3 axes, of one of the kinds."""
    kind = draw(st.sampled_from(kinds))
    rank = draw(st.sampled_from([2, 1, 3]))
    groups = 1 if kind == "wide" else draw(st.integers(1, 5))
    least, most = {"depthwise": (1, 1), "wide": (10, 35)}.get(kind, (1, 9))
    channels = draw(st.integers(least, most))
    axes = [draw(_axes(kind, rank)) for _ in range(rank)]
    sizes, kernel, stride, padding, dilation = zip(*axes, strict=True)
    return ConvProblem(
        direction=draw(st.sampled_from(Direction)),
        x_shape=(draw(st.integers(1, 7)), groups * channels, *sizes),
        w_shape=(groups * draw(st.integers(1, 7)), channels, *kernel),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        dtype=draw(st.sampled_from(dtypes)),
        layout=draw(st.sampled_from(["NCHW", "NHWC"])),
    )


@st.composite
def _axes(draw, kind, rank):
    """(size, taps, stride, padding, dilation) of one axis."""
    extra = draw(st.integers(0, _EXTRA[rank]))
    match kind:
        case "pointwise":
            return 1 + extra, 1, 1, 0, 1
        case "unseen":
            size, pad = 1 + draw(st.integers(0, 3)), draw(st.integers(1, 4))
            step = size + pad + draw(st.integers(0, 2))
            dilation = size + pad + draw(st.integers(0, pad - 1))
            return size, draw(st.integers(1, 2)), step, pad, dilation
        case "winograd":
            pad = draw(st.integers(0, 5))
            return max(1, 3 - 2 * pad) + extra, 3, 1, pad, 1
    taps = draw(st.integers(1, _KERNEL[rank]))
    dilation = draw(st.integers(1, 4))
    pad = draw(st.integers(0, 6))
    stride = draw(st.sampled_from([1, 2, 3, 5]))
    return (
        max(1, dilation * (taps - 1) + 1 - 2 * pad) + extra,
        taps,
        stride,
        pad,
        dilation,
    )


def conv_problem(x_shape, w_shape, direction=Direction.FORWARD, **options):
    """A convolution by its shapes, forward unless another direction is named."""
    return ConvProblem(direction=direction, x_shape=x_shape, w_shape=w_shape, **options)


_CONVS = {1: conv1d, 2: conv2d, 3: conv3d}


def call(problem, a, b, **more):
    """The public function for a problem."""
    fields = ("stride", "padding", "dilation", "groups", "layout")
    options = {name: getattr(problem, name) for name in fields} | more
    shape = problem.operands()[2].shape
    match problem.direction:
        case Direction.FORWARD:
            return _CONVS[len(problem.stride)](a, b, **options)
        case Direction.BACKWARD_DATA:
            return conv_backward_data(a, b, shape, **options)
        case Direction.BACKWARD_FILTER:
            return conv_backward_filter(a, b, shape, **options)
