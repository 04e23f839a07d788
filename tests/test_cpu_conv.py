"""Every algorithm of the CPU library against float64, inside its workspace.

`test_cpu_conv_any.py` has any geometry, float64 and `accumulate`; sizes here are those
that random problems do not have.
"""

import gc
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from mucudnn.backends.cpu.conv import ALGORITHMS, CpuConv
from mucudnn.backends.cpu.threads import Workers
from mucudnn.errors import BackendError, UnsupportedError
from mucudnn.ir.conv import ConvProblem, Direction
from tests.guarded import run_guarded
from tests.reference import operands, reference, relative_error

TOLERANCE = {
    "IMPLICIT_GEMM": 2e-5,
    "IMPLICIT_PRECOMP_GEMM": 2e-5,
    "GEMM": 2e-5,
    "FFT": 1e-4,
    "FFT_TILING": 1e-4,
    "WINOGRAD_NONFUSED": 1e-4,
}

WINOGRAD = {
    *("padded", "groups", "depthwise", "large", "long_reduction", "three_d"),
    *("alexnet_conv3", "large_depthwise", "volume"),
}
"""The cases below that all six algorithms run; the others are all but Winograd's."""


def sizes(x_shape, w_shape, **options):
    return {"x_shape": x_shape, "w_shape": w_shape, **options}


CASES = {
    "padded": sizes((3, 4, 9, 8), (6, 4, 3, 3), padding=1),
    "five": sizes((2, 3, 13, 11), (7, 3, 5, 5), padding=(2, 1)),
    "stride": sizes((3, 3, 11, 10), (4, 3, 3, 3), stride=2, padding=1),
    "groups": sizes((3, 6, 9, 9), (9, 2, 3, 3), groups=3, padding=1),
    "one_by_one": sizes((3, 8, 6, 7), (5, 8, 1, 1)),
    "depthwise": sizes((3, 8, 9, 9), (16, 1, 3, 3), groups=8, padding=1),
    "first_layer": sizes((2, 3, 35, 35), (2, 3, 11, 11), stride=4, padding=2),
    "large": sizes((2, 17, 40, 37), (33, 17, 3, 3), padding=1),
    "long_reduction": sizes((2, 301, 7, 7), (70, 301, 3, 3)),
    "large_kernel": sizes((2, 3, 14, 13), (4, 3, 9, 8), padding=3),
    "cube_kernel": sizes((2, 2, 7, 6, 7), (3, 2, 4, 4, 4), padding=1),
    "three_d": sizes((2, 3, 6, 7, 8), (4, 3, 3, 3, 3), padding=1),
}


EVERY_WAY = [
    pytest.param(direction, layout, id=f"{direction.value}-{layout}")
    for direction in Direction
    for layout in ("NCHW", "NHWC")
]


@pytest.fixture(scope="module")
def conv():
    return CpuConv(Workers(2))


def expected_algorithms(case):
    """What has to run a case: to lose one is a failure."""
    return [a for a in TOLERANCE if a != "WINOGRAD_NONFUSED" or case in WINOGRAD]


def agrees(conv, problem, algo, a, b, expected, tolerance, before=None):
    out = run_guarded(conv, problem, algo, a, b, before)
    assert relative_error(out, expected) <= tolerance, algo


def test_the_table_of_tolerances_names_every_algorithm():
    assert list(TOLERANCE) == [a.name for a in ALGORITHMS]
    assert {*CASES, *LARGE} >= WINOGRAD


@pytest.mark.parametrize(("direction", "layout"), EVERY_WAY)
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_reference(conv, case, direction, layout):
    problem = ConvProblem(direction=direction, layout=layout, **CASES[case])
    assert [a for a, _ in conv.algorithms(problem)] == expected_algorithms(case)
    excluded = dict(conv.excluded(problem))
    assert {*excluded, *expected_algorithms(case)} == {*TOLERANCE}
    assert all(excluded.values())
    a, b = operands(problem)
    expected = reference(problem, a, b)
    for algo in expected_algorithms(case):
        agrees(conv, problem, algo, a, b, expected, TOLERANCE[algo])


LARGE = {
    "alexnet_conv1": sizes((2, 3, 63, 63), (64, 3, 11, 11), stride=4, padding=2),
    "alexnet_conv3": sizes((2, 96, 13, 13), (192, 96, 3, 3), padding=1),
    "inception_5x5": sizes((2, 32, 18, 18), (96, 32, 5, 5), padding=2),
    "many_taps": sizes((4, 48, 27, 27), (64, 48, 5, 5)),
    "many_samples": sizes((9, 7, 40, 41), (12, 7, 5, 5), padding=2),
    "projection": sizes((2, 64, 28, 28), (128, 64, 1, 1), stride=2),
    "large_depthwise": sizes((4, 64, 14, 14), (64, 1, 3, 3), groups=64, padding=1),
    "volume": sizes((1, 8, 14, 14, 14), (16, 8, 3, 3, 3), padding=1),
}
"""Images larger than what kernels may allocate."""


def allocated(conv, problem, algo):
    """Most bytes of Python's and NumPy's memory that a kernel takes, both ways.

    It ran before. A full collection empties Python's lists of freed objects, so that
    the objects of this call are counted, too.
    """
    a, b = operands(problem)
    spec = problem.operands()[2]
    out = np.zeros(spec.shape, spec.dtype)
    nbytes = dict(conv.algorithms(problem))[algo]
    workspace = np.zeros(nbytes + 64, np.uint8)
    workspace = workspace[-workspace.ctypes.data % 64 :][:nbytes]
    peaks = []
    gc.freeze()  # a collection looks at none of the objects of other tests
    for accumulate in (False, True):
        conv.run(problem, algo, a, b, out, workspace, accumulate=accumulate)
        gc.collect()
        tracemalloc.start()
        conv.run(problem, algo, a, b, out, workspace, accumulate=accumulate)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return max(peaks)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("case", LARGE)
def test_lives_inside_its_workspace(conv, case, direction):
    """Each direction has half of the cases in each layout."""
    number = [*LARGE].index(case) + [*Direction].index(direction)
    layout = ("NCHW", "NHWC")[number % 2]
    problem = ConvProblem(direction=direction, layout=layout, **LARGE[case])
    assert [a for a, _ in conv.algorithms(problem)] == expected_algorithms(case)
    for algo in expected_algorithms(case):
        peak = allocated(conv, problem, algo)
        assert peak < 80 << 10, f"{algo} allocated {peak} bytes beyond its workspace"


@pytest.mark.parametrize(("direction", "layout"), EVERY_WAY)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_samples_of_the_result_are_room_until_they_are_written(
    layout, direction, dtype
):
    fields = {**LARGE["many_samples"], "dtype": dtype, "layout": layout}
    problem = ConvProblem(direction=direction, **fields)
    a, b = operands(problem)
    expected = reference(problem, a, b)
    tolerance = {"float32": TOLERANCE["IMPLICIT_GEMM"], "float64": 1e-12}[dtype]
    for count in (1, 2, 3, 8):
        conv = CpuConv(Workers(count))
        agrees(conv, problem, "IMPLICIT_GEMM", a, b, expected, tolerance)
        agrees(conv, problem, "IMPLICIT_GEMM", a, b, 2 * expected, tolerance, expected)


@pytest.mark.parametrize(("direction", "layout"), EVERY_WAY)
@pytest.mark.parametrize("case", ["groups", "three_d", "stride"])
def test_each_further_worker_allocates_little(case, direction, layout):
    conv = CpuConv(Workers(5))
    fields = {"dtype": "float64", "layout": layout, **CASES[case]}
    problem = ConvProblem(direction=direction, **fields)
    for algo in expected_algorithms(case):
        peak = allocated(conv, problem, algo)
        assert peak < (80 + 3 * 16) << 10, f"{algo} allocated {peak} bytes"


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("algo", TOLERANCE)
def test_the_same_bits_each_time(algo, direction):
    conv = CpuConv(Workers(3))
    problem = ConvProblem(direction=direction, **CASES["large"])
    a, b = operands(problem)
    found = {run_guarded(conv, problem, algo, a, b).tobytes() for _ in range(5)}
    assert len(found) == 1


@pytest.mark.parametrize("algo", TOLERANCE)
def test_refuses_a_workspace_one_byte_short(conv, algo):
    problem = ConvProblem(direction=Direction.FORWARD, **CASES["padded"])
    nbytes = dict(conv.algorithms(problem))[algo]
    a, b = operands(problem)
    out = np.empty(problem.y_shape, "float32")
    if nbytes == 0:
        assert algo == "IMPLICIT_GEMM"
        conv.run(problem, algo, a, b, out, None)
        return
    with pytest.raises(BackendError, match=f"needs {nbytes} bytes"):
        conv.run(problem, algo, a, b, out, np.empty(nbytes - 1, np.uint8))


@pytest.mark.parametrize("direction", Direction)
def test_channels_last_takes_logical_views_too(conv, direction):
    problem = ConvProblem(direction=direction, layout="NHWC", **CASES["padded"])
    stored = operands(problem)
    views = [array.transpose(0, 3, 1, 2) for array in stored]
    spec = problem.operands()[2]
    out = np.empty(spec.shape, spec.dtype)
    conv.run(problem, "IMPLICIT_GEMM", *views, out.transpose(0, 3, 1, 2), None)
    assert relative_error(out, reference(problem, *stored)) <= 2e-5


def test_what_does_not_fit_is_refused(conv):
    problem = ConvProblem(direction=Direction.FORWARD, **CASES["padded"])
    a, b = operands(problem)
    out = np.empty(problem.y_shape, "float32")
    for bad, complaint in (
        (a[:, :, :-1], "x must be float32"),
        (a.astype("float64"), "got float64"),
        (np.asfortranarray(a), "densely packed"),
    ):
        with pytest.raises(ValueError, match=complaint):
            conv.run(problem, "IMPLICIT_GEMM", bad, b, out, None)
    with pytest.raises(UnsupportedError, match="IMPLICIT_GEMM"):
        conv.run(problem, "MAGIC", a, b, out, None)
    half = replace(problem, dtype="float16")
    assert conv.algorithms(half) == []
    reasons = dict(conv.excluded(half))
    assert set(reasons) == {*TOLERANCE}
    assert "float16" in reasons["GEMM"]
