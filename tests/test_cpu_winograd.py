"""What is particular to Winograd; test_cpu_conv.py has the rest."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mucudnn.backends.cpu.conv import winograd
from mucudnn.backends.cpu.conv.winograd_transforms import MINIMAL, TAPS
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction
from tests.conv_problems import conv_problem
from tests.examples import examples
from tests.guarded import run_kernel
from tests.reference import operands, reference, relative_error

ALGORITHM = winograd.WINOGRAD_NONFUSED
CREW = Workers(2)


def run(problem, a, b, before=None, crew=CREW):
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
def problems(draw):
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
    @given(problems(), st.booleans(), st.integers(1, 3))
    def agrees(problem, accumulate, count):
        a, b = operands(problem)
        expected = reference(problem, a, b)
        before = None
        if accumulate:
            shape = problem.operands()[2].shape
            before = np.random.default_rng(1).uniform(-1, 1, shape)
            expected = expected + before
        crew = Workers(count) if count != 2 else CREW
        out = run(problem, a, b, before, crew)
        assert relative_error(out, expected) <= 1e-12

    agrees()


@pytest.mark.parametrize("direction", Direction)
def test_four_by_four_tiles_are_accurate_in_single_precision(direction):
    problem = conv_problem((4, 192, 13, 13), (96, 192, 3, 3), direction, padding=1)
    assert winograd.make_plan(problem, 2).minimal.step == 4
    a, b = operands(problem)
    out = run(problem, a, b)
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
