"""Kernels in half precision, by their own source, against the CPU's in float64.

Their inputs are rounded first; results may be a few roundings of the narrow type apart.
Parameters and statistics are in the same type, or in single precision beside it, as a
network in mixed precision has them.
"""

import numpy as np
import pytest

from mucudnn.backends.cpu.kernels import KERNELS as CPU_KERNELS, bind as bind_cpu
from mucudnn.backends.cpu.threads import Workers
from mucudnn.backends.cuda.kernels import KERNELS
from tests.cuda_emulator import COMPILER
from tests.cupy_fake import StrictArray, on_cupy
from tests.kernel_cases import prepared
from tests.mirror_cases import cases

ml_dtypes = pytest.importorskip("ml_dtypes")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++"),
]

TYPES = {"float16": (np.float16, 2**-11), "bfloat16": (ml_dtypes.bfloat16, 2**-8)}
ROUNDINGS = 16
WIDE = {
    "bias": ((1,), ()),
    "bias_grad": ((), (0,)),
    "bias_relu": ((1,), ()),
    "bias_relu_grad": ((), (1,)),
    "batch_norm": ((1, 2, 3, 4), (1, 2)),
    "batch_norm_apply": ((1, 2, 3, 4), ()),
    "batch_norm_grad_apply": ((2, 3, 4, 5, 6), ()),
    "batch_norm_grad_sums": ((2, 3), (0, 1)),
    "batch_norm_eval": ((1, 2, 3, 4), ()),
    "batch_norm_grad": ((2, 3, 4), (1, 2)),
    "batch_norm_relu": ((1, 2, 3, 4), (1, 2)),
    "batch_norm_relu_grad": ((2, 3, 4, 5), (1, 2)),
    "batch_norm_add_relu": ((1, 2, 3, 4), (1, 2)),
    "batch_norm_add_relu_grad": ((3, 4, 5), (2, 3)),
    "group_norm": ((1, 2), (1, 2)),
    "group_norm_grad": ((2, 3, 4), (1, 2)),
    "group_norm_apply": ((1, 2, 3, 4), ()),
    "group_norm_grad_apply": ((2, 3, 4, 5), ()),
    "group_norm_grad_sums": ((2, 3, 4), (0, 1, 2)),
}
"""Operation -> its inputs and its results that are wide in mixed precision."""

DOUBLE = ("batch_norm_merge", "batch_norm_sums", "group_norm_merge", "group_norm_sums")
"""On statistics of slices, which are in double precision."""


def computed(kernel, case, types, wrap):
    """What a kernel leaves in its results, or in its inputs where it has none."""

    def made(shape, dtype, values=None):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        array = np.full(size, 0xFF, np.uint8).view(dtype).reshape(shape)
        if values is not None:
            array[...] = values
        return array

    kinds, results = types(case)
    inputs = [made(a.shape, t, a) for a, t in zip(case.inputs, kinds, strict=True)]
    shapes = (shape for shape, _ in case.outputs)
    outputs = [made(shape, t) for shape, t in zip(shapes, results, strict=True)]
    call, _ = prepared(kernel, inputs, outputs, case.attrs, wrap)
    call()
    return [a.astype("f8") for a in outputs or inputs]


def as_given(case):
    return [a.dtype for a in case.inputs], [dtype for _, dtype in case.outputs]


def narrowing(narrow, mixed):
    """The types of a case's inputs and results."""

    def types(case):
        wide = WIDE[case.op] if mixed else ((), ())
        if case.op in DOUBLE:
            return as_given(case)
        given = [a.dtype for a in case.inputs], [np.dtype(t) for _, t in case.outputs]
        return [
            [
                t if t.kind != "f" else np.dtype("f4") if i in wide[side] else narrow
                for i, t in enumerate(some)
            ]
            for side, some in enumerate(given)
        ]

    return types


def rounded(case, types):
    """The case with inputs that the narrow types have."""
    kinds, _ = types(case)
    case.inputs = [
        a.astype(t).astype(a.dtype) for a, t in zip(case.inputs, kinds, strict=True)
    ]
    return case


def agree(found, expected, rounding, case):
    for one, other in zip(found, expected, strict=True):
        assert (np.isnan(one) == np.isnan(other)).all(), case.op
        told = np.isfinite(other) & (np.abs(other) < 6e4)  # a step's number is no float
        one, other = one[told], other[told]
        scale = max(1.0, np.abs(other).max(initial=0))
        apart = np.abs(one - other).max(initial=0) / scale / rounding
        assert apart <= ROUNDINGS, (case.op, [a.shape for a in case.inputs], apart)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_every_kernel_in_half_precision(name, mixed, monkeypatch):
    narrow, rounding = TYPES[name]
    types = narrowing(np.dtype(narrow), mixed)
    (_, ours), cpu = on_cupy(monkeypatch), bind_cpu(Workers(1))
    seen = set()
    for case in cases("f8"):
        if case.op == "cast" or (mixed and case.op not in WIDE):
            continue
        rounded(case, types)
        expected = computed(cpu[case.op], case, as_given, lambda a: a)
        found = computed(ours[case.op], case, types, StrictArray)
        agree(found, expected, rounding, case)
        seen.add(case.op)
    assert seen == (set(WIDE) if mixed else set(KERNELS) & set(CPU_KERNELS) - {"cast"})


@pytest.mark.parametrize("name", TYPES)
def test_a_result_is_rounded_to_the_nearest_and_ties_to_even(name, monkeypatch):
    """To the last bit, as NumPy does it."""
    _, kernels = on_cupy(monkeypatch)
    narrow = np.dtype(TYPES[name][0])
    bits = np.arange(0, 1 << 16, 7, np.uint16)
    one, other = bits.view(narrow), bits[::-1].copy().view(narrow)
    found = np.empty_like(one)
    arrays = [StrictArray(a) for a in (one, other, found)]
    kernels["add"].run(arrays[:2], arrays[2:], {}, None)
    with np.errstate(all="ignore"):
        right = (one.astype("f4") + other.astype("f4")).astype(narrow)
    numbers = ~np.isnan(right.astype("f4"))
    assert np.isnan(found.astype("f4")[~numbers]).all()
    assert np.array_equal(found.view("u2")[numbers], right.view("u2")[numbers])
    assert numbers.sum() > 5000
