"""What runs the copies of a program, by the device that its tensors are on."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from mucudnn.errors import UnsupportedError
from mucudnn.torch.execution.copies import ThreadCopies
from mucudnn.torch.execution.cuda_copies import StreamCopies
from mucudnn.torch.lowering.lowered import Layout

DEVICES = ("cpu", "cuda")
"""Types of devices that programs run on; CUDA's no test has run on a GPU yet."""


class Away(Protocol):
    """A storage that has left or is on its way.

    Attributes:
        host: Its bytes on the host.
    """

    host: torch.Tensor

    def wait(self) -> None:
        """Have what is computed from now on wait for the last copy that was begun."""


class Copies(Protocol):
    """Two lanes, one to the host and one back, beside the computation.

    A program waits for a copy before it uses what was copied back, before it frees what
    was copied out, and before it begins the copy back.
    """

    def begin(self) -> Callable[[torch.Tensor, str], Away]:
        """What begins copies out in one run, of a tensor and its storage's name."""

    def back(self, leaving: Any) -> torch.Tensor:
        """Begin to copy it back; the bytes that it will have."""

    def home(self, tensor: torch.Tensor, leaving: Any) -> None:
        """Begin to copy the storage of a tensor to where it came from."""

    def left(self, host: torch.Tensor, storage: str) -> Away:
        """What is on the host, and has no copy under way."""

    def settle(self) -> None:
        """Make it safe to let go of everything, whatever is under way."""


def copies_for(device: torch.device, *, reuse: bool) -> Copies:
    """What runs copies between a device and the host.

    Args:
        device: Where programs compute.
        reuse: Keep the host's bytes of every slot from step to step. Not where two
            steps may be under way at once.
    """
    if device.type == "cuda":
        return StreamCopies(device, reuse=reuse)
    return ThreadCopies(reuse=reuse)


def device_of(layouts: Mapping[str, Layout]) -> torch.device:
    """The one device of a graph's tensors.

    Beside those on another device there may be single numbers on the CPU, such as
    learning rates and counts of steps.

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
            "move the model and the batch to the same"
        )
    return next(iter(found), torch.device("cpu"))


def check_devices(given: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that are where nothing is run yet.

    Raises:
        UnsupportedError: Says where.
    """
    for value in given:
        if value.device.type not in DEVICES:
            raise UnsupportedError(
                f"a tensor is on {value.device}; steps run on the CPU and on CUDA "
                "devices"
            )
