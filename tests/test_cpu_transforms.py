"""Fourier and Winograd convolutions of the CPU."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from mucudnn.backends.cpu.conv import fft, winograd
from mucudnn.backends.cpu.conv.winograd_transforms import MINIMAL, TAPS
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


ALGORITHM = winograd.WINOGRAD_NONFUSED
CREW = Workers(2)


def run_winograd(problem, a, b, before=None, crew=CREW):
    kernel = ALGORITHM.kernel(problem, crew.count)
    return run_kernel(kernel, crew, problem, a, b, before)


@pytest.fixture(params=itertools.product([2, 4], [0, 1 << 20]))
def only(request, monkeypatch):
    """One tile size only, and cuts so small that every problem has many blocks.

    They are shared by all workers, or each has its own.
    """
    step, own_filter = request.param
    monkeypatch.setattr(winograd, "MINIMAL", {step: MINIMAL[step]})
    monkeypatch.setattr(winograd, "_STRETCH", 2)
    for name in ("_BLOCK_BYTES", "_OWN_BYTES", "_PIECE_BYTES"):
        monkeypatch.setattr(winograd, name, 1 << 12)
    monkeypatch.setattr(winograd, "_OWN_FILTER", own_filter)


@st.composite
def winograd_problems(draw):
    rank = draw(st.sampled_from((1, 2, 3)))
    groups = draw(st.integers(1, 3))
    largest = {1: 40, 2: 14, 3: 6}[rank]
    axes = [
        (draw(st.integers(1, largest)), draw(st.integers(0, 5))) for _ in range(rank)
    ]
    axes = [(max(size, TAPS - 2 * pad), pad) for size, pad in axes]
    c, k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return conv_problem(
        (draw(st.integers(1, 5)), c * groups, *(size for size, _ in axes)),
        (k * groups, c, *[TAPS] * rank),
        draw(st.sampled_from(Direction)),
        padding=[pad for _, pad in axes],
        groups=groups,
        dtype="float64",
        layout=draw(st.sampled_from(["NCHW", "NHWC"])),
    )


@pytest.mark.hypothesis
@pytest.mark.usefixtures("only")
def test_agrees_with_the_reference_however_it_is_cut():
    @examples(80)
    @given(winograd_problems(), st.booleans(), st.integers(1, 3))
    def agrees(problem, accumulate, count):
        a, b = operands(problem)
        expected = reference(problem, a, b)
        before = None
        if accumulate:
            shape = problem.operands()[2].shape
            before = np.random.default_rng(1).uniform(-1, 1, shape)
            expected = expected + before
        crew = Workers(count) if count != 2 else CREW
        out = run_winograd(problem, a, b, before, crew)
        assert relative_error(out, expected) <= 1e-12

    agrees()


@pytest.mark.parametrize("direction", Direction)
def test_four_by_four_tiles_are_accurate_in_single_precision(direction):
    problem = conv_problem((4, 192, 13, 13), (96, 192, 3, 3), direction, padding=1)
    assert winograd.make_plan(problem, 2).minimal.step == 4
    a, b = operands(problem)
    out = run_winograd(problem, a, b)
    error = relative_error(out, reference(problem, a, b))
    assert error <= 3e-5


@pytest.mark.parametrize(
    ("x_size", "m"), [((32, 32), 4), ((4, 4), 2), ((3, 40), 2), ((40, 40, 40), 2)]
)
def test_the_tile_is_the_cheaper_one(x_size, m):
    rank = len(x_size)
    problem = conv_problem((1, 16, *x_size), (16, 16, *[TAPS] * rank))
    assert winograd.make_plan(problem, 2).minimal.step == m


@pytest.mark.parametrize(
    ("channels", "size", "batches", "most"),
    [
        (64, 28, (2, 4, 6, 64), 2 * winograd._OWN_BYTES),
        (256, 28, (1, 2, 4, 64), 2 * winograd._BLOCK_BYTES),
    ],
)
def test_workspace_grows_with_the_micro_batch_up_to_a_block(
    channels, size, batches, most
):
    problem = conv_problem(
        (64, channels, size, size), (channels, channels, 3, 3), padding=1
    )
    sizes = [ALGORITHM.kernel(problem.with_batch(n), 2).nbytes for n in batches]
    assert sizes[0] < sizes[1] < sizes[2] <= sizes[3] < 2 * most


@pytest.mark.parametrize(
    ("channels", "batch", "workers", "crew"),
    [(64, 16, 2, 2), (64, 16, 5, 5), (64, 1, 2, 2), (64, 1, 16, 0), (256, 16, 2, 0)],
)
def test_workers_have_blocks_of_their_own_where_the_filter_is_small(
    channels, batch, workers, crew
):
    problem = conv_problem(
        (batch, channels, 56, 56), (channels, channels, 3, 3), padding=1
    )
    assert winograd.make_plan(problem, workers).crew == crew


def test_allocates_little_however_many_samples_there_are():
    problem = ConvProblem(
        direction=Direction.FORWARD, x_shape=(5000, 2, 5, 5), w_shape=(2, 2, 3, 3)
    )
    a, b = operands(problem)
    out = np.empty(problem.y_shape, problem.dtype)
    kernel = ALGORITHM.kernel(problem, CREW.count)
    workspace = np.empty(kernel.nbytes + 64, np.uint8)
    workspace = workspace[-workspace.ctypes.data % 64 :]
    tracemalloc.start()
    kernel.run((a, b, out), workspace, CREW, False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 10


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("w_shape", (4, 4, 3, 5), "kernel is (3, 5)"),
        ("stride", (1, 2), "stride is (1, 2)"),
        ("dilation", (2, 1), "dilation is (2, 1)"),
    ],
)
def test_says_which_field_it_cannot_run(field, value, reason):
    fields = {"x_shape": (2, 4, 9, 9), "w_shape": (4, 4, 3, 3), field: value}
    problem = ConvProblem(direction=Direction.FORWARD, **fields)
    assert ALGORITHM.excluded(problem).startswith(reason)
