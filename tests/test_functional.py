"""The public convolutions: right whatever the plan, and clear about misuse."""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mucudnn import (
    Tuner,
    conv1d,
    conv2d,
    conv3d,
    conv_backward_data,
    conv_backward_filter,
)
from mucudnn.backends import get_backend
from mucudnn.backends.cpu.conv import CpuConv
from mucudnn.backends.virtual import VirtualArray
from mucudnn.errors import OutOfMemoryError, UnsupportedError
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.passes.microbatch import undivided
from tests.conv_problems import call
from tests.doubles import QUICK, arrays, plan_of, watched
from tests.python_calls import python_calls
from tests.reference import operands, reference, relative_error

CPU = get_backend("cpu")


def cpu_tuner(**options):
    return Tuner(backend=CPU, rule=QUICK, cache=None, **options)


def forward(batch=7, channels=4, spatial=(9, 8), filters=6, kernel=(3, 3), **options):
    groups = options.get("groups", 1)
    return ConvProblem(
        direction=Direction.FORWARD,
        x_shape=(batch, channels, *spatial),
        w_shape=(filters, channels // groups, *kernel),
        **options,
    )


LAYERS = {
    "1-D": forward(spatial=(11,), kernel=(3,), padding=1),
    "2-D": forward(padding=1),
    "3-D": forward(spatial=(5, 6, 4), kernel=(2, 3, 1), padding=(0, 1, 0)),
    "groups": forward(groups=2, padding=(1, 0)),
    "strided": forward(stride=(2, 3), padding=2),
    "dilated": forward(dilation=(2, 3), padding=3),
    "double": forward(dtype="float64"),
}


def layers(test):
    test = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)(test)
    test = pytest.mark.parametrize("layout", ["NCHW", "NHWC"])(test)
    return pytest.mark.parametrize("direction", Direction)(test)


def variant(layer, direction, layout):
    return dataclasses.replace(layer, direction=direction, layout=layout)


@layers
@pytest.mark.parametrize("accumulate", [False, True])
def test_uneven_divisions_into_out(layer, layout, direction, accumulate):
    """Beta is the caller's, also where parts of a filter gradient add up."""
    problem = variant(layer, direction, layout)
    a, b = operands(problem)
    expected = reference(problem, a, b)
    spec = problem.operands()[2]
    before = np.random.default_rng(1).uniform(-1, 1, spec.shape).astype(spec.dtype)
    first, *_, last = (name for name, _ in CPU.conv.algorithms(problem))
    for steps in (
        [(first, 7)],
        [(first, 4), (last, 3)],
        [(last, 1)] * 2 + [(first, 5)],
    ):
        tuner = cpu_tuner()
        tuner.adopt(plan_of(CPU, problem, *steps))
        out = before.copy() if accumulate else np.full(spec.shape, np.nan, spec.dtype)
        assert call(problem, a, b, tuner=tuner, out=out, accumulate=accumulate) is out
        wanted = expected + before if accumulate else expected
        assert relative_error(out, wanted) < 1e-4


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
def test_dividing_changes_rounding_at_most_where_samples_are_independent(direction):
    """A BLAS may round otherwise where a product has fewer columns, and some do."""
    problem = forward(13, padding=1).with_direction(direction)
    a, b = operands(problem)
    results = []
    for parts in ((13,), (5, 4, 4), (1,) * 13):
        tuner = cpu_tuner()
        tuner.adopt(plan_of(CPU, problem, *(("GEMM", part) for part in parts)))
        results.append(call(problem, a, b, tuner=tuner))
    for result in results[1:]:
        assert relative_error(result, results[0]) < 1e-6


def test_what_is_not_contiguous_is_accepted():
    problem = forward(padding=1)
    x, w = operands(problem)
    expected = reference(problem, x, w)
    wide = np.zeros((7, 4, 9, 16), np.float32)
    wide[..., ::2] = x
    for a, b in (
        (wide[..., ::2], w),
        (np.asfortranarray(x), np.asfortranarray(w)),
        (x[::-1], w),
        (np.broadcast_to(x[:1], x.shape), w),
    ):
        found = conv2d(a, b, padding=1, tuner=cpu_tuner())
        assert relative_error(found, reference(problem, a, b)) < 1e-4
    assert relative_error(conv2d(x, w, padding=1, tuner=cpu_tuner()), expected) < 1e-4


def test_a_hit_neither_measures_nor_plans():
    plans = []

    def counting(tables, limit):
        plans.append(len(tables))
        return undivided(tables, limit)

    backend = watched("cpu")
    tuner = Tuner(backend=backend, rule=QUICK, planner=counting, cache=None)
    x, w = operands(forward())
    first = conv2d(x, w, stride=[1, 1], padding=[1, 0], tuner=tuner)
    calls = len(backend.conv.calls)
    for stride, padding in (
        ((1, 1), (1, 0)),
        ([1, 1], (1, 0)),
        (np.array([1, 1]), [1, 0]),
    ):
        again = conv2d(x.copy(), w, stride=stride, padding=padding, tuner=tuner)
        assert again.tobytes() == first.tobytes()
    assert conv2d(x, w, padding=(1, 0), tuner=tuner).tobytes() == first.tobytes()
    assert len(backend.conv.calls) == calls + 4
    assert plans == [1]


def test_a_new_problem_keeps_the_others_ready():
    tuner = cpu_tuner()
    for batch in (1, 2, 3):
        conv2d(*operands(forward(batch)), tuner=tuner)
    assert len({*map(id, tuner.bound.values())}) == 3


def test_an_adopted_plan_takes_over():
    problem = forward()
    backend = watched("cpu")
    tuner = Tuner(backend=backend, rule=QUICK, cache=None)
    x, w = operands(problem)
    conv2d(x, w, tuner=tuner)
    tuner.adopt(plan_of(backend, problem, ("GEMM", 3), ("IMPLICIT_GEMM", 4)))
    backend.conv.calls.clear()
    conv2d(x, w, tuner=tuner)
    assert backend.conv.calls == [("GEMM", 3), ("IMPLICIT_GEMM", 4)]


def test_threads_share_a_tuner():
    tuner = cpu_tuner()
    problems = [forward(b, padding=1) for b in (2, 5)]
    work = [(p, *operands(p)) for p in problems]
    expected = [reference(*item) for item in work]

    def body(i):
        for turn in range(20):
            problem, a, b = work[(i + turn) % 2]
            found = call(problem, a, b, tuner=tuner)
            assert relative_error(found, expected[(i + turn) % 2]) <= 1e-4

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(body, range(2)))
    assert len({*map(id, tuner.bound.values())}) == 2


# --- what a call costs -------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 4])
def test_a_second_call_enters_few_functions(parts):
    """On the null backend, whose kernels are two functions and a sum of fractions."""
    backend = get_backend("null")
    problem = forward(8, padding=1)
    x, w, _ = arrays(problem)
    tuner = Tuner(backend=backend, cache=None)
    tuner.adopt(plan_of(backend, problem, *[("FAST", 8 // parts)] * parts))

    def act():
        conv2d(x, w, padding=1, tuner=tuner)

    act()
    kernel = backend.conv.kernel(problem, "SLOW")
    kernels = parts * python_calls(lambda: kernel(x, w, None, None, False))
    assert python_calls(act) - kernels <= 20


def test_a_second_call_works_nothing_out_again(monkeypatch):
    """Neither problems nor geometry: what a plan needs, it was given when bound."""
    problem = forward(6, padding=1)
    tuner = cpu_tuner()
    x, w = operands(problem)
    for algo, _ in CPU.conv.algorithms(problem):
        tuner.adopt(plan_of(CPU, problem, *[(algo, 2)] * 3))
        first = conv2d(x, w, padding=1, tuner=tuner)
        with monkeypatch.context() as patch:
            patch.setattr(ConvProblem, "__init__", None)
            patch.setattr(ConvProblem, "operands", None)
            patch.setattr(CpuConv, "kernel", None)
            again = conv2d(x, w, padding=1, tuner=tuner)
        assert again.tobytes() == first.tobytes(), algo


# --- bias --------------------------------------------------------------------------


def biased(problem, x, w, bias):
    shape = [1] * len(problem.x_shape)
    shape[-1 if problem.layout == "NHWC" else 1] = len(bias)
    return reference(problem, x, w) + bias.reshape(shape)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_bias_is_added_once_to_every_channel(layer, layout, accumulate):
    problem = variant(layer, Direction.FORWARD, layout)
    x, w = operands(problem)
    bias = np.arange(len(w), dtype=problem.dtype)[::-1]
    spec = problem.operands()[2]
    before = np.random.default_rng(1).uniform(-1, 1, spec.shape).astype(spec.dtype)
    tuner = cpu_tuner()
    tuner.adopt(plan_of(CPU, problem, ("GEMM", 4), ("IMPLICIT_GEMM", 3)))
    out = before.copy() if accumulate else None
    for _ in range(2):
        if accumulate:
            out[...] = before
        y = call(problem, x, w, tuner=tuner, bias=bias, out=out, accumulate=accumulate)
        expected = biased(problem, x, w, bias) + (before if accumulate else 0)
        assert relative_error(y, expected) < 1e-4


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_bias_takes_time_where_nothing_is_computed(layout):
    backend = get_backend("null")
    problem = forward(layout=layout)
    x, w, y = arrays(problem)
    tuner = Tuner(backend=backend, cache=None)
    times = []
    for bias in (None, None, VirtualArray((6,), "float32")):
        start = backend.device.now_ms
        assert call(problem, x, w, tuner=tuner, bias=bias).shape == y.shape
        times.append(backend.device.now_ms - start)
    assert times[2] > times[1]


def test_a_backend_without_the_kernel_says_so():
    x, w = operands(forward())
    backend = watched("cpu")
    tuner = Tuner(backend=backend, rule=QUICK, cache=None)
    with pytest.raises(UnsupportedError, match="'cpu' has no kernel for 'bias'"):
        conv2d(x, w, bias=w[:, 0, 0, 0], tuner=tuner)
    assert backend.conv.calls == []


# --- out and its neighbours --------------------------------------------------------


def laid(spec, memory, first):
    """A tensor in some bytes."""
    part = memory[first * np.dtype(spec.dtype).itemsize :][: spec.nbytes]
    return part.view(spec.dtype).reshape(spec.shape)


def shared(problem, values, which, shift):
    """Operands of which one begins `shift` elements before `out` in the same bytes."""
    *specs, result = problem.operands()
    size = values[which].size
    room = 2 * size + int(np.prod(result.shape))
    noise = np.random.default_rng(1).uniform(-1, 1, room).astype(problem.dtype)
    memory = noise.view(np.uint8)
    there = laid(specs[which], memory, size)
    out = laid(result, memory, size + shift)
    if shift % 2:  # backwards through memory
        there = there[::-1]
    there[...] = values[which]
    given = [there if i == which else values[i] for i in range(2)]
    return *given, out


@layers
@pytest.mark.parametrize("accumulate", [False, True])
def test_out_may_overlap_an_operand(layer, layout, direction, accumulate):
    problem = variant(layer, direction, layout)
    values = operands(problem)
    expected = reference(problem, *values)
    tuner = cpu_tuner()
    first, *_, last = (name for name, _ in CPU.conv.algorithms(problem))
    tuner.adopt(plan_of(CPU, problem, (first, 4), (last, 3)))
    for which in range(2):
        size = values[which].size
        for shift in (0, 1, -1, 2, -2, size // 2, -(size // 3), size - 1, size):
            a, b, out = shared(problem, values, which, shift)
            wanted = expected + out if accumulate else expected
            found = call(problem, a, b, tuner=tuner, out=out, accumulate=accumulate)
            assert found is out
            assert relative_error(out, wanted) < 1e-4, (which, shift)


def test_out_between_the_samples_of_an_operand_changes_none_of_them():
    """Strided operands are copied in any case; their memory is not refused."""
    problem = forward(2, padding=1, filters=4)
    x, w = operands(problem)
    memory = np.full((3, *x.shape[1:]), 7, np.float32)
    memory[::2] = x
    one = problem.with_batch(1)
    for tuner in (cpu_tuner(), cpu_tuner()):
        conv2d(memory[::2][:1], w, padding=1, tuner=tuner, out=memory[1:2])
        assert relative_error(memory[1:2], reference(one, x[:1], w)) < 1e-4
        assert np.array_equal(memory[::2], x)
        conv2d(memory[::2], w, padding=1, tuner=tuner, out=memory[:2])
        assert relative_error(memory[:2], reference(problem, x, w)) < 1e-4
        memory[::2] = x


@pytest.mark.parametrize("accumulate", [False, True])
def test_out_may_overlap_the_bias(accumulate):
    problem = forward(padding=1)
    x, w = operands(problem)
    out = np.zeros(problem.operands()[2].shape, np.float32)
    tuner = cpu_tuner()
    for _ in range(2):
        out[...] = 1
        bias = out[2, 1, 3, :6]
        bias[...] = np.arange(6)
        wanted = biased(problem, x, w, bias) + (out if accumulate else 0)
        conv2d(x, w, bias=bias, padding=1, tuner=tuner, out=out, accumulate=accumulate)
        assert relative_error(out, wanted) < 1e-4


# --- misuse ------------------------------------------------------------------------

X = np.zeros((4, 3, 9, 8), np.float32)
W = np.zeros((6, 3, 3, 3), np.float32)
Y = np.zeros((4, 6, 7, 6), np.float32)


BIG = 10**6
LARGE, HUGE = (6, 3, BIG + 9, BIG + 8), (4, 3, 2**60, 2**60)
ONE = np.zeros((4, 6, 1, 1), np.float32)
PADDED = forward(padding=BIG)
MISUSES = r"""
conv2d([[1.0]], W) | TypeError: got list and ndarray
conv2d(X, None) | TypeError: got ndarray and NoneType
conv2d(X, W.astype("f8")) | ValueError: different data types, float32 and float64
conv2d(X.astype(int), W.astype(int)) | ValueError: unknown dtype 'int64'
conv2d(X.astype(">f4"), W.astype(">f4")) | ValueError: unknown dtype '>f4'
conv1d(X, W) | ValueError: conv1d takes an input of 3 axes
conv3d(X, W) | ValueError: conv3d takes an input of 5 axes
conv2d(X, W[0]) | ValueError: w_shape .* has 3 axes
conv2d(X, W[:, :2]) | ValueError: 3 channels
conv2d(X, W, padding="some") | ValueError: padding
conv2d(X, W, stride=(1, 1, 1)) | ValueError: stride
conv2d(X, W, layout="CHWN") | ValueError: unknown layout
backward_data(Y[..., :5], W, X.shape) | ValueError: \(4, 6, 7, 5\).*give \(4, 6, 7, 6\)
backward_filter(X, Y[:3], W.shape) | ValueError: \(3, 6, 7, 6\).*give \(4, 6, 7, 6\)
backward_data(Y, W, X.shape[:3]) | ValueError: w_shape .* has 4 axes, x_shape .* has 3
backward_data(Y, W, 4) | TypeError: x_shape
backward_filter(X, Y, None) | TypeError: w_shape
conv2d(X, W, bias=W[:3, 0, 0, 0]) | ValueError: bias must be float32 \(6,\).* \(3,\)
conv2d(X, W, bias=np.zeros((6, 1), "f4")) | ValueError: got float32 \(6, 1\)
conv2d(X, W, bias=np.zeros(6)) | ValueError: bias must be float32 .*got float64
conv2d(X, W, bias=[0.0] * 6) | TypeError: bias .* list
conv2d(X, W, out=Y[:3]) | ValueError: out must be float32
conv2d(X, W, out=Y.astype("f8")) | ValueError: got float64
conv2d(X, W, out=np.asfortranarray(Y)) | ValueError: densely packed
conv2d(X, W, out=[1.0]) | TypeError: out .* got list
conv2d(X, W, out=spread(Y[:1])) | ValueError: out must be densely packed
conv2d(X, W, out=spread(Y)) | ValueError: out must be writable
conv2d(X, W, accumulate="no") | TypeError: accumulate must be True or False, got 'no'
conv2d(X, W, padding=10**9) | OutOfMemoryError: 2000000007, 2000000006\), takes .* PiB
conv2d(X, W, padding=BIG) | OutOfMemoryError: the result.* takes 349.2 TiB \(.* are free
conv2d(X, W, padding=2**62, stride=2**62) | ValueError: at most 2147483647, got 46116860
conv2d(X, W, padding="same", dilation=2**40) | ValueError: padding must be at most 2147
backward_data(ONE, W, HUGE, stride=2**70) | OutOfMemoryError: takes .* PiB
backward_filter(X, ONE, LARGE, padding=BIG // 2) | OutOfMemoryError: takes .* TiB
measure(PADDED) | OutOfMemoryError: the least of ConvProblem.* takes .* TiB
conv2d(X[:0], W) | ValueError: x_shape\[0\] .* least 1
conv2d(X, W, dilation=2**63) | ValueError: spans 18446744073709551617 elements, and
conv2d(X, W, groups=10**30) | ValueError: expects 3 x 10+ groups
conv2d(X, W, accumulate=True) | ValueError: adds to `out`, which was not given
"""
"""Calls, and the errors that they raise."""


@pytest.mark.parametrize("line", MISUSES.strip().splitlines(), ids=lambda x: x[:40])
def test_misuse_is_one_clear_error_before_anything_is_measured(line):
    call, _, error = line.partition(" | ")
    kind, _, message = error.partition(": ")
    backend = watched("cpu")
    tuner = Tuner(backend=backend, rule=QUICK, cache=None)
    functions = {
        **{
            f.__name__: functools.partial(f, tuner=tuner)
            for f in (conv1d, conv2d, conv3d)
        },
        "backward_data": functools.partial(conv_backward_data, tuner=tuner),
        "backward_filter": functools.partial(conv_backward_filter, tuner=tuner),
        "measure": tuner.measure,
        "spread": lambda array: np.broadcast_to(array, Y.shape),
    }
    with pytest.raises((ValueError, TypeError, OutOfMemoryError), match=message) as e:
        eval(call, {**globals(), **functions})
    assert e.type.__name__ == kind
    assert backend.conv.calls == []


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2**63},
        {"stride": (2**31, 2**200)},
        {"dilation": 2**63, "kernel": (1, 1)},
        {"stride": 2**40, "padding": 2**31 - 1},
        {"dilation": 10**6, "padding": 10**6},
        {"stride": 10**9, "padding": 10**9},
    ],
    ids=repr,
)
def test_absurd_options_of_small_results_are_right_and_log_nothing(
    options, direction, caplog
):
    """No algorithm fails: a warning would be logged."""
    problem = forward(2, **options).with_direction(direction)
    a, b = operands(problem)
    found = call(problem, a, b, tuner=cpu_tuner())
    assert np.isfinite(found).all()
    assert caplog.records == []
    if "padding" not in options:
        assert relative_error(found, reference(problem, a, b)) < 1e-4


def test_a_clamped_stride_is_the_same_problem():
    assert forward(stride=2**63) == forward(stride=2**80)
    assert forward(stride=2**63).y_shape == forward(stride=1000).y_shape
    assert forward(stride=2**31 - 1).stride == (2**31 - 1,) * 2


def test_out_is_checked_on_a_hit_too():
    tuner = cpu_tuner()
    conv2d(X, W, tuner=tuner)
    for out in (Y[:3], Y.astype(np.float64), np.asfortranarray(Y)):
        with pytest.raises(ValueError, match="out must be"):
            conv2d(X, W, out=out, tuner=tuner)
    with pytest.raises(ValueError, match="which was not given"):
        conv2d(X, W, accumulate=True, tuner=tuner)


@pytest.mark.torch
def test_tensors_of_pytorch_are_refused_with_what_takes_them():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    x, w = torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)
    for given in (x, x.numpy()):
        with pytest.raises(
            TypeError, match=r"got PyTorch tensors; .*\.convolutions\(\)"
        ):
            conv2d(given, w, tuner=cpu_tuner())
