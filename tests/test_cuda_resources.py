"""What the kernels take of a GPU, as CUDA's compiler says: what speed rests on.

A copy is as fast as memory where enough bytes are under way: 4.8 TB/s for 0.7 us are
25 KB on each of an H200's 132 multiprocessors. That takes threads, which registers and
shared memory limit, and accesses of 16 bytes, several before the first is waited for.
"""

import pytest

from mucudnn.backends.cuda.kernels import PROGRAMS
from mucudnn.backends.cuda.kernels.launch import THREADS, compiler_options
from tests.cuda_resources import divisions_in_loops, loads_in_a_row, resources
from tests.nvrtc import hopper

pytestmark = pytest.mark.cudnn

MIXED = [("float16", "float32"), ("float32", "float32")]
UNDER_WAY = 25 << 10

STREAMS = {
    ("batch_norm", "batch_norm_statistics"): 4,
    ("batch_norm", "batch_norm_last"): 2,
    ("batch_norm", "batch_norm_eval_last"): 4,
    ("batch_norm_grad", "channel_dots_last"): 4,
    ("batch_norm_grad", "batch_norm_grad_last"): 4,
    ("reductions", "bias_last"): 4,
    ("reductions", "bias_grad_last"): 2,
    ("reductions", "bias_relu_grad_last"): 4,
    ("elementwise", "add"): 2,
    ("elementwise", "add_relu"): 2,
    ("elementwise", "relu"): 1,
    ("elementwise", "relu_grad"): 2,
    ("group_norm", "gamma_grad_last"): 4,
    ("split_batch_norm", "batch_norm_grad_apply_last"): 4,
}
"""(file, kernel) -> accesses of 16 bytes under way of each thread."""

DIVIDING = {
    "image_means": "once for a plane, before its pixels",
    "avg_pool_grad": "by a stride that is neither 1 nor 2, before the windows",
    "max_pool_grad": "by a stride that is neither 1 nor 2, before the windows",
    "softmax_cross_entropy": "once for a pixel, before its classes",
    "accuracy": "once for a pixel, before its classes",
    "picked_mean": "once for a pixel, whose label alone it reads",
    "lrn": "once for a pixel, before its channels",
    "lrn_grad": "once for a pixel, before its channels",
    "transpose": "once for a square of 1024 elements",
}
"""Kernel -> why a loop of it divides whole numbers."""


def made(name, types):
    """(kernel -> its resources, kernel -> its text in PTX) on a Hopper GPU."""
    options = compiler_options(types[0], wide=False, parameters=types[1])
    code, texts = hopper(PROGRAMS[name].source, name, options)
    return resources(code), texts


@pytest.mark.parametrize("types", MIXED, ids=lambda types: types[0])
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_fit_registers_and_leave_room_for_a_second_block(name, types):
    """Channels that are last are read by 16 bytes; lrn reads neighbours one by one."""
    found, texts = made(name, types)
    assert set(found) == set(PROGRAMS[name].kernels)
    for kernel, each in found.items():
        assert each.registers > 0, kernel
        assert each.local == 0, (kernel, each)
        assert each.blocks(THREADS) >= 2, (kernel, each)
        if kernel.endswith("_last") and kernel != "lrn_last":
            assert loads_in_a_row(texts[kernel]) >= 1, kernel


@pytest.mark.parametrize("types", MIXED, ids=lambda types: types[0])
@pytest.mark.parametrize("name", sorted({name for name, _ in STREAMS}))
def test_enough_bytes_are_under_way(name, types):
    """By threads at once, and loads of 16 bytes that CUDA's compiler put in a row."""
    found, texts = made(name, types)
    for (file, kernel), accesses in STREAMS.items():
        if file != name:
            continue
        threads = found[kernel].blocks(THREADS) * THREADS
        assert threads * accesses * 16 >= UNDER_WAY, (kernel, found[kernel])
        assert loads_in_a_row(texts[kernel]) >= accesses, kernel


@pytest.mark.parametrize("name", PROGRAMS)
def test_whole_numbers_are_divided_in_no_loop_over_elements(name):
    _, texts = made(name, MIXED[0])
    dividing = {kernel for kernel, text in texts.items() if divisions_in_loops(text)}
    assert dividing == DIVIDING.keys() & texts.keys()


def test_divisions_in_loops_are_told_from_those_before_them():
    """Of a loop that is written behind what follows it, as compilers write them."""
    before, within = "div.s32 \t%r1, %r2, %r3;", "rem.u32 \t%r4, %r5, %r6;"
    loop = "$B2:\n{}\n@%p2 bra \t$B2;\nbra.uni \t$B1;"
    lines = "{}\n@%p1 bra \t$B2;\n$B1:\n{}\nret;\n" + loop
    assert divisions_in_loops(lines.format(before, within, "")) == []
    assert divisions_in_loops(lines.format(before, "", within)) == [within]
    constant = "rem.u32 \t%r4, %r5, 3;"
    assert divisions_in_loops(lines.format("", "", constant)) == []


def test_loads_in_a_row_end_where_one_is_used():
    load, use = "ld.global.v4.u32 \t{%r1}, [%rd1];", "fma.rn.f32 \t%f1, %f2, %f3, %f4;"
    assert loads_in_a_row("\n".join([load, load, use, load, "add.s64 %rd2"])) == 2
    assert loads_in_a_row("\n".join([load, "st.global.v4.u32 [%rd1];", load])) == 1
