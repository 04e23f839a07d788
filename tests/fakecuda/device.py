"""The stand-in for a GPU, as tests use it: its counters, and kernels on the CPU."""

import ctypes
from contextlib import contextmanager

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu.pytorch_steps import is_traced

NEEDED = "needs PyTorch's CUDA build over tests/fakecuda: make test-fakecuda"


def library():
    """Return the stand-in's runtime; None where PyTorch has another one, or none."""
    if not torch.version.cuda:
        return None
    try:
        found = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
    return found if hasattr(found, "fake_counters") else None


def counters():
    """Return how often the runtime was called, by kind of call, and its bytes."""
    text = ctypes.create_string_buffer(2000)
    library().fake_counters(text, len(text))
    pairs = (pair.split("=") for pair in text.value.decode().split())
    return {key: int(value) for key, value in pairs}


@contextmanager
def counted():
    """Count the calls within; the dict is filled at the end."""
    torch.cuda.synchronize()
    library().fake_reset()
    found = {}
    yield found
    found.update(counters())


def host_view(tensor):
    """Return a tensor on the CPU with the memory of one on the stand-in."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    count = storage.nbytes()
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    if count:
        raw = (ctypes.c_char * count).from_address(storage.data_ptr())
        flat = torch.frombuffer(raw, dtype=torch.uint8)
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
        flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


aten = torch.ops.aten


def _cudnn_batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    found = torch.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
    return *found, torch.zeros(1024, dtype=torch.uint8)


def _cudnn_batch_norm_backward(x, grad, weight, mean, var, saved, inverse, eps, _):
    return aten.native_batch_norm_backward(
        grad, x, weight, mean, var, saved, inverse, True, eps, [True] * 3
    )


_HOST = {
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
}


_WITHOUT_VALUES = "empty", "set_", "resize", "record_stream", "_pin", "is_pinned"
"""Beginnings of the names of operations that compute nothing."""


class KernelsOnHost(TorchDispatchMode):
    """Computes every operation on the CPU, in the memory of the stand-in.

    PyTorch dispatches to its CUDA kernels as well, which allocate the results and
    compute nothing. What is drawn at random comes from the CPU's generator.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = pytree.tree_leaves((args, kwargs))
        if is_traced(given):
            return func(*args, **kwargs)
        made = func(*args, **kwargs)
        results = pytree.tree_leaves(made)
        tensors = [v for v in (*given, *results) if isinstance(v, torch.Tensor)]
        plain = func._schema.name.removeprefix("aten::").startswith(_WITHOUT_VALUES)
        if plain or func.is_view or not any(t.is_cuda for t in tensors):
            return made
        on_host = {
            key: torch.device("cpu") if key == "device" else value
            for key, value in kwargs.items()
        }
        host = _HOST.get(func, func)
        found = host(
            *pytree.tree_map(host_view, args), **pytree.tree_map(host_view, on_host)
        )
        places = {v.data_ptr() for v in given if isinstance(v, torch.Tensor)}
        for mine, theirs in zip(results, pytree.tree_leaves(found), strict=True):
            if not isinstance(mine, torch.Tensor):
                return found
            if mine.data_ptr() not in places and mine.numel():
                host_view(mine).copy_(theirs)
        return made
