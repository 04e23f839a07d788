"""Sums over channels that are last, added up by the block that comes last: emulated.

Held against the CPU in float64; whatever the order of the blocks, all bits are the
same, and a launch that is repeated finds its counters as the first one did.
"""

import numpy as np
import pytest

from mucudnn.backends.cpu.kernels import bind as bind_cpu
from mucudnn.backends.cpu.threads import Workers
from mucudnn.backends.cuda.kernels import bind
from mucudnn.backends.cuda.kernels.reductions import Channels
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
