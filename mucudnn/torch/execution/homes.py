"""Where parameters and state are that a step only borrows for the device.

Their home is memory of the host that is not of PyTorch's allocator, or a file. On the
CPU that is memory like any other: a tensor there can be read, saved and loaded as
before, and is the very object that the model and the optimizer have. What views it had
of its old bytes are views of those still.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch

from mucudnn.errors import UnsupportedError
from mucudnn.ir.schedule import Schedule
from mucudnn.torch.execution.copies import bytes_of
from mucudnn.torch.lowering.lowered import Lowered
from mucudnn.torch.storages import storage_of

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
        shared: dict[int, tuple[str, list[torch.Tensor]]] = {}
        for place, storage in self.places:
            if not at_home(tensor := tensors[place]):
                shared.setdefault(storage_of(tensor), (storage, []))[1].append(tensor)
        for storage, found in shared.values():
            _move(found, partial(self.memory, storage))


def _move(
    tensors: Sequence[torch.Tensor], memory: Callable[[int], torch.Tensor]
) -> None:
    """Give tensors that share their bytes other memory."""
    if not tensors[0].is_cpu:
        raise UnsupportedError(
            f"a parameter or state is on {tensors[0].device}; these leave the device "
            "on the CPU so far"
        )
    whole = bytes_of(tensors[0].detach())
    home = memory(whole.numel()).copy_(whole).untyped_storage()
    moved = [
        torch.empty(0, dtype=t.dtype).set_(
            home, t.storage_offset(), t.shape, t.stride()
        )
        for t in tensors
    ]
    # One call in C: an interrupt between two tensors would leave them apart for good.
    list(map(setattr, tensors, repeat("data"), moved))
