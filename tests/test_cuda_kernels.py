"""The GPU's kernels of a training step against the CPU's: emulated, and on a GPU."""

import subprocess
import sys

import numpy as np
import pytest

from mucudnn.backends.cpu.kernels import KERNELS as CPU_KERNELS, bind as bind_cpu
from mucudnn.backends.cpu.threads import Workers
from mucudnn.backends.cuda.kernels import KERNELS, PROGRAMS, bind
from mucudnn.backends.cuda.kernels.program import CupyLauncher, compiler_options
from mucudnn.errors import BackendError, UnsupportedError
from tests.cuda_emulator import COMPILER, Emulator
from tests.mirror_cases import Case, cases, compute
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


def mirror(kernels, dtype, **moves):
    """Every case, in every place that a result may have; returns the operations."""
    seen = set()
    for case in cases(dtype):
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


def test_the_table_is_the_cpus():
    assert set(KERNELS) == set(CPU_KERNELS)


def test_the_table_is_imported_without_cupy_and_numpy():
    code = (
        "import sys, mucudnn.backends.cuda.kernels as k, mucudnn.backends.cuda; "
        "assert len(k.KERNELS) > 40; "
        "sys.exit(bool({'cupy', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Emulated.


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emulated")


@emulated
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "how"),
    [("f8", {}), ("f4", {"backwards": True}), ("f8", {"wide": True})],
)
def test_every_kernel_does_on_the_host_what_the_cpus_does(dtype, how, folder):
    emulator = Emulator(folder, **how)
    assert mirror(bind(emulator), dtype) == set(KERNELS)
    every = {(p, name) for p in PROGRAMS.values() for name in p.kernels}
    assert emulator.launched == every


@emulated
def test_labels_that_are_no_classes_are_told_by_nan(folder):
    kernels = bind(Emulator(folder))
    x = np.zeros((3, 4))
    for wrong in (-1, 4, 1 << 40):
        labels = np.array([0, wrong, 1])
        case = Case("softmax_cross_entropy", [x, labels], [((), "f8"), ((3, 4), "f8")])
        loss, p, *_ = compute(kernels[case.op], case)
        assert np.isnan(loss)
        assert np.allclose(p, 0.25)
        case = Case("accuracy", [x, labels], [((), "i8")], {"k": 1})
        assert compute(kernels["accuracy"], case)[0] == 2


@emulated
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_batch_norm_made_again_by_its_statistics_has_the_same_bits(dtype, folder):
    kernels = bind(Emulator(folder))
    rng = np.random.default_rng(0)
    x, *channels = (rng.random(s).astype(dtype) for s in ((4, 3, 5, 5), *[(3,)] * 4))
    specs = [((4, 3, 5, 5), dtype), ((3,), dtype), ((3,), dtype)]
    attrs = {"eps": 1e-5, "momentum": 0.1, "update": True}
    whole = Case("batch_norm", [x, *channels], specs, attrs)
    y, mean, inv_std, *_ = compute(kernels[whole.op], whole)
    again = Case("batch_norm_apply", [x, *channels[:2], mean, inv_std], specs[:1])
    assert np.array_equal(compute(kernels[again.op], again)[0], y)


@emulated
def test_nothing_is_launched_for_nothing(folder):
    emulator = Emulator(folder)
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
    assert (name, blocks, threads) == ("scale", (3,), (256,))
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
    with pytest.raises(UnsupportedError, match="product of matrices of bfloat16 needs"):
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_kernel_does_on_a_gpu_what_the_cpus_does(dtype, cuda):
    import cupy

    moves = {"to": cupy.asarray, "back": cupy.asnumpy}
    assert mirror(cuda.kernels, dtype, **moves) == set(KERNELS)


@pytest.mark.gpu
def test_a_gpu_repeats_every_bit(cuda):
    import cupy

    moves = {"to": cupy.asarray, "back": cupy.asnumpy}
    for case in cases("f4"):
        once, again = (compute(cuda.kernels[case.op], case, **moves) for _ in range(2))
        for one, other in zip(once, again, strict=True):
            assert one.tobytes() == other.tobytes(), case.op
