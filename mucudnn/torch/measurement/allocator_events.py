"""What a call has in use of PyTorch's CPU allocator, byte by byte.

PyTorch's older profiler, of which `torch.autograd.profiler_legacy` is the public face,
lists what one thread allocates and frees. Unlike `torch.profiler` it starts no Kineto,
which writes lines to stderr when it starts and stops. Calls have a thread of their own,
so that a profiler of the user's may be under way in theirs.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import (
    ProfilerConfig,
    ProfilerState,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
)

__all__ = ["most_bytes"]

_MEMORY = "memory_alloc"


def most_bytes(calls: Sequence[Callable[[], Callable[[], object]]]) -> list[int]:
    """The most that each call has in use of what it allocates, results included.

    Args:
        calls: Each makes what a call needs beforehand, and returns the call.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(_each, calls).result()


def _each(calls: Sequence[Callable[[], Callable[[], object]]]) -> list[int]:
    with torch.no_grad(), _without_collection():
        return [_most_of(prepared()) for prepared in calls]


def _most_of(call: Callable[[], object]) -> int:
    """Of one call; nothing that was there before it is freed meanwhile."""
    config = ProfilerConfig(
        ProfilerState.CPU,
        False,  # no shapes
        True,  # memory
        False,  # no stacks
        False,  # no floating-point operations
        False,  # no modules
        _ExperimentalConfig(),
    )
    _enable_profiler_legacy(config)
    try:
        result = call()
    finally:
        threads = _disable_profiler_legacy()
    del result
    now = most = 0
    for event in (event for events in threads for event in events):
        if event.kind() == _MEMORY:
            now += event.cpu_memory_usage()
            most = max(most, now)
    return most


@contextmanager
def _without_collection() -> Iterator[None]:
    """Python frees no cycles, of which tensors from elsewhere may be part."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
