"""A whole step that is ready to run, wherever its tensors are, and all or nothing.

A step computes first and writes parameters, buffers and state as late as memory allows.
An error or an interrupt before the first write leaves everything as it was. From there
on Ctrl-C waits until the step is complete. Where an error stops a step in between, the
next one is refused.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mucudnn.errors import BackendError, VerificationError
from mucudnn.ir.schedule import Schedule
from mucudnn.passes.scheduling.costs import origin
from mucudnn.torch.capture.optimizers import UnusedState
from mucudnn.torch.execution.copies import host_bytes
from mucudnn.torch.execution.homes import Homes
from mucudnn.torch.execution.lanes import copies_for, device_of
from mucudnn.torch.execution.program import Segment, bind
from mucudnn.torch.execution.random_states import generator_of, keep_state, set_state
from mucudnn.torch.execution.tiers import TierCopies
from mucudnn.torch.interrupts import DeferredInterrupt
from mucudnn.torch.lowering.lowered import Lowered

__all__ = ["BoundStep", "StepCommit", "bind_step"]

_AFTER = {
    False: "nothing that is trained was changed: the step can be run again",
    True: "the step had begun to change what is trained: go on from a checkpoint",
}

_HALF_DONE = (
    "a training step was left half done by {}: of the parameters, buffers and "
    "optimizer state some are as after it and some as before; load a checkpoint into "
    "the model and the optimizer (load_state_dict), then call reset() of the step"
)


class StepCommit:
    """What the steps of one optimizer change for good: all of it or nothing.

    Args:
        optimizer: State that is made for a plan stays with it once a step has used it.

    Attributes:
        begun: Whether the step under way has written something.
        unused: The state that no step has used yet.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.begun = False
        self.unused = UnusedState(optimizer)
        self._half_done = ""
        self._interrupt = DeferredInterrupt()

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Put back what is made of the optimizer's state."""
        try:
            self.unused.lend()
            yield
            self._interrupt.begin()
        finally:
            self.unused.withdraw()
            self._interrupt.end()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Complete a step that has begun to write, or remember that it is half done.

        Raises:
            BackendError: The last step was left half done.
        """
        if self._half_done:
            raise BackendError(self._half_done)
        self.begun, note = False, ""
        try:
            self.unused.lend()
            yield
            self.unused.keep()
            note = "the step that was under way is complete"
        except BaseException as e:
            if not self.begun:
                self.unused.withdraw()
                raise
            self.unused.keep()
            # A step that was found wrong afterwards is complete.
            if not isinstance(e, VerificationError):
                self._half_done = _HALF_DONE.format(type(e).__name__)
                e.add_note(self._half_done)
            raise
        finally:
            self._interrupt.end(note)

    def begin(self) -> None:
        """Have Ctrl-C wait until the step is complete: its first write comes next."""
        if not self.begun:
            self._interrupt.begin()
            self.begun = True

    def reset(self) -> None:
        """Forget that a step was left half done."""
        self._half_done = ""


@dataclass(frozen=True)
class BoundStep:
    """A program, and where what it borrows for the device lives.

    Attributes:
        segment: The program.
        device: The type of the device that it runs on.
        homes: Of inputs that are host-resident.
        random: The devices whose generators it draws from; None is the CPU.
        tiers: What copies to the tiers that were planned for, if any were.
    """

    segment: Segment
    device: str
    homes: Homes
    random: Sequence[torch.device | None] = ()
    tiers: TierCopies | None = None

    @property
    def source(self) -> str:
        """The program, to be read."""
        return self.segment.source

    def run(self, given: list[Any], commit: StepCommit) -> list[Any]:
        """One step: values of the graph's inputs in, which are let go of; results out.

        Nothing is cast: what had to be was when the step was captured. If it fails
        before its first write, random numbers are as they were too.

        Raises:
            BackendError: A tier has lost what was there; says whether anything that is
                trained was changed already.
        """
        self.homes.move(given)
        given.append(commit.begin)
        drawn = [(keep_state(device), device) for device in self.random]
        try:
            with torch.no_grad(), torch.autocast(self.device, enabled=False):
                return self.segment.run(given)
        except BaseException as e:
            if not commit.begun:
                for state, device in drawn:
                    set_state(state, device)
            if self.tiers is not None and isinstance(e, BackendError):
                raise BackendError(f"{e}; {_AFTER[commit.begun]}") from e
            raise


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
    first = {origin(node.name) for node in schedule.graph.nodes}
    random = {generator_of(lowered, n) for n in first if lowered.calls[n].random}
    return BoundStep(
        bind(lowered, schedule, copies, announced=True),
        device.type,
        Homes.of(lowered, schedule, memory),
        tuple(random),
        tiers,
    )


def _host_memory(storage: str, nbytes: int) -> torch.Tensor:
    """Memory of the host, whatever it is for."""
    return host_bytes(nbytes)
