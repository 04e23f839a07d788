"""Losses of narrow logits: read as they are, answered in single precision."""

import numpy as np
import pytest

from mucudnn.backends.cpu.kernels import bind as bind_cpu
from mucudnn.backends.cpu.threads import Workers
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.precision import to_mixed_precision
from tests.cuda_emulator import COMPILER
from tests.cupy_fake import StrictArray, on_cupy
from tests.kernel_cases import prepared
from tests.training_cases import network

SHAPES = ((5, 8), (9, 7), (3, 4, 5, 6), (2, 1000), (2, 3, 1))


def test_logits_are_not_cast():
    graph = training_graph(to_mixed_precision(network(4), "float16"))
    for op, results in (
        ("softmax_cross_entropy", {"float32"}),
        ("accuracy", {"float32"}),
    ):
        (node,) = (n for n in graph.nodes if n.op == op)
        logits = graph.tensors[node.inputs[0]]
        assert logits.dtype == "float16"
        assert {graph.tensors[name].dtype for name in node.outputs} == results
    (node,) = (n for n in graph.nodes if n.op == "softmax_cross_entropy_grad")
    assert graph.tensors[node.outputs[0]].dtype == "float16"
    assert graph.tensors[node.inputs[0]].dtype == "float32"
    cast = {n.inputs[0] for n in graph.nodes if n.op == "cast"}
    assert logits.name not in cast


def answers(kernels, shape, dtype, wrap, count="f4"):
    """Loss, log-probabilities, gradient and right answers, of logits in a type."""
    rng = np.random.default_rng(2)
    x = rng.normal(0, 3, shape).astype("f2").astype(dtype)
    labels = rng.integers(0, shape[1], (shape[0], *shape[2:]))
    wide = np.promote_types(dtype, "f4")
    loss, p = np.full((), np.nan, wide), np.full(shape, np.nan, wide)
    dx, right = np.full(shape, np.nan, dtype), np.full((), 113, count)
    scale = np.full((), 64, wide)
    calls = (
        ("softmax_cross_entropy", (x, labels), (loss, p), {}),
        ("softmax_cross_entropy_grad", (p, labels, scale), (dx,), {}),
        ("accuracy", (x, labels), (right,), {"k": 2}),
    )
    for op, given, made, attrs in calls:
        call, _ = prepared(kernels[op], given, made, attrs, wrap)
        call()
    return loss, p, dx, right


def same(kernels, shape, wrap):
    """What casting before and after gives, to the last bit, and nearly float64's."""
    loss, p, dx, right = answers(kernels, shape, "f2", wrap)
    wide = answers(kernels, shape, "f4", wrap)
    assert (loss.dtype, p.dtype, dx.dtype) == ("f4", "f4", "f2")
    for one, two in zip((loss, p, dx, right), wide, strict=True):
        assert np.array_equal(one, two.astype(one.dtype))
    exact = answers(bind_cpu(Workers(1)), shape, "f8", lambda a: a)
    for one, two, tolerance in zip(
        (loss, p, dx, right), exact, (1e-5, 1e-5, 1e-3, 0), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")
@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_right_answers_are_counted_in_the_type_of_the_result(dtype):
    """A network counts in a float of its own type, a total may be an integer."""
    for count in ("f4", "i8"):
        with pytest.MonkeyPatch.context() as patch:
            _, kernels = on_cupy(patch)
            *_, found = answers(kernels, (50, 7), dtype, StrictArray, count)
        cpu = bind_cpu(Workers(1))
        *_, expected = answers(cpu, (50, 7), "f8", lambda a: a, count)
        assert found == expected
        assert 0 < expected < 50


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cpu_reads_narrow_logits(shape):
    same(bind_cpu(Workers(2)), shape, lambda a: a)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")
def test_a_gpu_reads_narrow_logits(monkeypatch):
    _, kernels = on_cupy(monkeypatch)
    for shape in SHAPES:
        same(kernels, shape, StrictArray)
