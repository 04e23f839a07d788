"""A whole step that is ready to run, wherever its tensors are."""

from dataclasses import dataclass
from typing import Any

import torch

from mucudnn.errors import BackendError
from mucudnn.ir.schedule import Schedule
from mucudnn.torch.execution.copies import host_bytes
from mucudnn.torch.execution.homes import Homes
from mucudnn.torch.execution.lanes import copies_for, device_of
from mucudnn.torch.execution.program import Segment, bind
from mucudnn.torch.execution.tiers import TierCopies
from mucudnn.torch.lowering.lowered import Lowered

__all__ = ["BoundStep", "bind_step"]

_AFTER = {
    False: "nothing that is trained was changed: the step can be run again",
    True: "the step had begun to change what is trained: go on from a checkpoint",
}


@dataclass(frozen=True)
class BoundStep:
    """A program, and where what it borrows for the device lives.

    Attributes:
        segment: The program.
        device: The type of the device that it runs on.
        homes: Of inputs that are host-resident.
        tiers: What copies to the tiers that were planned for, if any were.
    """

    segment: Segment
    device: str
    homes: Homes
    tiers: TierCopies | None = None

    @property
    def source(self) -> str:
        """The program, to be read."""
        return self.segment.source

    def run(self, given: list[Any]) -> list[Any]:
        """One step: values of the graph's inputs in, which are let go of; results out.

        Nothing is cast: what had to be was when the step was captured.

        Raises:
            BackendError: A tier has lost what was there; says whether anything that is
                trained was changed already.
        """
        self.homes.move(given)
        with torch.no_grad(), torch.autocast(self.device, enabled=False):
            if self.tiers is None:
                return self.segment.run(given)
            return self._run_in_tiers(given, self.tiers)

    def _run_in_tiers(self, given: list[Any], tiers: TierCopies) -> list[Any]:
        """The same, where what has left may be lost."""
        trained = [tensor for tensor in given if not tensor.is_inference()]
        before = tiers.came_home, [tensor._version for tensor in trained]
        try:
            return self.segment.run(given)
        except BackendError as e:
            after = tiers.came_home, [tensor._version for tensor in trained]
            raise BackendError(f"{e}; {_AFTER[before != after]}") from e


def bind_step(
    lowered: Lowered, schedule: Schedule, tiers: TierCopies | None = None
) -> BoundStep:
    """A schedule on the device of its tensors; its copies keep their host memory.

    Args:
        lowered: The step.
        schedule: What is run.
        tiers: What copies to the tiers that are planned for, if any are.

    Raises:
        UnsupportedError: Tensors are on several devices.
    """
    device = device_of(lowered.layouts)
    copies = tiers or copies_for(device, reuse=True)
    memory = _host_memory if tiers is None else tiers.memory
    return BoundStep(
        bind(lowered, schedule, copies),
        device.type,
        Homes.of(lowered, schedule, memory),
        tiers,
    )


def _host_memory(storage: str, nbytes: int) -> torch.Tensor:
    """Memory of the host, whatever it is for."""
    return host_bytes(nbytes)
