"""Convolutions as data: what is accepted, what is refused and what follows."""

import copy
import itertools
import math
import pickle
from dataclasses import fields

import pytest
from hypothesis import given, strategies as st

from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, Direction, PerfTable
from tests.conv_problems import conv_problems
from tests.tables import perf


def forward(x_shape=(4, 6, 9, 8), w_shape=(8, 6, 3, 3), **options):
    return ConvProblem(
        direction=Direction.FORWARD, x_shape=x_shape, w_shape=w_shape, **options
    )


def positions(size, kernel, stride, padding, dilation):
    """Where a window fits: counted, not computed."""
    last = size + padding - 1
    starts = range(-padding, last + 1, stride)
    return sum(start + dilation * (kernel - 1) <= last for start in starts)


@given(conv_problems())
def test_outputs_operations_and_operands_of_any_problem(problem):
    counted = tuple(
        positions(*axis)
        for axis in zip(
            problem.x_shape[2:],
            problem.w_shape[2:],
            problem.stride,
            problem.padding,
            problem.dilation,
            strict=True,
        )
    )
    assert problem.y_shape == (problem.batch, problem.w_shape[0], *counted)
    outputs = sum(1 for _ in itertools.product(*map(range, problem.y_shape)))
    taps = sum(1 for _ in itertools.product(*map(range, problem.w_shape[1:])))
    assert problem.flops == 2 * outputs * taps
    stored = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
    if problem.layout == "NHWC":
        stored = {name: (s[0], *s[2:], s[1]) for name, s in stored.items()}
    names = {"forward": "xwy", "backward_data": "ywx", "backward_filter": "xyw"}
    specs = problem.operands()
    assert "".join(spec.name for spec in specs) == names[problem.direction.value]
    for spec in specs:
        assert spec.shape == stored[spec.name]
        assert spec.nbytes == int(problem.dtype[5:]) // 8 * math.prod(spec.shape)


@given(conv_problems(), st.integers(1, 9))
def test_a_micro_batch_differs_in_the_batch_only(problem, batch):
    micro = problem.with_batch(batch)
    assert micro.batch == micro.y_shape[0] == batch
    assert micro.with_batch(problem.batch) == problem
    assert hash(micro.with_batch(problem.batch)) == hash(problem)
    differ = {
        f.name
        for f in fields(micro)
        if getattr(micro, f.name) != getattr(problem, f.name)
    }
    assert differ <= {"x_shape"}


def test_integers_and_sequences_mean_the_same():
    one = forward(stride=2, padding=1, dilation=1)
    assert one == forward([4, 6, 9, 8], [8, 6, 3, 3], stride=(2, 2), padding=[1, 1])
    assert one.stride == (2, 2)
    with pytest.raises(TypeError, match="groups must be an integer"):
        forward(groups=True)


@pytest.mark.parametrize(
    ("options", "error", "shown"),
    [
        ({"direction": "forth"}, ValueError, ["'forth'", "Direction.FORWARD"]),
        ({"direction": 1}, TypeError, ["1", "Direction.FORWARD"]),
        ({"dtype": "int8"}, ValueError, ["'int8'", "float32"]),
        ({"layout": "CHWN"}, ValueError, ["'CHWN'", "NHWC"]),
        ({"x_shape": (4, 6)}, ValueError, ["(4, 6)", "2 axes"]),
        ({"x_shape": ()}, ValueError, ["()", "0 axes"]),
        ({"x_shape": (1,) * 6}, ValueError, ["6 axes"]),
        ({"x_shape": 4}, TypeError, ["x_shape", "4"]),
        ({"x_shape": (4, 6, 9.0, 8)}, TypeError, ["x_shape[2]", "9.0"]),
        ({"x_shape": (0, 6, 9, 8)}, ValueError, ["x_shape[0]", "0"]),
        ({"w_shape": (8, 6, 3)}, ValueError, ["3 axes", "4", "(4, 6, 9, 8)"]),
        ({"w_shape": (8, 5, 3, 3)}, ValueError, ["6 channels", "(8, 5, 3, 3)", "5"]),
        ({"w_shape": (8, 6, 3, -1)}, ValueError, ["w_shape[3]", "-1"]),
        ({"w_shape": (8, 2, 3, 3), "groups": 3}, ValueError, ["8", "3 groups"]),
        ({"groups": 0}, ValueError, ["groups", "0"]),
        ({"groups": (1, 1)}, TypeError, ["groups", "(1, 1)"]),
        ({"stride": 0}, ValueError, ["stride", "0"]),
        ({"stride": (1, 0)}, ValueError, ["stride[1]", "0"]),
        ({"stride": (1, 1, 1)}, ValueError, ["stride", "3 entries", "2 spatial"]),
        ({"stride": 1.5}, TypeError, ["stride", "1.5"]),
        ({"stride": "ab"}, TypeError, ["stride", "'ab'"]),
        ({"padding": -1}, ValueError, ["padding", "-1"]),
        ({"padding": "some"}, ValueError, ["padding", "'some'", "same, valid"]),
        ({"padding": "same", "stride": 2}, ValueError, ["'same'", "stride 1"]),
        ({"padding": "same", "w_shape": (8, 6, 3, 4)}, ValueError, ["(2, 3)", "odd"]),
        ({"dilation": 0}, ValueError, ["dilation", "0"]),
        ({"dilation": 5}, ValueError, ["axis 0", "11", "9"]),
        ({"w_shape": (8, 6, 3, 9)}, ValueError, ["axis 1", "9", "8"]),
    ],
)
def test_a_contradiction_shows_both_sides(options, error, shown):
    values = {"direction": Direction.FORWARD}
    values |= {"x_shape": (4, 6, 9, 8), "w_shape": (8, 6, 3, 3)}
    with pytest.raises(error) as caught:
        ConvProblem(**{**values, **options})
    for text in shown:
        assert text in str(caught.value)


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(0, 9)), max_size=8
    ),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_the_fastest_is_the_cheapest_that_fits(rows, batch, limit):
    perfs = [perf(f"A{i}", *row) for i, row in enumerate(rows)]
    failed = perf("BROKEN", batch, math.inf, 0, error="no")
    table = PerfTable(forward(), (*perfs, failed))
    fits = [p.time_ms for p in perfs if p.batch == batch and p.workspace <= limit]
    found = table.fastest(batch, limit)
    assert (found and found.time_ms) == (min(fits) if fits else None)
    assert table.batches() == tuple(sorted({p.batch for p in perfs}))


def test_noise_counts_against_an_algorithm():
    steady, shaky = perf("STEADY", 4, 2.0, 9), perf("SHAKY", 4, 1.9, 0, noise_ms=0.2)
    assert PerfTable(forward(), (steady, shaky)).fastest(4) == steady


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_slices_cover_the_batch_in_order(batches):
    problem = forward((sum(batches), 6, 9, 8))
    steps = tuple(perf("A", b, b, 10 * b) for b in batches)
    plan = ConvPlan(problem, steps)
    covered = [i for window, _ in plan.slices() for i in range(problem.batch)[window]]
    assert covered == list(range(problem.batch))
    assert tuple(step for _, step in plan.slices()) == steps
    assert plan.time_ms == sum(batches)
    assert plan.workspace == 10 * max(batches)
    assert plan.divided == (len(batches) > 1)


@pytest.mark.parametrize("batches", [(), (3,), (4, 1)])
def test_a_plan_must_cover_the_batch(batches):
    steps = tuple(AlgoPerf(algo="A", batch=b, time_ms=1, workspace=0) for b in batches)
    with pytest.raises(ValueError, match=f"covers {sum(batches)} of 4"):
        ConvPlan(forward(), steps)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([("GEMM", 4)], "ConvPlan(GEMM(4), 1.5 ms, 1.0 KiB)"),
        ([("FFT", 1)] * 4, "ConvPlan(4 × FFT(1), 6 ms, 1.0 KiB)"),
        (
            [("FFT", 1), ("FFT", 1), ("GEMM", 1), ("FFT", 1)],
            "ConvPlan(2 × FFT(1) + GEMM(1) + FFT(1), 6 ms, 1.0 KiB)",
        ),
        ([("FFT", 1), ("FFT", 3)], "ConvPlan(FFT(1) + FFT(3), 3 ms, 1.0 KiB)"),
    ],
)
def test_a_plan_says_what_it_is_in_a_line(steps, words):
    perfs = (
        AlgoPerf(algo=algo, batch=n, time_ms=1.5, workspace=1024) for algo, n in steps
    )
    plan = ConvPlan(forward().with_batch(4), tuple(perfs))
    assert repr(plan) == str(plan) == words
    assert pickle.loads(pickle.dumps(plan)) == plan == copy.deepcopy(plan)
