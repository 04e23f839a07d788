"""Inductor's Triton kernels without a GPU: their text is run on the CPU by PyTorch.

A kernel's blocks are as large as its whole range, so that one program computes all of
it. What it does to memory is what its text says; the order of its sums is PyTorch's.
"""

import functools
import re
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from tests.fakecuda.device import host_view


@contextmanager
def on_host(*, values=True):
    """Compile kernels for a GPU that is not there, and run them on the CPU.

    Args:
        values: Whether they compute; without, they do nothing.

    Yields:
        A list to which the name of each kernel is added as it runs.
    """
    import triton
    from torch._inductor import config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    class Driver(CudaDriver):
        def __init__(self):
            pass  # which would load CUDA's library

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return torch.cuda.current_device()

        def get_active_torch_device(self):
            return torch.device("cuda", torch.cuda.current_device())

    ran = []

    def run(self, *args, stream, **kwargs):
        assert not kwargs
        # A kernel runs on the current device, in the stream that it is given.
        assert stream == torch.cuda.current_stream().cuda_stream
        tensors = (value for value in args if isinstance(value, torch.Tensor))
        assert {t.device.index for t in tensors} == {torch.cuda.current_device()}
        ran.append(self.fn.__name__)
        if values:
            evaluate(self.fn.src, args)

    before = CachingAutotuner.run, CachingAutotuner.precompile
    CachingAutotuner.run = run
    CachingAutotuner.precompile = lambda self, *args, **kwargs: None
    triton.runtime.driver.set_active(Driver())
    try:
        with config.patch(
            compile_threads=1,
            force_disable_caches=True,
            joint_graph_constant_folding=False,  # which would read what a GPU computes
        ):
            yield ran
    finally:
        CachingAutotuner.run, CachingAutotuner.precompile = before


def evaluate(source, args):
    """Run a kernel's text on tensors of the stand-in and numbers."""
    head = re.search(r"^def (\w+)\((.*)\):$", source, re.MULTILINE)
    words = [word.split(":")[0].strip() for word in head.group(2).split(",")]
    plain = [w for w in head.group(2).split(", ") if ":" not in w]
    given = dict(zip(plain, args, strict=True))
    blocks = {
        word: given[f"{word.removesuffix('BLOCK').lower()}numel"]
        for word in words
        if word not in given
    }
    names = {
        word: Pointer(v) if isinstance(v, torch.Tensor) else v
        for word, v in given.items()
    }
    space = {
        "tl": LANGUAGE,
        "libdevice": Elementwise(),
        "tl_math": Elementwise(),
        "triton_helpers": HELPERS,
    }
    exec(compile(source, head.group(1), "exec"), space)
    with torch.utils._python_dispatch._disable_current_modes(), torch.device("cpu"):
        space[head.group(1)](**names, **blocks)


class Pointer:
    """A tensor's memory from its first element on."""

    def __init__(self, tensor):
        whole = host_view(tensor)
        size = whole.untyped_storage().nbytes() // whole.element_size()
        offset = whole.storage_offset()
        self.flat = whole.as_strided((size - offset,), (1,), offset)

    def __add__(self, index):
        return self, torch.as_tensor(index)


def _cells(place, mask, *values):
    """Return memory, and index, mask and values in one shape, as far as it holds."""
    memory, index = place
    known = [torch.as_tensor(v) for v in values]
    mask = torch.tensor(True) if mask is None else mask
    index, mask, *known = torch.broadcast_tensors(index, mask, *known)
    assert bool(((index >= 0) & (index < len(memory.flat)) | ~mask).all())
    return memory.flat, index.long(), mask, known


def _load(place, mask=None, other=0, **_):
    flat, index, mask, _ = _cells(place, mask)
    found = flat[torch.where(mask, index, 0)]
    return torch.where(mask, found, torch.as_tensor(other, dtype=found.dtype))


def _store(place, value, mask=None, **_):
    flat, index, mask, (value,) = _cells(place, mask, value)
    index = index[mask]
    assert len(index.unique()) == len(index) or len(value.unique()) == 1
    flat[index] = value[mask].to(flat.dtype)


def _atomic_add(place, value, mask=None, **_):
    flat, index, mask, (value,) = _cells(place, mask, value)
    flat.index_put_((index[mask],), value[mask].to(flat.dtype), accumulate=True)


def _assert(condition, message):
    assert bool(torch.as_tensor(condition).all()), message


def _rand(seed, offset):
    """Return other numbers than Triton's, which depend on the same two."""
    mixed = (offset.long() * 2654435761 + seed.long() % 1000003) % 4294967291
    return (mixed * 48271 % 2147483647).to(torch.float32) / 2147483648.0


def _alike(*values):
    """Return tensors and numbers as tensors of one type and shape."""
    types = [v.dtype for v in values if isinstance(v, torch.Tensor)]
    kind = functools.reduce(torch.promote_types, types) if types else None
    return torch.broadcast_tensors(*(torch.as_tensor(v, dtype=kind) for v in values))


def _maximum(a, b, _=None):
    return torch.maximum(*_alike(a, b))


def _minimum(a, b, _=None):
    return torch.minimum(*_alike(a, b))


def _welford_reduce(value, mean, m2, weight, first):
    assert first  # one block is all
    return value, torch.zeros_like(value), torch.ones_like(value)


def _welford(mean, m2, weight, dim):
    count = weight.sum(dim)
    total = (mean * weight).sum(dim) / count
    apart = (mean - total.unsqueeze(dim)) ** 2
    return total, (m2 + weight * apart).sum(dim), count


_TYPES = (
    "int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32",
    "float64",
)  # fmt: skip

LANGUAGE = SimpleNamespace(
    **{name: getattr(torch, name) for name in _TYPES},
    int1=torch.bool,
    uint32=torch.int64,
    constexpr=int,
    PropagateNan=SimpleNamespace(ALL=None),
    program_id=lambda axis: 0,
    num_programs=lambda axis: 1,
    range=range,
    arange=torch.arange,
    full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
    broadcast_to=torch.broadcast_to,
    where=lambda mask, a, b: torch.where(mask, *_alike(a, b)),
    maximum=_maximum,
    minimum=_minimum,
    sum=lambda x, dim: x.sum(dim, dtype=x.dtype),
    load=_load,
    store=_store,
    atomic_add=_atomic_add,
    rand=_rand,
    debug_barrier=lambda: None,
    device_assert=_assert,
)
"""What kernels use of `triton.language`."""

HELPERS = SimpleNamespace(
    maximum=_maximum,
    minimum=_minimum,
    rand4x=lambda seed, offsets, block: _rand(seed, offsets),
    max2=torch.amax,
    fmax2=torch.amax,
    min2=torch.amin,
    welford_reduce=_welford_reduce,
    welford=_welford,
)
"""What kernels use of Inductor's `triton_helpers`."""


class Elementwise:
    """Functions of numbers, by PyTorch's names."""

    def __getattr__(self, name):
        function = getattr(torch, name)
        return lambda *given: function(*map(torch.as_tensor, given))
