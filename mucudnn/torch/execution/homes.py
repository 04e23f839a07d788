"""Where parameters and state are that a step only borrows for the device.

Their home is memory of the host that is not of PyTorch's allocator. On the CPU that is
memory like any other: a tensor there can be read, saved and loaded as before, and is
the very object that the model and the optimizer have. What views it had of its old
bytes are views of those still.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mucudnn.errors import UnsupportedError
from mucudnn.ir.schedule import Schedule
from mucudnn.torch.execution.copies import bytes_of, host_bytes
from mucudnn.torch.lowering.lowered import Lowered

__all__ = ["Homes", "at_home"]


def at_home(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is none of PyTorch's allocator."""
    return not tensor.untyped_storage().resizable()


@dataclass(frozen=True)
class Homes:
    """The inputs of a program that are host-resident.

    Attributes:
        places: Which of the inputs.
    """

    places: tuple[int, ...]

    @classmethod
    def of(cls, lowered: Lowered, schedule: Schedule) -> "Homes":
        """What a schedule has on the host."""
        hosted, storages = set(schedule.hosted), lowered.graph.storages
        inputs = enumerate(lowered.inputs)
        return cls(tuple(i for i, t in inputs if t and storages[t] in hosted))

    def move(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give these inputs their homes, as far as they are not there.

        A tensor's memory may be PyTorch's again, after a checkpoint was loaded.

        Raises:
            UnsupportedError: One is not on the CPU.
        """
        moved: dict[int, torch.Tensor] = {}
        for place in self.places:
            if not at_home(tensors[place]):
                _move(tensors[place], moved)


def _move(tensor: torch.Tensor, moved: dict[int, torch.Tensor]) -> None:
    """Give a tensor, and all that share its bytes, other memory."""
    if not tensor.is_cpu:
        raise UnsupportedError(
            f"a parameter or state is on {tensor.device}; these leave the device on "
            "the CPU so far"
        )
    whole = bytes_of(tensor.detach())
    home = moved.get(whole.data_ptr())
    if home is None:
        home = moved[whole.data_ptr()] = host_bytes(whole.numel())
        home.copy_(whole)
    tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
        home.untyped_storage(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
    )
