"""cuDNN's softmax with our kernel behind it: the loss, and a gradient from both."""

import numpy as np
import pytest

from mucudnn.backends.cpu.kernels import bind as bind_cpu
from mucudnn.backends.cpu.threads import Workers
from mucudnn.backends.cuda.cudnn_kernels import OPERATIONS, Case, CudnnKernels
from mucudnn.backends.cuda.descriptors import LiveSession
from mucudnn.backends.cuda.libcudnn import Status
from mucudnn.ir.operations import LIBRARY
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.precision import to_mixed_precision
from tests.cuda_emulator import COMPILER
from tests.cudnn_fake import FakeCudnn
from tests.cupy_fake import StrictArray, on_cupy
from tests.kernel_cases import normal
from tests.training_cases import network

CPU = bind_cpu(Workers(1))
OP = "softmax_cross_entropy"
SHAPES = ((5, 8), (300, 3), (3, 4, 5, 6), (2, 3, 1))
TOLERANCE = {"f2": 2e-3, "f4": 1e-5, "f8": 1e-11}

emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")


@pytest.fixture
def beside(monkeypatch):
    """The library, and our kernels on the stand-in for CuPy beside it."""
    _, kernels = on_cupy(monkeypatch)
    library = FakeCudnn()
    return library, CudnnKernels(LiveSession(library, lambda: 0)).beside(kernels)


def asked(kernels, x, labels, library="cudnn"):
    """Loss, logarithms of probabilities and the gradient of the logits."""
    loss, dx = np.full((), np.nan, x.dtype), np.full_like(x, np.nan)
    made, scale = np.full_like(x, np.nan), np.full((), 3, x.dtype)
    for op, given, results in (
        (OP, (x, labels), (loss, made)),
        (f"{OP}_grad", (made, labels, scale), (dx,)),
    ):
        scratch = np.full(kernels[op].workspace(given, results, {}) + 1, 0xFF, "u1")
        arrays = [[StrictArray(a) for a in some] for some in (given, results)]
        attrs = {LIBRARY: library} if op == OP else {}
        kernels[op].call(*arrays, attrs, StrictArray(scratch))()
    return loss, made, dx


def exact(x, labels):
    """The same in float64, written down plainly."""
    x = x.astype("f8")
    highest = x.max(1, keepdims=True)
    logarithms = x - highest - np.log(np.exp(x - highest).sum(1, keepdims=True))
    picked = np.take_along_axis(logarithms, labels[:, None], 1)
    gradient = np.exp(logarithms)
    np.put_along_axis(gradient, labels[:, None], np.expm1(picked), 1)
    return -picked.mean(), logarithms, 3 / labels.size * gradient


def drawn(shape):
    return np.random.default_rng(3).integers(0, shape[1], (shape[0], *shape[2:]))


@emulated
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradient_are_those_of_float64(shape, dtype, beside):
    library, kernels = beside
    labels = drawn(shape)
    for scale, shift in ((1, 0), (30, 0), (30, 1000)):
        x = (normal(*shape) * scale + shift).astype(dtype)
        for one, two in zip(asked(kernels, x, labels), exact(x, labels), strict=True):
            np.testing.assert_allclose(
                one, two, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )
    assert library.ran == ["cudnnSoftmaxForward"] * 3


@emulated
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_probability_of_0_has_a_loss_and_a_gradient(dtype, beside):
    """Its logarithm is far below what its exponential, or half of it, can be."""
    _, kernels = beside
    far = 60000.0
    x = np.array([[far, -far, 0], [0, far, -far], [0, 0, 0], [1, 1, 1]], dtype)
    labels = np.array([0, 1, 1, 2])
    for changed in (labels, np.array([0, 0, 0, 0])):
        loss, _, dx = asked(kernels, x, changed)
        right, _, gradient = exact(x, changed)
        np.testing.assert_allclose(loss, right, rtol=TOLERANCE[dtype])
        np.testing.assert_allclose(dx, gradient, atol=TOLERANCE[dtype])
    # No float16 has the difference of the first two, but a quarter of it.
    x = np.array([[far, -far], [1, 1], [1, 1], [1, 1]], dtype)
    for logits, wrong in ((x, 1), (x[:, ::-1].copy(), 0)):
        labels = np.array([wrong, 0, 0, 0])
        loss, logarithms, _ = asked(kernels, logits, labels)
        assert np.isinf(logarithms[0, wrong]) == (dtype == "f2")
        right = exact(logits, labels)[0]
        np.testing.assert_allclose(loss, right, rtol=TOLERANCE[dtype])


@emulated
@pytest.mark.parametrize("library", ["cudnn", "none"])
def test_a_probability_of_nearly_1_has_a_gradient(library, beside):
    """It is 2e-9 from 1, which no float32 is."""
    _, kernels = beside
    x, labels = np.array([[20.0, 0.0]], "f4"), np.array([0])
    *_, dx = asked(kernels, x, labels, library)
    np.testing.assert_allclose(dx, exact(x, labels)[2], rtol=1e-5)


@emulated
@pytest.mark.parametrize("library", ["cudnn", "none"])
def test_what_cannot_be_is_said_by_both_alike(library, beside):
    _, kernels = beside
    x = np.array([[0.0, -np.inf, 1.0], [2.0, 1.0, 0.0]], "f4")
    assert np.isinf(asked(kernels, x, np.array([1, 0]), library)[0])
    assert np.isfinite(asked(kernels, x, np.array([2, 0]), library)[0])
    for wrong in (-1, 3, 1 << 40):
        loss, made, _ = asked(kernels, x, np.array([0, wrong]), library)
        assert np.isnan(loss)
        assert np.isfinite(made[1]).all()
    x[0, 0] = np.nan
    assert np.isnan(asked(kernels, x, np.array([2, 0]), library)[0])


@emulated
def test_what_the_library_refuses_is_all_ours(beside):
    library, kernels = beside
    library.fail("cudnnSoftmaxForward", Status.NOT_SUPPORTED)
    x, labels = normal(6, 5, dtype="f4"), drawn((6, 5))
    found = asked(kernels, x, labels)
    assert not library.ran
    for one, two in zip(found, asked(kernels, x, labels, "none"), strict=True):
        assert np.array_equal(one, two)


def test_logits_that_are_narrower_than_the_loss_stay_ours():
    found = {}
    for precision in (None, "float16"):
        graph = (
            network(4)
            if precision is None
            else to_mixed_precision(network(4), precision)
        )
        made, graph = CudnnKernels(LiveSession(FakeCudnn(), int)), training_graph(graph)
        (node,) = (n for n in graph.nodes if n.op == OP)
        found[precision] = made.offers(graph, node)
    assert found == {None: True, "float16": False}
    x = np.zeros((0, 3), "f4")
    case = Case.of(OP, [x, np.zeros(0, "i8")], [np.zeros((), "f4"), x], {})
    assert not OPERATIONS[OP].takes(case)
