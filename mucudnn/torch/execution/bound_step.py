"""Steps and halves that are ready to run, and host-resident inputs.

A step computes first and writes parameters, buffers and state as late as memory allows.
An error or an interrupt before the first write leaves everything as it was. From there
on Ctrl-C waits until the step is complete. Where an error stops a step in between, the
next one is refused.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch

from mucudnn.errors import BackendError, UnsupportedError, VerificationError
from mucudnn.ir.graph import Phase
from mucudnn.ir.schedule import Compute, Schedule, SwapOut
from mucudnn.passes.scheduling.problem import origin
from mucudnn.torch.capture.optimizers import UnusedState
from mucudnn.torch.execution.copies import bytes_of, host_bytes
from mucudnn.torch.execution.devices import Copies, copies_for, device_of
from mucudnn.torch.execution.program import (
    Kept,
    Program,
    Segment,
    bind,
    generator_of,
    keep_state,
    set_state,
)
from mucudnn.torch.execution.tiers import TierCopies
from mucudnn.torch.internals import graph_is_kept
from mucudnn.torch.interrupts import DeferredInterrupt
from mucudnn.torch.lowering.lowered import NOTHING, Layout, Lowered
from mucudnn.torch.source_lines import storage_of

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


# A program in two halves: what runs before the loss, and what after it.


@dataclass(frozen=True)
class Count:
    """How many tensors the forward half is given, and how many results it has."""

    tensors: int
    results: int


@dataclass(frozen=True)
class Halves:
    """The two halves of a program, and what goes from one to the other."""

    forward: Segment
    backward: Segment
    kept: Sequence[Kept]
    layouts: Mapping[str, Any]
    inputs: frozenset[str | None]


def bind_halves(
    lowered: Lowered,
    schedule: Schedule,
    count: Count,
    tiers: Copies | None = None,
) -> Halves:
    """A schedule in two halves, cut where the last forward node has run.

    Args:
        lowered: The graph.
        schedule: What is run.
        count: What the forward half takes and gives.
        tiers: What copies to the tiers that are planned for, if any are.
    """
    cut = _cut(schedule)
    copies = tiers or copies_for(device_of(lowered.layouts), reuse=False)
    program = Program(lowered, schedule, copies)
    names = program.given(name for name in lowered.inputs if name is not None)
    program.begin(names[: count.tensors])
    for name, value in lowered.constants.items():
        program.constant(name, value)
    program.write(schedule.instructions[:cut])
    program.settle()
    results = [program.result(r) for r in lowered.results[: count.results]]
    tangents = names[count.tensors :]
    read = _read_later(lowered, schedule, cut, count)
    kept = [
        k
        for k in program.kept()
        if k.variable not in tangents and (k.variable != k.value or k.tensor in read)
    ]
    forward = program.end([*results, *(k.value for k in kept)])
    program.begin([*(k.variable for k in kept), *tangents])
    program.resume(kept)
    program.write(schedule.instructions[cut:])
    gradients = lowered.results[count.results :]
    results = [
        program.result(gradient)
        for given, gradient in zip(lowered.inputs, gradients, strict=False)
        if given is not None
    ]
    inputs = frozenset(lowered.inputs)
    return Halves(forward, program.end(results), kept, lowered.layouts, inputs)


def _cut(schedule: Schedule) -> int:
    """The first instruction of the second half."""
    nodes = schedule.graph.by_name
    program = schedule.instructions
    last = max(
        (
            i
            for i, step in enumerate(program)
            if isinstance(step, Compute) and nodes[step.node].phase is Phase.FORWARD
        ),
        default=-1,
    )
    rest = range(last + 1, len(program))
    match program[last] if last >= 0 else None:
        case Compute(node) if nodes[node].mutates:
            return last + 1  # inputs are written: what goes with that is returned first
    return next((i for i in rest if isinstance(program[i], Compute)), len(program))


def _read_later(
    lowered: Lowered, schedule: Schedule, cut: int, count: Count
) -> Collection[str | None]:
    """Tensors that the second half reads, moves or returns; states have no name."""
    graph, storages = schedule.graph, schedule.graph.storages
    read: set[str | None] = {None, *lowered.results[count.results :]}
    leaving = set()
    for step in schedule.instructions[cut:]:
        match step:
            case Compute(name) if lowered.calls[origin(name)] is not NOTHING:
                read.update(graph.by_name[name].inputs)
            case SwapOut(storage):
                leaving.add(storage)
    read.update(name for name in storages if storages[name] in leaving)
    return read


@dataclass(frozen=True, eq=False)
class Half:
    """One half of a program, as a node of a graph calls it.

    Attributes:
        segment: What is run.
        own: Arguments that it may write over: kept for it and for nobody else.
        without: Arguments that it does not take, in ascending order.
        filled: Results that it does not have, which are None.
    """

    segment: Segment
    own: tuple[int, ...] = ()
    without: tuple[int, ...] = ()
    filled: tuple[int, ...] = ()
    __name__ = "planned_half"

    def __call__(self, *args: Any) -> Any:
        """Run it on arguments that stay."""
        return self.run(list(args))

    def run(self, args: list[Any]) -> list[Any]:
        """Run it on arguments in a list, which it empties."""
        for i in reversed(self.without):
            del args[i]
        if self.own and graph_is_kept():
            copies = _apart([args[i] for i in self.own])
            for i, copied in zip(self.own, copies, strict=True):
                args[i] = copied
        results = self.segment.run(args)
        for i in self.filled:
            results.insert(i, None)
        return results


def runner_of(
    module: torch.fx.GraphModule, example: Sequence[Any]
) -> Callable[..., Any]:
    """One half, or a graph that no gradient is asked of."""
    del example
    targets = (node.target for node in module.graph.nodes)
    half = next((t for t in targets if isinstance(t, Half)), None)

    def run(args: list[Any]) -> Any:
        if half is not None:
            with torch.no_grad():
                return half.run(args)
        mine = list(args)
        args.clear()
        return module(*mine)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _apart(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that lie as those given, in copies of their storages."""
    storages: dict[int, torch.UntypedStorage] = {}
    found = []
    for tensor in tensors:
        place = storage_of(tensor)
        if place not in storages:
            storages[place] = tensor.untyped_storage().clone()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        lies = (tensor.storage_offset(), tensor.shape, tensor.stride())
        lying = empty.set_(storages[place], *lies)
        found.append(Layout.of(tensor).read(lying))
    return found
