"""The GPU's kernels of a training step against the CPU's: emulated, and on a GPU."""

import functools
import sys

import numpy as np
import pytest

from mucudnn.backends.cpu.kernels import KERNELS as CPU_KERNELS, bind as bind_cpu
from mucudnn.backends.cpu.threads import Workers
from mucudnn.backends.cuda.kernels import (
    KERNELS,
    PROGRAMS,
    bind,
    elementwise,
    launch as program,
)
from mucudnn.backends.cuda.kernels.launch import CupyLauncher, compiler_options
from mucudnn.backends.cuda.kernels.losses import GIVEN
from mucudnn.errors import BackendError, UnsupportedError
from tests.commands import python
from tests.cuda_emulator import COMPILER, Emulator
from tests.kernel_cases import ADAM, normal
from tests.mirror_cases import Case, cases, channels_last_cases, compute
from tests.nvrtc import compiled

CPU = bind_cpu(Workers(1))
TYPES = ("float32", "float64", "float16", "bfloat16")
WIDE = ("float32", True)
TOLERANCE = {"f8": 1e-11, "f4": 2e-5}
emulated = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")


def agree(actual, expected, tolerance, case):
    assert actual.dtype == expected.dtype
    if expected.dtype.kind != "f":
        assert np.array_equal(actual, expected), case
        return
    scale = max(1.0, np.abs(expected[np.isfinite(expected)]).max(initial=0))
    np.testing.assert_allclose(
        actual, expected, rtol=tolerance, atol=tolerance * scale, err_msg=case.op
    )


@functools.cache
def all_cases(dtype):
    return (*cases(dtype), *channels_last_cases(dtype))


def mirror(kernels, dtype, only=None, **moves):
    """Every case, in every place that a result may have; returns the operations."""
    seen = set()
    for case in all_cases(dtype):
        if only not in (None, case.op):
            continue
        for place in (None, *case.traits.overwrites):
            expected = compute(CPU[case.op], case)
            actual = compute(kernels[case.op], case, place=place, **moves)
            kept = [i for i in range(len(case.inputs)) if i != place]
            count = len(case.outputs)
            expected = expected[:count] + [expected[count + i] for i in kept]
            for one, other in zip(actual, expected, strict=True):
                agree(one, other, TOLERANCE[dtype], case)
        seen.add(case.op)
    return seen


def mean_of_what_is_given(kernel, dtype):
    """The loss alone, where a library has written logarithms of probabilities."""
    x, labels = normal(3, 7, 90, dtype=dtype), np.arange(270).reshape(3, 90) % 7
    case = Case("softmax_cross_entropy", [x, labels], [((), dtype), (x.shape, dtype)])
    expected, logarithms, *_ = compute(CPU[case.op], case)
    loss, kept = np.full((), np.nan, dtype), logarithms.copy()
    scratch = np.full(kernel.workspace(case.inputs, [], {}), 0xFF, "u1")
    kernel.run(case.inputs, [loss, logarithms], {GIVEN: True}, scratch)
    agree(loss, expected, TOLERANCE[dtype], case)
    assert np.array_equal(logarithms, kept)


def test_the_table_is_the_cpus():
    assert set(KERNELS) == set(CPU_KERNELS)


def test_the_table_is_imported_without_cupy_and_numpy():
    code = (
        "import sys, mucudnn.backends.cuda.kernels as k, mucudnn.backends.cuda; "
        "assert len(k.KERNELS) > 40; "
        "sys.exit(bool({'cupy', 'numpy'} & set(sys.modules)))"
    )
    python("-c", code)


# Emulated.


@emulated
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "how"), [("f8", {}), ("f4", {"backwards": True}), ("f8", {"wide": True})]
)
def test_every_kernel_does_on_the_host_what_the_cpus_does(dtype, how):
    emulator = Emulator(**how)
    kernels = bind(emulator)
    assert mirror(kernels, dtype) == set(KERNELS)
    for op in (op for op in KERNELS if KERNELS[op].run_batched):
        calls = [(inputs, [], attrs, None) for inputs, attrs in several(op, dtype)]
        kernels[op].run_batched(calls)()
    mean_of_what_is_given(kernels["softmax_cross_entropy"], dtype)
    every = {(p, name) for p in PROGRAMS.values() for name in p.kernels}
    assert emulator.launched == every


@emulated
def test_labels_that_are_no_classes_are_told_by_nan():
    kernels = bind(Emulator())
    x = np.zeros((3, 4))
    for wrong in (-1, 4, 1 << 40):
        labels = np.array([0, wrong, 1])
        case = Case("softmax_cross_entropy", [x, labels], [((), "f8"), ((3, 4), "f8")])
        loss, p, *_ = compute(kernels[case.op], case)
        assert np.isnan(loss)
        assert np.allclose(p, np.log(0.25))
        case = Case("accuracy", [x, labels], [((), "i8")], {"k": 1})
        assert compute(kernels["accuracy"], case)[0] == 2


def several(op, dtype, scaled=0):
    """Calls of an update of tensors of odd sizes, one of them not aligned."""
    lr, scale = np.array(0.1, dtype), np.array(4, dtype)
    step, counts = np.array(5), np.array([scaled == 2, 1, 2])
    common = ADAM | {"momentum": 0.9, "nesterov": True, "alpha": 0.9, "factor": 0.5}
    states = {"sgd": 0, "adam": 2}.get(op, 1)
    for i, (size, decay) in enumerate(
        [(3, 0.0), (0, 0.0), (4100, 0.02), (1, 0.0), (8193, 0.5), (4096, 0.02)]
    ):
        room = [normal(size + 1, seed=9 * i + k, dtype=dtype) for k in range(4)]
        w, dw, *state = (a[1:] if i == 4 else a[:-1] for a in room)
        kept = [np.abs(s) for s in state[:states]]
        attrs = common | {"weight_decay": decay, "gradient_scale": 0.25}
        told = [lr, step] if op == "adam" else [lr]
        if op == "accumulate":
            yield [w, dw], attrs
        elif op == "find_overflow":
            yield [w, counts], attrs
        elif scaled:
            yield [w, dw, *told, *kept, scale, counts], attrs | {"scaled": True}
        else:
            yield [w, dw, *told, *kept], attrs


@emulated
@pytest.mark.parametrize("scaled", [0, 1, 2])
@pytest.mark.parametrize("op", [name for name in KERNELS if KERNELS[name].run_batched])
def test_updates_together_are_the_updates_one_by_one(op, scaled):
    """To the last bit, whatever is aligned, with a decay and without."""
    emulator = Emulator()
    kernel = bind(emulator)[op]
    apart, joint = (list(several(op, "f4", scaled)) for _ in range(2))
    for inputs, attrs in apart:
        kernel.run(inputs, [], attrs, None)
    emulator.launched.clear()
    launch = kernel.run_batched([(inputs, [], attrs, None) for inputs, attrs in joint])
    assert emulator.launched == set()  # it was made ready
    launch()
    assert {name for _, name in emulator.launched} == {f"{op}_all"}
    for (one, _), (other, _) in zip(apart, joint, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.tobytes() == b.tobytes()


@emulated
@pytest.mark.parametrize("blocks", [1, 3, 1 << 16])
@pytest.mark.parametrize("op", ["add", "scale", "momentum", "accumulate"])
def test_every_element_is_computed_once_in_place(op, blocks, monkeypatch):
    """By any number of blocks; what follows the last element is not touched."""
    monkeypatch.setattr(program, "_MOST_BLOCKS", blocks)
    kernel, attrs = bind(Emulator())[op], ADAM | {"momentum": 1.0, "factor": 2.0}
    attrs |= {"weight_decay": 0.0, "gradient_scale": 1.0, "nesterov": False}
    for size in (1, 4, 6, 4095, 8197):
        x, other, state = np.ones((3, 8208), "f4")  # each aligned
        inputs = [x[:size], other[:size]][: 1 if op == "scale" else 2]
        more = [np.array(0.5, "f4"), state[:size]] if op == "momentum" else []
        outputs = [x[:size]] if op in ("add", "scale") else []
        kernel.run([*inputs, *more], outputs, attrs, None)
        found = {"momentum": 0.0, "accumulate": 3.0}.get(op, 2.0)
        assert (x[:size] == found).all(), size
        assert all((room[size:] == 1).all() for room in (x, other, state)), size


@emulated
@pytest.mark.parametrize("blocks", [1, 3])
def test_threads_go_on_without_dividing(blocks, monkeypatch):
    """Over rows, planes and images of odd sizes, several of each at a step."""
    monkeypatch.setattr(program, "_MOST_WALKING", blocks)
    kernels = bind(Emulator())
    walking = ("max_pool", "avg_pool", "softmax_cross_entropy_grad")
    for case in cases("f4"):
        if case.op.startswith(walking):
            expected = compute(CPU[case.op], case)
            for one, other in zip(
                compute(kernels[case.op], case), expected, strict=True
            ):
                agree(one, other, TOLERANCE["f4"], case)


@emulated
@pytest.mark.parametrize("backwards", [False, True])
def test_a_block_turns_one_square_after_another(backwards, monkeypatch):
    """None is overwritten while others still read it."""
    monkeypatch.setattr(elementwise, "_MOST_BLOCKS", 2)
    kernel = bind(Emulator(backwards=backwards))["to_channels_last"]
    x = normal(3, 65, 7, 10)
    found = np.empty((3, 7, 10, 65), x.dtype)
    kernel.run([x], [found], {}, None)
    assert np.array_equal(found, np.moveaxis(x, 1, -1))


@emulated
def test_a_mask_goes_on_where_a_grid_ends(monkeypatch):
    monkeypatch.setattr(elementwise, "_MOST_RUNS", 2)
    attrs = {"p": 0.4, "seed": 3, "offset": 5, "run": 21, "apart": 50}
    case = Case("dropout", [normal(7, 21), np.array(2)], [((7, 21), "f8")], attrs)
    kernel = bind(Emulator())["dropout"]
    for one, other in zip(
        compute(kernel, case), compute(CPU["dropout"], case), strict=True
    ):
        assert np.array_equal(one, other)


@emulated
def test_an_overflow_is_found_wherever_it_is():
    kernel = bind(Emulator())["find_overflow"]
    for place in (None, 0, 4095, 4096, 8192):
        tensors, counts = [np.ones(n, "f4") for n in (5, 8193, 1)], np.zeros(3, "i8")
        if place is not None:
            tensors[1][place] = np.inf
        kernel.run_batched([([t, counts], [], {}, None) for t in tensors])()
        assert counts.tolist() == [place is not None, 0, 0]


@emulated
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_batch_norm_made_again_by_its_statistics_has_the_same_bits(dtype):
    kernels = bind(Emulator())
    rng = np.random.default_rng(0)
    x, *channels = (rng.random(s).astype(dtype) for s in ((4, 3, 5, 5), *[(3,)] * 4))
    specs = [((4, 3, 5, 5), dtype), ((3,), dtype), ((3,), dtype)]
    attrs = {"eps": 1e-5, "momentum": 0.1, "update": True}
    whole = Case("batch_norm", [x, *channels], specs, attrs)
    y, mean, inv_std, *_ = compute(kernels[whole.op], whole)
    again = Case("batch_norm_apply", [x, *channels[:2], mean, inv_std], specs[:1])
    assert np.array_equal(compute(kernels[again.op], again)[0], y)


@emulated
@pytest.mark.parametrize("images", [1, 65535])
@pytest.mark.parametrize("channels", [1, 3, 8, 9])
def test_images_of_few_channels_are_turned(channels, images, monkeypatch):
    """By as few blocks as one for each part of an image, and back."""
    monkeypatch.setattr(elementwise, "_MOST_IMAGES", images)
    emulator = Emulator()
    kernels = bind(emulator)
    x = normal(3, channels, 19, 31, dtype="f4")
    turned, again = np.empty((3, 19, 31, channels), "f4"), np.empty_like(x)
    kernels["to_channels_last"].run([x], [turned], {}, None)
    kernels["to_channels_first"].run([turned], [again], {}, None)
    assert np.array_equal(turned, np.moveaxis(x, 1, -1))
    assert np.array_equal(again, x)
    kernel = "transpose_few" if channels <= 8 else "transpose"
    assert {name for _, name in emulator.launched} == {kernel}


@emulated
def test_nothing_is_launched_for_nothing():
    emulator = Emulator()
    empty = np.empty((0, 3))
    bind(emulator)["relu"].run([empty], [empty], {}, None)
    assert emulator.launched == set()


# With CuPy's stand-in.


class Cupy:
    """As much of CuPy as a launcher uses."""

    def __init__(self):
        self.compiled = []
        self.launched = []
        self.fails = None

    def RawKernel(self, source, name, options):  # noqa: N802
        self.compiled.append((name, options))

        def kernel(blocks, threads, arguments):
            if self.fails:
                raise self.fails
            self.launched.append((name, blocks, threads, arguments))

        return kernel

    def matmul(self, a, b, out):
        if self.fails:
            raise self.fails
        np.matmul(a, b, out=out)


@pytest.fixture
def cupy(monkeypatch):
    stand_in = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    return stand_in


def test_a_kernel_is_compiled_once_when_first_launched(cupy):
    entered = []
    kernels = bind(CupyLauncher(lambda: entered.append(1)))
    assert cupy.compiled == []
    x = np.ones((300, 2), "f4")
    for _ in range(2):
        kernels["scale"].run([x], [x], {"factor": 2.0}, None)
    ((name, options),) = cupy.compiled
    assert name == "scale"
    assert "-DELEMENT=float" in options
    assert "-DINDEX=int" in options
    name, blocks, threads, arguments = cupy.launched[0]
    assert (name, blocks, threads) == ("scale", (1,), (256,))
    assert [type(a) for a in arguments[2:]] == [np.int32, np.float64]
    assert len(entered) == len(cupy.launched) == 2
    kernels["scale"].run([x.astype("f8")] * 2, [x.astype("f8")], {"factor": 2.0}, None)
    assert len(cupy.compiled) == 2


def test_indices_of_large_tensors_have_64_bits(cupy):
    kernels = bind(CupyLauncher(lambda: None))
    large = np.broadcast_to(np.float32(1), (1 << 30,))
    kernels["relu"].run([large], [large], {}, None)
    assert "-DINDEX=long long" in cupy.compiled[0][1]
    assert type(cupy.launched[0][3][-1]) is np.int64


def test_failures_are_our_errors(cupy):
    kernels = bind(CupyLauncher(lambda: None))
    x = np.ones((3, 3), "f4")
    with pytest.raises(UnsupportedError, match="no kernel computes in int8"):
        kernels["relu"].run([x.astype("i1")], [x.astype("i1")], {}, None)
    plain = {"transpose_a": False, "transpose_b": False}
    with pytest.raises(UnsupportedError, match="no product of matrices of uint16"):
        kernels["matmul"].run([x, x], [x.astype("u2")], plain, None)
    cupy.fails = RuntimeError("out of luck")
    with pytest.raises(BackendError, match=r"relu \(float32\) .*: out of luck"):
        kernels["relu"].run([x], [x], {}, None)
    with pytest.raises(BackendError, match=r"product of \(3, 3\) and .*: out of luck"):
        kernels["matmul"].run([x, x], [x], plain, None)
    with pytest.raises(BackendError, match="a copy into float32"):
        kernels["identity"].run([np.ones(7)], [x], {}, None)


# With CUDA's compiler, and with a GPU.


@pytest.mark.cudnn
@pytest.mark.parametrize(("dtype", "wide"), [*((t, False) for t in TYPES), WIDE])
@pytest.mark.parametrize("name", PROGRAMS)
def test_sources_compile_for_every_gpu(name, dtype, wide):
    program = PROGRAMS[name]
    assert program.kernels
    for code in compiled(program.source, name, compiler_options(dtype, wide=wide)):
        for kernel in program.kernels:
            assert f".text.{kernel}\0".encode() in code


# What blocks add up one after another: no emulator runs them at once.
ADDED_UP = ("batch_norm", "batch_norm_grad", "bias_grad", "bias_relu_grad")


def in_rows(op):
    """A case whose channels are last, in many rows."""
    x, dy, y = (normal(200_000, 64, seed=i, dtype="f4") for i in range(3))
    own = [normal(64, seed=i, dtype="f4") ** 2 + 0.5 for i in range(4)]
    image, small = (x.shape, "f4"), ((64,), "f4")
    attrs = {"eps": 1e-3, "momentum": 0.2, "update": True}
    inputs, outputs, attrs = {
        "batch_norm": ([x, *own], [image, small, small], attrs),
        "batch_norm_grad": ([x, dy, own[0], *own[2:]], [image, small, small], {}),
        "bias_grad": ([dy], [small], {}),
        "bias_relu_grad": ([np.maximum(y, 0), dy], [image, small], {}),
    }[op]
    return Case(op, inputs, outputs, attrs)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ADDED_UP)
def test_the_last_of_many_blocks_adds_up_all(op, cuda):
    """As the CPU does, and to the same bits each time."""
    import cupy

    case, moves = in_rows(op), {"to": cupy.asarray, "back": cupy.asnumpy}
    found = [compute(cuda.kernels[op], case, **moves) for _ in range(20)]
    for actual, expected in zip(found[0], compute(CPU[op], case), strict=True):
        agree(actual, expected, 1e-4, case)
    assert len({b"".join(a.tobytes() for a in each) for each in found}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("op", KERNELS)
def test_a_kernel_does_on_a_gpu_what_the_cpus_does(op, dtype, cuda):
    """A test each, so that one that fails hides none."""
    import cupy

    moves = {"to": cupy.asarray, "back": cupy.asnumpy}
    assert mirror(cuda.kernels, dtype, only=op, **moves) == {op}


@pytest.mark.gpu
@pytest.mark.parametrize("op", KERNELS)
def test_a_gpu_repeats_every_bit(op, cuda):
    import cupy

    moves = {"to": cupy.asarray, "back": cupy.asnumpy}
    for case in [one for one in all_cases("f4") if one.op == op]:
        once, again = (compute(cuda.kernels[op], case, **moves) for _ in range(2))
        for one, other in zip(once, again, strict=True):
            assert one.tobytes() == other.tobytes()
