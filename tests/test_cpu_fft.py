"""The Fourier-domain convolutions: geometry, transforms and what they exclude."""

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from mucudnn.backends.cpu.conv import fft
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction
from tests.conv_problems import conv_problem
from tests.examples import examples
from tests.guarded import run_kernel
from tests.reference import operands, reference, relative_error

BOTH = pytest.mark.parametrize(
    "algorithm", [fft.FFT, fft.FFT_TILING], ids=lambda a: a.name
)

WORKERS = {count: Workers(count) for count in (1, 2, 3)}


def run(algorithm, problem, a, b, count=2):
    kernel = algorithm.kernel(problem, count)
    return run_kernel(kernel, WORKERS[count], problem, a, b)


@st.composite
def problems(draw):
    rank = draw(st.sampled_from([1, 1, 2, 2, 2, 3]))
    groups = draw(st.integers(1, 3))
    channels = draw(st.integers(1, 4))

    def axis(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    try:
        return conv_problem(
            (
                draw(st.integers(1, 4)),
                groups * channels,
                *axis(1, {1: 90, 2: 45, 3: 20}[rank]),
            ),
            (groups * draw(st.integers(1, 4)), channels, *axis(1, 5)),
            draw(st.sampled_from(Direction)),
            stride=axis(1, 4),
            padding=axis(0, 7),
            dilation=axis(1, 4),
            groups=groups,
            dtype="float64",
            layout=draw(st.sampled_from(["NCHW", "NHWC"])),
        )
    except ValueError:
        assume(False)


def fits_a_tile(problem):
    """Whether the filter and the step to the next output lie within a tile."""
    points = {1: 32, 2: 32, 3: 16}[len(problem.stride)]
    return all(
        dil * (taps - 1) + step <= points
        for taps, step, dil in zip(
            problem.w_shape[2:], problem.stride, problem.dilation, strict=True
        )
    )


@BOTH
@examples(120)
@given(problem=problems(), count=st.sampled_from(sorted(WORKERS)))
def test_any_geometry(algorithm, problem, count):
    excluded = algorithm.excluded(problem) is not None
    assert excluded == (algorithm is fft.FFT_TILING and not fits_a_tile(problem))
    assume(not excluded)
    a, b = operands(problem)
    out = run(algorithm, problem, a, b, count)
    expected = reference(problem, a, b)
    scale = max(np.abs(expected).max(), 1)  # if nothing meets but padding, noise stays
    assert np.abs(out - expected).max() <= 1e-12 * scale


HARD = {
    "filter_fills_a_tile": {"x_shape": (1, 2, 37, 45), "w_shape": (2, 2, 32, 32)},
    "tiles_in_the_padding": {
        "x_shape": (2, 2, 3, 40),
        "w_shape": (3, 2, 3, 3),
        "padding": (70, 33),
    },
    "stride_of_almost_a_tile": {
        "x_shape": (2, 3, 100, 90),
        "w_shape": (2, 3, 2, 3),
        "stride": (31, 29),
    },
    "more_rows_than_are_combined_at_once": {
        "x_shape": (100, 3, 70, 33),
        "w_shape": (4, 3, 3, 3),
    },
    "volume_of_several_tiles": {
        "x_shape": (2, 2, 18, 17, 33),
        "w_shape": (3, 2, 3, 2, 5),
        "padding": (1, 0, 2),
    },
    "fewer_points_than_pairs": {"x_shape": (2, 3, 1, 2), "w_shape": (2, 3, 1, 1)},
    "channels_cut_into_chunks": {"x_shape": (1, 70, 60, 60), "w_shape": (3, 70, 3, 3)},
}


@BOTH
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("case", HARD)
def test_hard_geometry(algorithm, case, direction, layout):
    problem = ConvProblem(direction=direction, layout=layout, **HARD[case])
    assert algorithm.excluded(problem) is None
    a, b = operands(problem)
    out = run(algorithm, problem, a, b)
    assert relative_error(out, reference(problem, a, b)) <= 5e-6


def test_an_image_too_long_for_one_transform_is_left_to_the_tiles():
    problem = ConvProblem(
        direction=Direction.FORWARD, x_shape=(1, 2, 9, 600), w_shape=(2, 2, 3, 3)
    )
    reason = fft.FFT.excluded(problem)
    assert reason is not None
    assert "spatial axis 1" in reason
    assert "600 points" in reason
    assert fft.FFT_TILING.excluded(problem) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"w_shape": (2, 2, 3, 33)}, "axis 1 the filter spans 33"),
        ({"w_shape": (2, 2, 3, 3), "dilation": (16, 1)}, "axis 0 the filter spans 33"),
        ({"w_shape": (2, 2, 3, 3), "stride": 31}, "at a stride of 31"),
    ],
)
def test_a_filter_without_room_in_a_tile_is_excluded(fields, words):
    problem = ConvProblem(direction=Direction.FORWARD, x_shape=(1, 2, 64, 64), **fields)
    reason = fft.FFT_TILING.excluded(problem)
    assert reason is not None
    assert words in reason
    assert fft.FFT.excluded(problem) is None
