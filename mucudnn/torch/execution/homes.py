"""Where parameters and state are that a step only borrows for the device.

Their home is memory of the host that is not of PyTorch's allocator, or a file. On the
CPU that is memory like any other: a tensor there can be read, saved and loaded as
before, and is the very object that the model and the optimizer have. What views it had
of its old bytes are views of those still.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mucudnn.errors import UnsupportedError
from mucudnn.ir.schedule import Schedule
from mucudnn.torch.execution.copies import bytes_of
from mucudnn.torch.lowering.lowered import Lowered

__all__ = ["Homes", "at_home"]

Memory = Callable[[str, int], torch.Tensor]


def at_home(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is none of PyTorch's allocator."""
    return not tensor.untyped_storage().resizable()


@dataclass(frozen=True)
class Homes:
    """The inputs of a program that are host-resident.

    Attributes:
        places: Which of the inputs, and their storages.
        memory: Allocates for a storage so many bytes.
    """

    places: tuple[tuple[int, str], ...]
    memory: Memory

    @classmethod
    def of(cls, lowered: Lowered, schedule: Schedule, memory: Memory) -> "Homes":
        """What a schedule has on the host, in memory of this kind."""
        hosted, storages = set(schedule.hosted), lowered.graph.storages
        found = ((i, storages[t]) for i, t in enumerate(lowered.inputs) if t)
        return cls(tuple((i, name) for i, name in found if name in hosted), memory)

    def move(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give these inputs their homes, as far as they are not there.

        A tensor's memory may be PyTorch's again, after a checkpoint was loaded.

        Raises:
            UnsupportedError: One is not on the CPU.
            OutOfMemoryError: There is no room; what has moved stays as it was.
        """
        moved: dict[int, torch.Tensor] = {}
        for place, storage in self.places:
            if not at_home(tensors[place]):
                _move(tensors[place], partial(self.memory, storage), moved)


def _move(
    tensor: torch.Tensor,
    memory: Callable[[int], torch.Tensor],
    moved: dict[int, torch.Tensor],
) -> None:
    """Give a tensor, and all that share its bytes, other memory."""
    if not tensor.is_cpu:
        raise UnsupportedError(
            f"a parameter or state is on {tensor.device}; these leave the device on "
            "the CPU so far"
        )
    whole = bytes_of(tensor.detach())
    home = moved.get(whole.data_ptr())
    if home is None:
        home = moved[whole.data_ptr()] = memory(whole.numel())
        home.copy_(whole)
    tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
        home.untyped_storage(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
    )
