"""Every algorithm that the CPU lists runs, whatever the problem, crew and cuts."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from mucudnn import Tuner
from mucudnn.backends import Backend
from mucudnn.backends.cpu.conv import (
    ALGORITHMS,
    CpuConv,
    blockwise,
    dft,
    fft,
    gemm,
    winograd,
)
from mucudnn.backends.cpu.device import CpuDevice
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.passes.microbatch import candidate_batches
from mucudnn.runtime.store.measurements import BenchmarkCache
from tests.conv_problems import call, conv_problems
from tests.doubles import QUICK
from tests.guarded import run_guarded
from tests.reference import operands, reference

CREW = {count: Workers(count) for count in (1, 2, 3, 4)}
LIBRARIES = {count: CpuConv(crew) for count, crew in CREW.items()}
DEVICE = CpuDevice()
NAMES = frozenset(a.name for a in ALGORITHMS)
CREWS = st.sampled_from(sorted(LIBRARIES))
TOLERANCE = {"float32": 1e-4, "float64": 1e-12}
TILE_POINTS = {1: 32, 2: 32, 3: 16}


def expected_algorithms(problem):
    """What the CPU can run, from the algorithms' definitions.

    FFT has no row: the problems here are far below its 512 points an axis.
    """
    names = set(NAMES)
    axes = list(zip(problem.w_shape[2:], problem.stride, problem.dilation, strict=True))
    if any(axis != (3, 1, 1) for axis in axes):
        names -= {"WINOGRAD_NONFUSED"}
    if any(
        dil * (taps - 1) + step > TILE_POINTS[len(axes)] for taps, step, dil in axes
    ):
        names -= {"FFT_TILING"}
    return names


def agree(out, expected, dtype):
    """Nothing but noise is left where all terms are padding: at least a scale of 1."""
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE[dtype] * scale)


def backward(direction, x_shape, w_shape, **options):
    options = {"layout": "NCHW", "direction": direction, **options}
    return ConvProblem(x_shape=x_shape, w_shape=w_shape, **options)


DATA, FILTER = Direction.BACKWARD_DATA, Direction.BACKWARD_FILTER
NO_INPUT_SEEN = backward(DATA, (2, 16, 1, 1), (4, 16, 1, 1), stride=2, padding=1)
FEWER_SAMPLES_THAN_WORKERS = backward(DATA, (1, 3, 7), (4, 3, 1), padding=3)
DEPTHWISE_PIXELS = [
    backward(d, (2, 6, 4, 3), (6, 1, 1, 1), groups=6, layout="NHWC")
    for d in (DATA, FILTER)
]


SMALL_CUTS = {
    gemm: {
        "_SMALL": 800,
        "_LARGE": 1600,
        "_PART": 2,
        "_TILE_BYTES": 500,
        "_LEAST_PIXELS": 5,
        "_LEAST_TERMS": 7,
        "_LARGE_FILTER": 60,
    },
    blockwise: {
        "_PIXELS": 5,
        "_PER_PIXEL": 50,
        "_TAPS": 4,
        "_PER_TAP": 40,
        "_SAMPLES": 1,
    },
    dft: {"_CHUNK_BYTES": 20_000, "_CHANNELS": 2},
    fft: {"_BLOCK_BYTES": 20_000, "_LEAST": 3, "_ROWS": 5, "_PIECE": 3},
    winograd: {"_STRETCH": 2, "_BLOCK_BYTES": 4096, "_BLOCK_SAMPLES": 2},
}
"""So small that a problem of a few pixels has the many tiles of a large one."""


@pytest.fixture(params=["as it is", "in small cuts"])
def cut(request, monkeypatch):
    if request.param == "in small cuts":
        for module, sizes in SMALL_CUTS.items():
            for name, size in sizes.items():
                monkeypatch.setattr(module, name, size)
    for count in LIBRARIES:  # fresh ones: kernels are remembered as they were cut
        monkeypatch.setitem(LIBRARIES, count, CpuConv(CREW[count]))


@pytest.mark.usefixtures("cut")
def test_every_algorithm_listed_is_right_inside_its_workspace():
    @example(NO_INPUT_SEEN, 2)
    @example(FEWER_SAMPLES_THAN_WORKERS, 3)
    @example(DEPTHWISE_PIXELS[0], 1)
    @example(DEPTHWISE_PIXELS[1], 2)
    @given(conv_problems(), CREWS)
    def right(problem, count):
        library = LIBRARIES[count]
        listed = {name for name, _ in library.algorithms(problem)}
        assert listed == expected_algorithms(problem)
        assert listed | {*dict(library.excluded(problem))} == NAMES
        a, b = operands(problem)
        expected = reference(problem, a, b)
        rng = np.random.default_rng(9)
        before = rng.uniform(-1, 1, expected.shape).astype(problem.dtype)
        for algo in listed:
            out = run_guarded(library, problem, algo, a, b)
            agree(out, expected, problem.dtype)
            out = run_guarded(library, problem, algo, a, b, before)
            agree(out, before + expected, problem.dtype)

    right()


@pytest.mark.parametrize("accumulate", [False, True])
def test_what_needs_no_workspace_takes_none(accumulate):
    library, problem = LIBRARIES[2], NO_INPUT_SEEN
    a, b = operands(problem)
    free = [name for name, nbytes in library.algorithms(problem) if nbytes == 0]
    assert free == ["IMPLICIT_GEMM", "IMPLICIT_PRECOMP_GEMM"]
    for algo in free:
        out = np.ones(problem.x_shape, problem.dtype)
        library.run(problem, algo, a, b, out, None, accumulate=accumulate)
        assert (out == accumulate).all()


def spread(array, how):
    """The same values with other strides, as a caller may have them."""
    match how:
        case "dense":
            return array
        case "every other":
            wide = np.full(
                (*array.shape[:-1], 2 * array.shape[-1]), np.nan, array.dtype
            )
            wide[..., ::2] = array
            return wide[..., ::2]
        case "backwards":
            return np.flip(np.flip(array).copy())
        case "transposed":
            return array.transpose().copy().transpose()


STRIDES = st.sampled_from(["dense", "every other", "backwards", "transposed"])


@example(NO_INPUT_SEEN, 2, ("dense", "dense"))
@example(FEWER_SAMPLES_THAN_WORKERS, 3, ("dense", "dense"))
@example(DEPTHWISE_PIXELS[0], 1, ("dense", "dense"))
@settings(
    deadline=None,
    max_examples=max(1, settings().max_examples // 3),  # dozens of kernels each
    suppress_health_check=[HealthCheck.too_slow],
)
@given(conv_problems(), CREWS, st.tuples(STRIDES, STRIDES))
def test_planning_loses_no_algorithm_at_any_micro_batch(problem, count, strides):
    backend = Backend("cpu", DEVICE, LIBRARIES[count])
    a, b = operands(problem)
    with (
        tempfile.TemporaryDirectory() as folder,
        BenchmarkCache(Path(folder) / "cache.sqlite") as cache,
    ):
        tuner = Tuner(backend=backend, rule=QUICK, cache=cache, prune=False)
        table = tuner.measure(problem)
        sizes = candidate_batches(problem.batch, "powers_of_two")
        assert {(p.algo, p.batch) for p in table.usable} == {
            (algo, n) for algo in expected_algorithms(problem) for n in sizes
        }
        views = (spread(x, how) for x, how in zip((a, b), strides, strict=True))
        out = call(problem, *views, tuner=tuner)
        agree(out, reference(problem, a, b), problem.dtype)
        again = Tuner(backend=backend, rule=QUICK, cache=cache, prune=False)
        assert again.measure(problem) == table
