"""What the stand-in for a GPU refuses, as a GPU would, where no numbers tell."""

import sys

import numpy as np
import pytest

from mucudnn.backends.cuda.kernels.launch import CupyLauncher, KernelLaunch, Program
from tests.cuda_emulator import COMPILER, Emulator
from tests.cupy_fake import StrictArray, StrictCupy

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")

PROGRAM = Program(
    r"""
#include "prelude.cuh"
KERNEL copied(const T* x, T* y, I begin) {
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0)
        store(y, load<PACKED>(x + begin));
}
"""
)
BARRIER = Program(
    r"""
#include "prelude.cuh"
KERNEL waiting(const T* x, I those) {
    if (threadIdx.x < those) __syncthreads();
}
"""
)


def on_numpy(monkeypatch):
    return Emulator(), lambda a: a


def on_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", StrictCupy())
    return CupyLauncher(lambda: None), StrictArray


@pytest.fixture(params=[on_numpy, on_cupy])
def launch(request, monkeypatch):
    """Launches a kernel with arrays and numbers."""
    launcher, wrap = request.param(monkeypatch)

    def launched(name, blocks, *given, dtype="float32"):
        program = BARRIER if name == "waiting" else PROGRAM
        arguments = tuple(wrap(a) if isinstance(a, np.ndarray) else a for a in given)
        types = dtype, dtype
        launcher.prepared(KernelLaunch(program, name, blocks, arguments, types))()

    return launched


def room(count, dtype):
    """Zeros that begin at a multiple of 64 bytes."""
    bytes_ = np.zeros(count * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -bytes_.ctypes.data % 64
    return bytes_[start : start + bytes_.size - 64].view(dtype)


@pytest.mark.parametrize(("dtype", "packed"), [("float32", 4), ("float64", 2)])
def test_an_access_that_is_not_aligned_is_refused(launch, dtype, packed):
    x, y = room(16, dtype), room(16, dtype)
    x[:] = range(1, 17)
    launch("copied", (1,), x, y, packed, dtype=dtype)
    assert y[:packed].tolist() == x[packed : 2 * packed].tolist()
    with pytest.raises(Exception, match="not aligned"):
        launch("copied", (1,), x, y, 1, dtype=dtype)
    with pytest.raises(Exception, match="not aligned"):
        launch("copied", (1,), x, y[1:], 0, dtype=dtype)


def test_a_grid_that_cuda_does_not_take_is_refused(launch):
    x, y = room(16, "float32"), room(16, "float32")
    launch("copied", (1, 65535), x, y, 0)
    with pytest.raises(Exception, match="larger than CUDA takes"):
        launch("copied", (1, 65536), x, y, 0)


def test_a_barrier_that_some_threads_do_not_meet_is_refused(launch):
    x = room(16, "float32")
    launch("waiting", (2,), x, 256)
    launch("waiting", (2,), x, 0)
    with pytest.raises(Exception, match="waited for them"):
        launch("waiting", (2,), x, 7)
