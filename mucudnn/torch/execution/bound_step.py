"""A whole step that is ready to run, wherever its tensors are."""

from dataclasses import dataclass
from typing import Any

import torch

from mucudnn.ir.schedule import Schedule
from mucudnn.torch.execution.homes import Homes
from mucudnn.torch.execution.lanes import copies_for, device_of
from mucudnn.torch.execution.program import Segment, bind
from mucudnn.torch.lowering.lowered import Lowered

__all__ = ["BoundStep", "bind_step"]


@dataclass(frozen=True)
class BoundStep:
    """A program, and where what it borrows for the device lives.

    Attributes:
        segment: The program.
        device: The type of the device that it runs on.
        homes: Of inputs that are host-resident.
    """

    segment: Segment
    device: str
    homes: Homes

    @property
    def source(self) -> str:
        """The program, to be read."""
        return self.segment.source

    def run(self, given: list[Any]) -> list[Any]:
        """One step: values of the graph's inputs in, which are let go of; results out.

        Nothing is cast: what had to be was when the step was captured.
        """
        self.homes.move(given)
        with torch.no_grad(), torch.autocast(self.device, enabled=False):
            return self.segment.run(given)


def bind_step(lowered: Lowered, schedule: Schedule) -> BoundStep:
    """A schedule on the device of its tensors; its copies keep their host memory.

    Raises:
        UnsupportedError: Tensors are on several devices.
    """
    device = device_of(lowered.layouts)
    segment = bind(lowered, schedule, copies_for(device, reuse=True))
    return BoundStep(segment, device.type, Homes.of(lowered, schedule))
