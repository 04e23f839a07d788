"""Normalisation on a GPU, with channels first and last, on the stand-in for CuPy."""

import numpy as np
import pytest

from mucudnn.backends.cpu.kernels import bind as bind_cpu
from mucudnn.backends.cpu.threads import Workers
from mucudnn.backends.cuda.kernels import batch_norm, bind
from mucudnn.backends.cuda.kernels.reductions import Channels
from mucudnn.ir.tensor import itemsize
from tests.cuda_emulator import COMPILER, Emulator
from tests.cupy_fake import StrictArray, on_cupy
from tests.kernel_cases import prepared, within

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: g++")

CPU = bind_cpu(Workers(1))
ATTRS = {"eps": 1e-3, "momentum": 0.2, "update": True}
SHAPES = ((2500, 8), (1300, 64), (700, 136), (1, 16))
OPERATIONS = {  # -> launches, inputs (i images, c channels), and results
    "batch_norm": (2, "icccc", "icc"),
    "batch_norm_relu": (2, "icccc", "icc"),
    "batch_norm_add_relu": (2, "icccci", "icc"),
    "batch_norm_grad": (2, "iiccc", "icc"),
    "batch_norm_relu_grad": (2, "iicccc", "icc"),
    "batch_norm_add_relu_grad": (2, "iiiccc", "iicc"),
    "batch_norm_sums": (2, "i", "m"),
    "batch_norm_grad_sums": (2, "iicc", "cc"),
    "bias_grad": (1, "i", "c"),
    "bias_relu_grad": (1, "ii", "ic"),
}


def operands(op, shape, dtype, wide):
    """Images in one type, what belongs to channels in another; results are stale."""
    rng = np.random.default_rng(3)
    _, given, made = OPERATIONS[op]
    sizes = {"i": shape, "c": shape[1:], "m": (3, *shape[1:])}
    inputs = [
        rng.normal(1, 2, shape).astype(dtype)
        if kind == "i"
        else rng.uniform(0.5, 1.5, shape[1]).astype(wide)
        for kind in given
    ]
    kinds = {"i": dtype, "c": wide, "m": "f8"}
    outputs = [np.full(sizes[kind], np.nan, kinds[kind]) for kind in made]
    return inputs, outputs


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_order_of_blocks_changes_no_bit(op):
    for shape in SHAPES:
        channels = Channels.last(shape, 4)
        assert channels.parts > 1 or shape[0] == 1
        found = []
        for backwards in (False, True):
            emulator = Emulator(backwards=backwards)
            kernel = bind(emulator)[op]
            inputs, outputs = operands(op, shape, "f4", "f4")
            call, scratch = prepared(kernel, inputs, outputs, ATTRS)
            arrays = (*outputs, *inputs)
            call()
            once = [a.copy() for a in arrays]
            scratch[...] = 0xFF
            call()
            found.append((once, arrays))
            assert len(emulator.launched) == OPERATIONS[op][0]
        results = len(OPERATIONS[op][2])
        (first, again), (other, _) = found
        for one, two in zip(first, other, strict=True):
            assert one.tobytes() == two.tobytes()
        for one, two in zip(first[:results], again[:results], strict=True):
            assert one.tobytes() == two.tobytes()
        within(first, in_float64(op, shape, "f4"), 2e-6)


def in_float64(op, shape, dtype):
    """What float64 makes of the same numbers: results and changed inputs."""
    inputs, outputs = (
        [a.astype("f8") for a in some] for some in operands(op, shape, dtype, "f4")
    )
    CPU[op].run(inputs, outputs, ATTRS, None)
    return (*outputs, *inputs)


@pytest.mark.parametrize("op", OPERATIONS)
def test_half_precision_has_sums_in_single(op, monkeypatch):
    _, kernels = on_cupy(monkeypatch)
    for shape in SHAPES[:3]:
        inputs, outputs = operands(op, shape, "f2", "f4")
        call, _ = prepared(kernels[op], inputs, outputs, ATTRS, StrictArray)
        call()
        expected = in_float64(op, shape, "f2")
        for one, two in zip((*outputs, *inputs), expected, strict=True):
            within([one], [two], 2e-3 if one.dtype == np.float16 else 2e-6)


GROUPED = (
    ((5, 36, 64), 8),
    ((2, 3, 300), 3),
    ((3, 700, 24), 24),
    ((300, 7, 16), 1),
    ((2, 50, 60), 2),  # a thread goes on in the middle of a pixel
    ((2, 100, 48), 2),
)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("name", ["float16", "float32"])
@pytest.mark.parametrize(("shape", "groups"), GROUPED)
def test_groups_of_channels_are_normalised_where_they_are(
    shape, groups, name, offset, monkeypatch
):
    """In the type of the images, by statistics in single precision; not turned."""
    _, kernels = on_cupy(monkeypatch)
    attrs = {"groups": groups, "eps": 1e-3, "per_element": False}
    last = attrs | {"channels_last": True}
    rng = np.random.default_rng(1)
    N, S, C = shape
    x, dy = (rng.normal(1, 2, shape).astype(name) for _ in range(2))
    gamma, beta = (rng.uniform(0.5, 1.5, C).astype("f4") for _ in range(2))
    mean = rng.normal(1, 0.1, (N, groups)).astype("f4")
    inverse = rng.uniform(0.4, 0.6, (N, groups)).astype("f4")
    image, small = (shape, name), ((N, groups), "f4")
    for op, given, results in (
        ("group_norm", (x, gamma, beta), (image, small, small)),
        (
            "group_norm_grad",
            (x, dy, gamma, mean, inverse),
            (image, ((C,), "f4"), ((C,), "f4")),
        ),
    ):
        first = [
            (np.moveaxis(a, 2, 1) if a.shape == shape else a).astype("f8")
            for a in given
        ]
        sizes = [(N, C, S) if size == shape else size for size, _ in results]
        expected = [np.empty(size) for size in sizes]
        CPU[op].run([np.ascontiguousarray(a) for a in first], expected, attrs, None)
        found = on_the_gpu(kernels[op], given, results, last, shape, offset)
        for one, two in zip(found, expected, strict=True):
            one = np.moveaxis(one, 2, 1) if one.shape == shape else one
            tolerance = 2e-3 if one.dtype == np.float16 else 4e-6
            within([one.astype("f8")], [two], tolerance)


def on_the_gpu(kernel, given, results, attrs, image, offset):
    """Results, where images begin `offset` elements behind 16 bytes."""

    def placed(size, dtype, values=None):
        room = np.full(int(np.prod(size)) + 16, np.nan, dtype)
        start = -room.ctypes.data % 16 // room.itemsize + offset * (size == image)
        array = room[start : start + int(np.prod(size))].reshape(size)
        if values is not None:
            array[...] = values
        return array

    inputs = [placed(a.shape, a.dtype, a) for a in given]
    outputs = [placed(*result) for result in results]
    call, _ = prepared(kernel, inputs, outputs, attrs, StrictArray)
    call()
    return outputs


def test_no_block_adds_up_too_many_parts():
    for shape in ((256 * 112 * 112, 64), (256 * 49, 2048), (1 << 22, 8)):
        for nbytes in (2, 4, 8):
            channels = Channels.last(shape, nbytes)
            assert channels.parts <= 512
            assert channels.width * channels.apiece * nbytes <= 128
            assert channels.blocks[0] * channels.width * channels.apiece >= shape[1]


ml_dtypes = pytest.importorskip("ml_dtypes")

TYPES = {
    "float32": (np.dtype("f4"), 2e-6),
    "float16": (np.dtype("f2"), 2e-3),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), 2e-2),
}
SMALL = ((1, 2, 3, 3), (9, 3, 7, 7), (5, 2, 4, 8), (130, 2, 4, 4), (3, 1, 5, 41))
IMAGES_OF = {  # -> the inputs and the results that are images
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
    dtype, images = TYPES[name][0], IMAGES_OF[op]
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
@pytest.mark.parametrize("op", IMAGES_OF)
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
