"""Devices that programs run on, and the copies that each of them uses."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from mucudnn.errors import UnsupportedError
from mucudnn.torch.execution.copies import ThreadCopies
from mucudnn.torch.execution.cuda_copies import StreamCopies
from mucudnn.torch.execution.tiers import TierCopies
from mucudnn.torch.lowering.lowered import Layout

DEVICES = ("cpu", "cuda")
"""Types of devices that programs run on."""


Copies = ThreadCopies | StreamCopies | TierCopies
"""Copies to the host and back that run beside the computation.

A program waits for a copy before it uses what was prefetched, before it frees what was
offloaded, and before it begins the prefetch.
"""


def copies_for(device: torch.device, *, reuse: bool) -> Copies:
    """Return the copies between a device and the host; see `ThreadCopies`."""
    if device.type == "cuda":
        return StreamCopies(device, reuse=reuse)
    return ThreadCopies(reuse=reuse)


def device_of(layouts: Mapping[str, Layout]) -> torch.device:
    """Return the one device of a graph's tensors.

    Scalar tensors on the CPU, such as learning rates and step counts, may accompany
    tensors on another device.

    Raises:
        UnsupportedError: There are several; names tensors of two.
    """
    found: dict[torch.device, str] = {}
    for name, layout in layouts.items():
        if layout.device.type != "cpu" or math.prod(layout.shape) > 1:
            found.setdefault(layout.device, name)
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise UnsupportedError(
            f"{first} is on {one} and {second} on {other}; a step runs on one device: "
            "move model and batch to the same device"
        )
    return next(iter(found), torch.device("cpu"))


@contextmanager
def autocast_off() -> Iterator[None]:
    """Turn off the user's autocast on every device: a graph has its casts recorded."""
    with ExitStack() as stack:
        for kind in DEVICES:  # PyTorch warns of one that it was built without
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def forked_generators(given: Iterable[Any]) -> AbstractContextManager[None]:
    """Restore the random generators of the CPU and of these values' CUDA devices."""
    cuda = {t.device.index for t in given if isinstance(t, torch.Tensor) and t.is_cuda}
    fork: AbstractContextManager[None] = torch.random.fork_rng(devices=sorted(cuda))
    return fork


def check_devices(given: Sequence[torch.Tensor]) -> None:
    """Refuse tensors on devices that programs do not run on.

    Raises:
        UnsupportedError: A tensor is on such a device.
    """
    for value in given:
        if value.device.type not in DEVICES:
            raise UnsupportedError(
                f"a tensor is on {value.device}; steps run on the CPU and on CUDA "
                "devices"
            )
