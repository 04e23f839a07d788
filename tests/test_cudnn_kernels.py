"""The library's kernels beside ours: the same functions, refused calls, the race."""

import ctypes
import logging

import numpy as np
import pytest

from mucudnn.backends.base import Kernel
from mucudnn.backends.cpu.kernels import bind as bind_cpu
from mucudnn.backends.cpu.threads import Workers
from mucudnn.backends.cuda.cudnn_kernels import (
    OPERATIONS,
    Case,
    CudnnKernels,
    LibraryCall,
)
from mucudnn.backends.cuda.descriptors import Descriptors, LiveSession
from mucudnn.backends.cuda.kernels.losses import GIVEN
from mucudnn.backends.cuda.libcudnn import (
    PROTOTYPES,
    Cudnn,
    NanPropagation,
    PoolingMode,
    Status,
)
from mucudnn.errors import BackendError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.operations import LIBRARY
from mucudnn.ir.tensor import TensorSpec
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.precision import to_mixed_precision
from tests.cuda_emulator import COMPILER
from tests.cuda_fake import FakeArray
from tests.cudnn_fake import FakeCudnn
from tests.cupy_fake import StrictArray, on_cupy
from tests.kernel_cases import normal, stale
from tests.training_cases import network

CPU = bind_cpu(Workers(1))
TOLERANCE = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-11}
BY_CUDNN = {LIBRARY: "cudnn"}


def window(kernel, stride=None, padding=None, extra=None, include=True):
    zeros = (0,) * len(kernel)
    return {
        "kernel": kernel,
        "stride": stride or kernel,
        "padding": padding or zeros,
        "extra": extra or zeros,
        "count_include_pad": include,
    }


POOLS = [  # image, what windows leave, windows
    ((2, 3, 8, 6), (2, 3, 4, 3), window((2, 2))),
    ((2, 3, 7, 9), (2, 3, 4, 5), window((3, 3), (2, 2), (1, 1))),
    ((2, 3, 7, 9), (2, 3, 4, 5), window((3, 3), (2, 2), (1, 1), include=False)),
    ((2, 3, 7, 9), (2, 3, 7, 4), window((3, 2), (1, 2), (1, 0), include=False)),
    ((2, 3, 11), (2, 3, 6), window((3,), (2,), (1,), include=False)),
    ((2, 2, 5, 4, 6), (2, 2, 5, 2, 3), window((3, 2, 2), (1, 2, 2), (1, 0, 0))),
    # Channels last, as kernels see them.
    ((2, 1, 7, 9, 4), (2, 1, 4, 5, 4), window((3, 3, 1), (2, 2, 1), (1, 1, 0))),
    ((2, 1, 9, 3), (2, 1, 5, 3), window((3, 1), (2, 1), (1, 0), include=False)),
    ((3, 5, 4, 4), (3, 5, 1, 1), window((4, 4))),
]


def pool_cases(dtype):
    for image, made, attrs in POOLS:
        x, dy = normal(*image, dtype=dtype), normal(*made, seed=1, dtype=dtype)
        for op in ("avg_pool", "max_pool"):
            results = [(made, dtype), (made, "u1")]
            yield op, [x], results[: 1 + (op == "max_pool")], attrs
        yield "avg_pool_grad", [dy], [(image, dtype)], attrs


IMAGES = [(3, 7, 4, 5), (2, 6, 9), (2, 3, 2, 3, 4), (40, 7)]
"""The last are images with their channels last, or what has no pixels."""


def lrn_cases(dtype):
    for shape in IMAGES:
        for size, beta in ((5, 0.75), (3, 1.0)):
            attrs = {"size": size, "alpha": 0.3, "beta": beta, "k": 1.5}
            x, dy = (normal(*shape, seed=i, dtype=dtype) for i in range(2))
            y = stale(shape, dtype)
            CPU["lrn"].run([x], [y], attrs, None)
            yield "lrn", [x], [(shape, dtype)], attrs
            yield "lrn_grad", [x, y, dy], [(shape, dtype)], attrs


def norm_cases(dtype):
    wide = "f8" if dtype == "float64" else "f4"
    for shape in IMAGES:
        channels = shape[1:2]
        x, dy = (normal(*shape, seed=i, dtype=dtype) for i in range(2))
        gamma, beta, mean, var = (
            normal(*channels, seed=i, dtype=wide) ** 2 + 0.5 for i in range(4)
        )
        numbers = [gamma, beta, mean, var]
        made, saved = (shape, dtype), (channels, wide)
        for update in (True, False):
            attrs = {"eps": 0.01, "momentum": 0.2, "update": update}
            yield "batch_norm", [x, *numbers], [made, saved, saved], attrs
        yield "batch_norm_eval", [x, *numbers], [made], {"eps": 0.01}
        inputs = [x, dy, gamma, mean, 1 / np.sqrt(var)]
        yield "batch_norm_grad", inputs, [made, saved, saved], {}


def softmax_cases(dtype):
    """Also logits whose exponentials no type holds."""
    for shape in [*IMAGES, (9, 1000), (2, 5, 1)]:
        labels = np.random.default_rng(1).integers(0, shape[1], (shape[0], *shape[2:]))
        for scale, shift in ((1, 0), (40, 1000)):
            x = (normal(*shape) * scale + shift).astype(dtype)
            made = [((), dtype), (shape, dtype)]
            yield "softmax_cross_entropy", [x, labels], made, {}


def cases(dtype):
    """Of every operation: (operation, inputs, results, attributes)."""
    yield from pool_cases(dtype)
    yield from lrn_cases(dtype)
    yield from norm_cases(dtype)
    yield from softmax_cases(dtype)


def refuse(*_):
    raise AssertionError("our kernel was called")


def picked_mean(inputs, outputs, attrs, workspace):
    """What the library leaves of a softmax with cross entropy."""
    assert attrs[GIVEN]
    labels, (loss, logarithms) = inputs[1].host, (a.host for a in outputs)
    loss[...] = -np.take_along_axis(logarithms, labels[:, None], 1).mean(dtype="f8")


def kernels_over(library, own=None):
    """The library's kernels, and what is beside them: by default what fails."""
    made = CudnnKernels(LiveSession(library, lambda: 7))
    own = own or {
        op: Kernel(picked_mean if OPERATIONS[op].left else refuse) for op in OPERATIONS
    }
    return made, made.beside(own)


def on_host(kernel):
    """A kernel of the CPU on fake arrays."""

    def run(inputs, outputs, attrs, workspace):
        kernel.run([a.host for a in inputs], [a.host for a in outputs], attrs, None)

    return Kernel(run, kernel.workspace)


def in_float64(op, inputs, results, attrs):
    """What should come out, in float64, and what becomes of the inputs."""
    wide = [a.astype("f8") if a.dtype.kind == "f" else a.copy() for a in inputs]
    made = [stale(s, "f8" if np.dtype(d).kind == "f" else d) for s, d in results]
    CPU[op].run(wide, made, attrs, None)
    return made, wide


def agree(op, arrays, expected, dtype, of_device=1):
    tolerance = TOLERANCE[dtype] * of_device
    for place, (array, right) in enumerate(zip(arrays, expected, strict=True)):
        scale = max(1.0, np.abs(right).max(initial=0))
        np.testing.assert_allclose(
            array.host.astype("f8"),
            right,
            rtol=tolerance,
            atol=tolerance * scale,
            err_msg=f"{op} {place}",
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_function_is_ours_in_float64(dtype):
    library, seen = FakeCudnn(), set()
    _, kernels = kernels_over(library)
    for op, inputs, results, attrs in cases(dtype):
        expected, after = in_float64(op, inputs, results, attrs)
        reads = [FakeArray.of(a) for a in inputs]
        writes = [FakeArray.of(stale(*result)) for result in results]
        arguments = reads, writes, {**attrs, **BY_CUDNN}, None
        call, before = kernels[op].call(*arguments), len(library.ran)
        call()
        kept = [i for i in range(len(writes)) if i not in OPERATIONS[op].unwritten]
        agree(op, [writes[i] for i in kept], [expected[i] for i in kept], dtype)
        agree(op, reads, after, dtype)
        assert library.ran[before:] == [OPERATIONS[op].function]
        seen.add(op)
    assert seen == set(OPERATIONS)
    handles = {library.streams[o] for o in library.streams}
    assert handles == {7}


def test_what_is_not_asked_of_the_library_is_ours():
    ran = []
    own = {op: Kernel(lambda *_: ran.append(1)) for op in OPERATIONS}
    library = FakeCudnn()
    _, kernels = kernels_over(library, own)
    for op, inputs, results, attrs in cases("float32"):
        arrays = [FakeArray.of(a) for a in inputs]
        writes = [FakeArray.of(stale(*result)) for result in results]
        kernels[op].run(arrays, writes, attrs, None)
        kernels[op].call(arrays, writes, attrs, None)()
    x = FakeArray.of(normal(1, 1, 1, 1))  # a result in the place of what is read
    kernels["avg_pool"].run([x], [x], {**window((1, 1)), **BY_CUDNN}, None)
    assert len(ran) == 2 * len(list(cases("float32"))) + 1
    assert not library.ran


def test_nan_is_above_all_numbers():
    _, kernels = kernels_over(FakeCudnn())
    x = normal(1, 1, 4, 4)
    x[0, 0, 1, 1] = np.nan
    y, index = FakeArray.of(np.zeros((1, 1, 2, 2))), FakeArray.of(np.zeros(4, "u1"))
    attrs = {**window((2, 2)), **BY_CUDNN}
    kernels["max_pool"].run([FakeArray.of(x)], [y, index], attrs, None)
    assert np.isnan(y.host).ravel().tolist() == [True, False, False, False]


# What the library does not take.


def takes(op, inputs, results, attrs):
    made = [stale(*result) for result in results]
    return OPERATIONS[op].takes(Case.of(op, inputs, made, attrs))


def test_windows_that_only_we_count_right_stay_ours():
    """Partial ones at the end, and those of a strip, which has no padding below."""
    x = np.zeros((2, 3, 7, 7), "f4")
    last = window((2, 2), extra=(1, 1))
    assert not takes("avg_pool", [x], [((2, 3, 4, 4), "f4")], last)
    assert takes("avg_pool", [x], [((2, 3, 3, 3), "f4")], window((2, 2)))
    strip = window((3, 3), (1, 1), (1, 1))
    assert not takes("avg_pool", [x], [((2, 3, 6, 7), "f4")], strip)
    assert not takes("avg_pool_grad", [x[:, :, :6]], [(x.shape, "f4")], strip)
    four = np.zeros((1, 2, 3, 3, 3, 3), "f4")
    cube = window((3, 3, 3, 3))
    assert not takes("avg_pool", [four], [((1, 2, 1, 1, 1, 1), "f4")], cube)
    for shape in ((0, 3, 4, 4), (1 << 20, 64, 16, 16)):  # no elements, or too many
        x, y = (np.broadcast_to(np.float32(0), (*shape[:2], n, n)) for n in (16, 2))
        case = Case.of("avg_pool", [x], [y], window((8, 8)))
        assert not OPERATIONS["avg_pool"].takes(case)


@pytest.mark.parametrize(
    "other", [{"size": 4}, {"size": 17}, {"k": 0.0}, {"beta": 0.0}]
)
@pytest.mark.parametrize("op", ["lrn", "lrn_grad"])
def test_neighbours_that_are_others_stay_ours(op, other):
    """Even windows lean to the other side, and what the library limits is refused."""
    x = np.zeros((2, 20, 3, 3), "f4")
    usual = {"size": 5, "alpha": 1e-4, "beta": 0.75, "k": 1.0}
    inputs = [x] * (1 if op == "lrn" else 3)
    assert takes(op, inputs, [(x.shape, "f4")], usual)
    assert not takes(op, inputs, [(x.shape, "f4")], usual | other)


def test_statistics_of_another_type_or_of_one_sample_stay_ours():
    def taken(shape, dtype="f2", wide="f4"):
        numbers = [np.ones(shape[1:2], wide) for _ in range(4)]
        saved = (shape[1:2], wide)
        attrs = {"eps": 0.0, "momentum": 0.1, "update": True}
        inputs = [np.zeros(shape, dtype), *numbers]
        return takes("batch_norm", inputs, [(shape, dtype), saved, saved], attrs)

    assert taken((2, 3, 4))
    assert not taken((2, 3, 4), wide="f2")
    assert not taken((2, 3, 4), dtype="f4", wide="f8")
    assert not taken((1, 3, 1))
    assert not taken((1, 3))
    assert taken((2, 3))


def pooled(training=True):
    g = GraphBuilder(training=training)
    x = g.conv(g.input("image", (4, 3, 8, 8)), 4, 3, padding=1)
    x = g.avg_pool(g.max_pool(g.relu(x), 2), 2)
    logits = g.linear(g.flatten(x), 3)
    return g.build(g.softmax_cross_entropy(logits, g.input("label", (4,), "int64")))


def offered(graph, library):
    return {node.op for node in graph.nodes if library.offers(graph, node)}


def test_maxima_are_the_librarys_where_nobody_asks_where_they_were():
    made, _ = kernels_over(FakeCudnn())
    anyway = {"avg_pool", "softmax_cross_entropy"}
    assert offered(pooled(training=False), made) == {*anyway, "max_pool"}
    assert offered(training_graph(pooled()), made) == {*anyway, "avg_pool_grad"}


# Calls that fail.


@pytest.mark.parametrize(
    "function", ["cudnnSetPoolingNdDescriptor", "cudnnPoolingForward"]
)
@pytest.mark.parametrize("status", [Status.NOT_SUPPORTED, Status.EXECUTION_FAILED])
def test_whatever_the_library_answers_ours_runs(function, status, caplog):
    library = FakeCudnn()
    own = {op: on_host(CPU[op]) for op in OPERATIONS}
    _, kernels = kernels_over(library, own)
    library.fail(function, status)
    x, attrs = normal(2, 3, 4, 4), window((2, 2))
    expected, _ = in_float64("avg_pool", [x], [((2, 3, 2, 2), "f8")], attrs)
    with caplog.at_level(logging.WARNING, logger="mucudnn"):
        for _ in range(2):
            y = FakeArray.of(stale((2, 3, 2, 2)))
            arguments = [FakeArray.of(x)], [y], {**attrs, **BY_CUDNN}, None
            call = kernels["avg_pool"].call(*arguments)
            for _ in range(2):
                y.host[...] = np.nan
                call()
                agree("avg_pool", [y], expected, "float64")
    assert not library.ran
    (said,) = caplog.records
    assert "our kernel computes avg_pool of float64" in said.getMessage()
    assert function in said.getMessage()


def test_what_was_refused_is_not_offered_again():
    library, graph = FakeCudnn(), pooled(training=False)
    node = next(n for n in graph.nodes if n.op == "avg_pool")
    made, kernels = kernels_over(library, {op: on_host(CPU[op]) for op in OPERATIONS})
    assert made.offers(graph, node)
    library.fail("cudnnPoolingForward", Status.NOT_SUPPORTED)
    x, y = (
        FakeArray.of(np.zeros(graph.tensors[name].shape, "f4"))
        for name in (*node.inputs, *node.outputs)
    )
    kernels["avg_pool"].run([x], [y], {**node.attrs, **BY_CUDNN}, None)
    assert not made.offers(graph, node)


def test_descriptors_go_with_the_call_that_has_them():
    library = FakeCudnn()
    _, kernels = kernels_over(library)
    arrays = [FakeArray.of(normal(1, 1, 4, 4))], [FakeArray.of(normal(1, 1, 2, 2))]
    attrs = {**window((2, 2)), **BY_CUDNN}
    call = kernels["avg_pool"].call(*arrays, attrs, None)
    assert len(library.alive("Tensor")) == 2
    assert len(library.alive("Pooling")) == 1
    del call
    assert not library.alive("Tensor")
    assert not library.alive("Pooling")


# The real library, without a device.


@pytest.fixture(scope="module")
def real(cudnn_library):
    return Cudnn(cudnn_library.cdll)


@pytest.mark.cudnn
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_real_library_takes_every_description(dtype, real):
    """Calls are made but for the handle, which needs a device."""
    for op, inputs, results, attrs in cases(dtype):
        made = [stale(*result) for result in results]
        case, found = Case.of(op, inputs, made, attrs), OPERATIONS[op]
        assert found.takes(case)
        call = LibraryCall(real, case, [512] * len(inputs), [1024] * len(made))
        arguments = found.arguments(call)
        _, kinds = PROTOTYPES[found.function]
        for kind, value in zip(kinds[1:], arguments, strict=True):
            kind.from_param(value)


@pytest.mark.cudnn
def test_windows_are_counted_as_the_real_library_does(real, cudnn_library):
    asked = cudnn_library.cdll.cudnnGetPoolingNdForwardOutputDim
    for op, inputs, results, attrs in pool_cases("float32"):
        if op != "avg_pool":
            continue
        y = stale(*results[0])
        call = LibraryCall(real, Case.of(op, inputs, [y], attrs), [512], [1024])
        windows, _, x, *_ = OPERATIONS[op].arguments(call)
        rank = max(4, inputs[0].ndim)
        dims = (ctypes.c_int * rank)()
        if asked(ctypes.c_void_p(windows), ctypes.c_void_p(x), rank, dims):
            rank -= 1  # channels last: an axis less than kernels see
            dims = (ctypes.c_int * rank)()
            assert not asked(ctypes.c_void_p(windows), ctypes.c_void_p(x), rank, dims)
        assert np.prod(dims) == y.size


@pytest.mark.cudnn
def test_what_the_real_library_refuses_is_told(real):
    descriptors = Descriptors(real)
    mode, nan = PoolingMode.MAX, NanPropagation.PROPAGATE_NAN
    with pytest.raises(BackendError, match="cudnnSetPoolingNdDescriptor"):
        descriptors.create("Pooling", "PoolingNd", mode, nan, -1, None, None, None)
    for wrong in ((17, 1.0, 0.75, 1.0), (5, 1.0, 0.0, 1.0), (5, 1.0, 0.75, 0.0)):
        with pytest.raises(BackendError, match="cudnnSetLRNDescriptor"):
            descriptors.create("LRN", "LRN", *wrong)


# And on one.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_function_is_ours_on_a_gpu(dtype, cuda):
    """Whatever the library refuses there is computed by our kernel."""
    import cupy

    for op, inputs, results, attrs in cases(dtype):
        expected, after = in_float64(op, inputs, results, attrs)
        reads = [cupy.asarray(a) for a in inputs]
        writes = [cupy.asarray(stale(*result)) for result in results]
        kernel = cuda.kernels[op]
        made = [Case.of(op, each, [], {}).inputs for each in (inputs, writes)]
        specs = [[TensorSpec("t", t.shape, t.dtype) for t in each] for each in made]
        scratch = cupy.empty(kernel.workspace(*specs, attrs) + 1, "u1")
        kernel.call(reads, writes, {**attrs, **BY_CUDNN}, scratch)()
        kept = [i for i in range(len(writes)) if i not in OPERATIONS[op].unwritten]
        found = [cupy.asnumpy(a) for a in (*(writes[i] for i in kept), *reads)]
        right = [*(expected[i] for i in kept), *after]
        agree(op, [FakeArray(a) for a in found], right, dtype, of_device=10)


OP = "softmax_cross_entropy"
SHAPES = ((5, 8), (300, 3), (3, 4, 5, 6), (2, 3, 1))
ROUNDING = {"f2": 2e-3, "f4": 1e-5, "f8": 1e-11}

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
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradient_are_those_of_float64(shape, dtype, beside):
    library, kernels = beside
    labels = drawn(shape)
    for scale, shift in ((1, 0), (30, 0), (30, 1000)):
        x = (normal(*shape) * scale + shift).astype(dtype)
        for one, two in zip(asked(kernels, x, labels), exact(x, labels), strict=True):
            np.testing.assert_allclose(
                one, two, rtol=ROUNDING[dtype], atol=ROUNDING[dtype]
            )
    assert library.ran == ["cudnnSoftmaxForward"] * 3


@emulated
@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_probability_of_0_has_a_loss_and_a_gradient(dtype, beside):
    """Its logarithm is far below what its exponential, or half of it, can be."""
    _, kernels = beside
    far = 60000.0
    x = np.array([[far, -far, 0], [0, far, -far], [0, 0, 0], [1, 1, 1]], dtype)
    labels = np.array([0, 1, 1, 2])
    for changed in (labels, np.array([0, 0, 0, 0])):
        loss, _, dx = asked(kernels, x, changed)
        right, _, gradient = exact(x, changed)
        np.testing.assert_allclose(loss, right, rtol=ROUNDING[dtype])
        np.testing.assert_allclose(dx, gradient, atol=ROUNDING[dtype])
    # No float16 has the difference of the first two, but a quarter of it.
    x = np.array([[far, -far], [1, 1], [1, 1], [1, 1]], dtype)
    for logits, wrong in ((x, 1), (x[:, ::-1].copy(), 0)):
        labels = np.array([wrong, 0, 0, 0])
        loss, logarithms, _ = asked(kernels, logits, labels)
        assert np.isinf(logarithms[0, wrong]) == (dtype == "f2")
        right = exact(logits, labels)[0]
        np.testing.assert_allclose(loss, right, rtol=ROUNDING[dtype])


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
    # A probability of nearly 1 has a gradient: 2e-9 from 1 is no float32.
    x, labels = np.array([[20.0, 0.0]], "f4"), np.array([0])
    *_, dx = asked(kernels, x, labels, library)
    np.testing.assert_allclose(dx, exact(x, labels)[2], rtol=1e-5)


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
