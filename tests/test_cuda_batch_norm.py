"""Batch normalisation on a GPU in one launch and in two, on the stand-in for CuPy.

Both ways are held against float64 on the CPU, in every type, at sizes that are packed
into 16 bytes and at odd ones, up to what a block has room for.
"""

import numpy as np
import pytest

from mucudnn.backends.cpu.kernels import bind as bind_cpu
from mucudnn.backends.cpu.threads import Workers
from mucudnn.backends.cuda.kernels import batch_norm
from mucudnn.backends.cuda.kernels.reductions import Channels
from mucudnn.ir.tensor import itemsize
from tests.cuda_emulator import COMPILER
from tests.cupy_fake import StrictArray, on_cupy
from tests.kernel_cases import prepared, within

ml_dtypes = pytest.importorskip("ml_dtypes")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")

CPU = bind_cpu(Workers(1))
TYPES = {
    "float32": (np.dtype("f4"), 2e-6),
    "float16": (np.dtype("f2"), 2e-3),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), 2e-2),
}
ATTRS = {"eps": 1e-3, "momentum": 0.2, "update": True}
SMALL = ((1, 2, 3, 3), (9, 3, 7, 7), (5, 2, 4, 8), (130, 2, 4, 4), (3, 1, 5, 41))
OPERATIONS = {  # -> the inputs and the results that are images
    "batch_norm": ((0,), (0,)),
    "batch_norm_relu": ((0,), (0,)),
    "batch_norm_add_relu": ((0, 5), (0,)),
    "batch_norm_grad": ((0, 1), (0,)),
    "batch_norm_relu_grad": ((0, 1), (0,)),
    "batch_norm_add_relu_grad": ((0, 1, 2), (0, 1)),
}


def inputs_of(op, shape, dtype):
    """Images in `dtype`, the others in single precision."""
    rng = np.random.default_rng(0)
    x, dy, term = (rng.normal(1, 2, shape).astype(dtype) for _ in range(3))
    gamma, mean, var = (rng.uniform(0.5, 1.5, shape[1]).astype("f4") for _ in range(3))
    beta = rng.normal(0, 1, shape[1]).astype("f4")
    if not op.endswith("grad"):
        more = [term] if "add" in op else []
        return [x, gamma, beta, mean, var, *more]
    if "add" in op:
        return [x, dy, np.maximum(term, 0), gamma, mean, var]
    return [x, dy, gamma, *([beta] if "relu" in op else []), mean, var]


def compute(kernel, op, inputs, images, wrap, offset=0):
    """Results and changed inputs in float64; images begin `offset` elements off."""
    shape, dtype = inputs[0].shape, inputs[0].dtype
    rooms = [np.full(a.size + 8, np.nan, a.dtype) for a in inputs]
    given = []
    for i, (room, a) in enumerate(zip(rooms, inputs, strict=True)):
        start = offset if i in images[0] else 0
        given.append(room[start : start + a.size].reshape(a.shape))
        given[-1][...] = a
    count = {True: 4, False: 3}["add_relu_grad" in op]
    made = [
        np.full(shape, np.nan, dtype) if i in images[1] else np.empty(shape[1], "f4")
        for i in range(count)
    ]
    if dtype == np.float64:
        made = [a.astype("f8") for a in made]
    call, _ = prepared(kernel, given, made, ATTRS, wrap)
    call()
    return [a.astype("f8") for a in (*made, *given)]


def ways(op, shape, name, monkeypatch, offset=0):
    """What two launches give, what one does, and what float64 says."""
    cupy, kernels = on_cupy(monkeypatch)
    dtype, images = TYPES[name][0], OPERATIONS[op]
    inputs, kernel = inputs_of(op, shape, dtype), kernels[op]
    found = []
    for room in (0, batch_norm._ROOM):
        monkeypatch.setattr(batch_norm, "_ROOM", room)
        found.append(compute(kernel, op, inputs, images, StrictArray, offset))
        assert cupy.launched[-1].endswith("_whole") == bool(room)
        assert len(cupy.launched) == (2 if room == 0 else 3)
    wide = [a.astype("f8") for a in inputs]
    return *found, compute(CPU[op], op, wide, images, lambda a: a)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("op", OPERATIONS)
def test_one_launch_gives_what_two_do(op, name, monkeypatch):
    for shape in SMALL:
        for offset in (0, 1):
            two, one, wide = ways(op, shape, name, monkeypatch, offset)
            within(two, wide, TYPES[name][1])
            within(one, two, TYPES[name][1] / 4)


@pytest.mark.parametrize(("name", "samples"), [("float32", 235), ("float16", 334)])
@pytest.mark.parametrize("op", ["batch_norm_relu", "batch_norm_add_relu_grad"])
def test_the_largest_channel_that_a_block_has_room_for(op, name, samples, monkeypatch):
    monkeypatch.setattr(batch_norm, "_FEW_CHANNELS", 1)
    nbytes = itemsize(name)
    for more, fits in ((0, True), (1, False)):
        assert batch_norm.fits(Channels.of((samples + more, 1, 7, 7)), nbytes) == fits
    two, one, wide = ways(op, (samples, 1, 7, 7), name, monkeypatch)
    within(two, wide, TYPES[name][1])
    within(one, two, TYPES[name][1] / 4)


def test_few_long_channels_are_shared_by_blocks():
    assert batch_norm.fits(Channels.of((200, 64, 7, 7)), 4)
    assert not batch_norm.fits(Channels.of((200, 63, 7, 7)), 4)  # too few for a GPU
    assert batch_norm.fits(Channels.of((64, 2, 8, 8)), 4)
    assert not batch_norm.fits(Channels.of((64, 2, 2, 2)), 4)  # 32 channels a block
    assert not batch_norm.fits(Channels.of((0, 64, 8, 8)), 4)
