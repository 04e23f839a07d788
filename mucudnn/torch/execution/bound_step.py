"""Compiled steps, and compiled halves of a step, bound to their host memory.

A step computes first and writes parameters, buffers and state as late as memory allows.
An error or an interrupt before the first write leaves everything unchanged. From there
on Ctrl-C waits until the step is complete. If an error stops a step in between, the
next step is refused.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from mucudnn.errors import BackendError, UnsupportedError, VerificationError
from mucudnn.ir.graph import Phase
from mucudnn.ir.schedule import Compute, Schedule, SwapOut
from mucudnn.passes.scheduling.problem import origin
from mucudnn.processes import DeferredInterrupt
from mucudnn.torch.execution.copies import bytes_of, host_bytes
from mucudnn.torch.execution.cuda_memory import live_tensors
from mucudnn.torch.execution.devices import Copies, copies_for, device_of
from mucudnn.torch.execution.program import (
    CarriedValue,
    Program,
    Segment,
    bind,
    generator_of,
    keep_state,
    set_state,
)
from mucudnn.torch.execution.tiers import TierCopies
from mucudnn.torch.internals import graph_is_kept
from mucudnn.torch.lowering.lowered import NOTHING, Layout, Lowered
from mucudnn.torch.source_lines import storage_of

_AFTER = {
    False: "no parameter or state was changed: the step can be run again",
    True: "the step had begun to change parameters and state: go on from a checkpoint",
}

_HALF_DONE = (
    "a training step was left half done by {}: of the parameters, buffers and "
    "optimizer state some are as after it and some as before; load a checkpoint into "
    "the model and the optimizer (load_state_dict), then call reset() of the step"
)


class StepCommit:
    """Makes the permanent changes of one optimizer's steps all or nothing.

    Args:
        optimizer: It has state that was created for a plan only while a step is planned
            or run, until a step has used it.

    Attributes:
        begun: Whether the current step has written a permanent tensor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.begun = False
        self._optimizer = optimizer
        self._bare: dict[torch.Tensor, None] = {}  # parameters without state
        self._made: dict[torch.Tensor, dict[str, Any]] = {}  # created and not used
        self._half_done = ""
        self._interrupt = DeferredInterrupt()

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Withdraw the optimizer state that is created in this context."""
        try:
            self._lend_state()
            yield
            self._interrupt.begin()
        finally:
            self.withdraw_state()
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
            self._lend_state()
            yield
            self.keep_state()
            note = "the step that was under way is complete"
        except BaseException as e:
            if not self.begun:
                self.withdraw_state()
                raise
            self.keep_state()
            # A step that was found wrong afterwards is complete.
            if not isinstance(e, VerificationError):
                self._half_done = _HALF_DONE.format(type(e).__name__)
                e.add_note(self._half_done)
            raise
        finally:
            self._interrupt.end(note)

    def begin(self) -> None:
        """Defer Ctrl-C until the step is complete: the first write is next."""
        if not self.begun:
            self._interrupt.begin()
            self.begun = True

    def reset(self) -> None:
        """Forget that a step was left half done."""
        self._half_done = ""

    def note_state(self) -> None:
        """Remember which parameters have no state, before some is created."""
        for group in self._optimizer.param_groups:
            found = self._optimizer.state
            bare = (p for p in group["params"] if not found.get(p))
            self._bare.update(dict.fromkeys(bare))

    def withdraw_state(self) -> None:
        """Remove the created state from the optimizer, and remember it."""
        for parameter in self._bare:
            if made := self._optimizer.state.pop(parameter, None):
                self._made[parameter] = made
        self._bare.clear()

    def keep_state(self) -> None:
        """Leave the created state to the optimizer for good."""
        self._bare.clear()
        self._made.clear()

    def _lend_state(self) -> None:
        """Give the optimizer the created state where it has none."""
        for parameter, made in self._made.items():
            if not self._optimizer.state.get(parameter):
                self._bare[parameter] = None
                self._optimizer.state[parameter] = made


@dataclass(frozen=True)
class BoundStep:
    """A compiled step, and where its host-resident inputs live.

    Attributes:
        hosted: Position and storage of each host-resident input.
        random: Devices whose generators it draws from; None is the CPU.
        tiers: Copies to the planned tiers, if the plan has any.
    """

    segment: Segment
    device: str
    hosted: Sequence[tuple[int, str]] = ()
    random: Sequence[torch.device | None] = ()
    tiers: TierCopies | None = None

    def run(self, given: list[Any], commit: StepCommit) -> list[Any]:
        """Run one step on the graph's inputs, which are released; return its results.

        Autocast is off: casts were captured with the step. If the step fails before its
        first write, the states of random generators are restored as well.

        Raises:
            BackendError: A tier has lost its contents; says whether anything that is
                trained was changed already.
        """
        self._move_to_host(given)
        given.append(commit.begin)
        drawn = [(keep_state(device), device) for device in self.random]
        try:
            with torch.no_grad(), torch.autocast(self.device, enabled=False):
                return self.segment.run(given)
        except BaseException as e:
            # Nothing is written so far: a second attempt draws the same numbers.
            if not commit.begun:
                for state, device in drawn:
                    set_state(state, device)
            if isinstance(e, torch.OutOfMemoryError):
                e.add_note(live_tensors(e))
            if self.tiers is not None and isinstance(e, BackendError):
                raise BackendError(f"{e}; {_AFTER[commit.begun]}") from e
            raise

    def _move_to_host(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move host-resident inputs to host memory unless they are there.

        A tensor may be in PyTorch's memory again, after a checkpoint was loaded.

        Raises:
            UnsupportedError: A tensor is not on the CPU.
            OutOfMemoryError: There is not enough memory; moved tensors stay moved.
        """
        shared: dict[int, tuple[str, list[torch.Tensor]]] = {}
        for position, storage in self.hosted:
            if not is_outside_allocator(tensor := tensors[position]):
                shared.setdefault(storage_of(tensor), (storage, []))[1].append(tensor)
        for storage, found in shared.values():
            if not found[0].is_cpu:
                raise UnsupportedError(
                    f"a parameter or optimizer state is on {found[0].device}; these "
                    "are offloaded only if they are on the CPU"
                )
            whole = bytes_of(found[0].detach())
            nbytes = whole.numel()
            tiers = self.tiers
            memory = tiers.memory(storage, nbytes) if tiers else host_bytes(nbytes)
            host = memory.copy_(whole)
            moved = [Layout.of(t.detach()).view_of(host) for t in found]
            # One call in C: an interrupt between two would separate them for good.
            list(map(setattr, found, repeat("data"), moved))


def is_outside_allocator(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory is not of PyTorch's allocator."""
    return not tensor.untyped_storage().resizable()


def bind_step(
    lowered: Lowered, schedule: Schedule, tiers: TierCopies | None = None
) -> BoundStep:
    """Compile a schedule for the device of its tensors.

    Raises:
        UnsupportedError: Tensors are on several devices.
    """
    device = device_of(lowered.layouts)
    copies = tiers or copies_for(device, reuse=True)
    first = {origin(node.name) for node in schedule.graph.nodes}
    random = {generator_of(lowered, n) for n in first if lowered.calls[n].random}
    hosted, storages = set(schedule.hosted), lowered.graph.storages
    inputs = [(i, storages[t]) for i, t in enumerate(lowered.inputs) if t]
    return BoundStep(
        bind(lowered, schedule, copies, announced=True),
        device.type,
        [(i, storage) for i, storage in inputs if storage in hosted],
        tuple(random),
        tiers,
    )


# A program in two halves: forward and backward.


@dataclass(frozen=True)
class Count:
    """Number of tensors that the forward half takes, and of results that it has."""

    tensors: int
    results: int


@dataclass(frozen=True)
class Halves:
    """The two compiled halves of a program.

    Attributes:
        forward: The part up to the last forward node.
        backward: The rest.
        kept: The values that the forward half returns for the backward half.
        private: Position of one of them that is in memory of its own until the backward
            pass: neither input nor result nor overwritten by a gradient, and not on
            the host. None if there is none.
    """

    forward: Segment
    backward: Segment
    kept: Sequence[CarriedValue]
    layouts: Mapping[str, Any]
    inputs: frozenset[str | None]
    private: int | None = None

    @property
    def own(self) -> tuple[int, ...]:
        """Positions of kept values that are on the device and no inputs."""
        return tuple(
            i
            for i, keeps in enumerate(self.kept)
            if keeps.tensor not in self.inputs and not keeps.host_bytes
        )


def bind_halves(
    lowered: Lowered, schedule: Schedule, count: Count, tiers: Copies | None = None
) -> Halves:
    """Compile a joint graph's schedule in two halves, cut behind the forward nodes."""
    cut = _cut(schedule)
    copies = tiers or copies_for(device_of(lowered.layouts), reuse=False)
    program = Program(lowered, schedule, copies)
    # Forward half: it also returns what the backward half needs.
    names = program.declare_inputs(name for name in lowered.inputs if name is not None)
    tangents = names[count.tensors :]
    program.begin_segment(names[: count.tensors])
    program.add_constants()
    program.write(schedule.instructions[:cut])
    program.wait_for_copies()
    forward_results = lowered.results[: count.results]
    results = [program.result(r) for r in forward_results]
    read = _read_later(lowered, schedule, cut, count)
    kept = [
        c
        for c in program.carried_values()
        if c.variable not in tangents and (c.variable != c.value or c.tensor in read)
    ]
    forward = program.end_segment([*results, *(c.value for c in kept)])
    # Backward half.
    program.begin_segment([*(c.variable for c in kept), *tangents])
    program.resume(kept)
    program.write(schedule.instructions[cut:])
    gradients = lowered.results[count.results :]
    results = [
        program.result(gradient)
        for given, gradient in zip(lowered.inputs, gradients, strict=False)
        if given is not None
    ]
    backward = program.end_segment(results)
    storages, given = schedule.graph.storages, frozenset(lowered.inputs)
    others = {*given, *lowered.results, *lowered.constants}
    shared = {storages.get(name) for name in others if isinstance(name, str)}
    private = (
        i
        for i, c in enumerate(kept)
        if c.tensor and not c.host_bytes and storages[c.tensor] not in shared
    )
    return Halves(forward, backward, kept, lowered.layouts, given, next(private, None))


def _cut(schedule: Schedule) -> int:
    """Return the index of the first instruction of the backward half."""
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
            return last + 1  # inputs are written: return before what follows
    return next((i for i in rest if isinstance(program[i], Compute)), len(program))


def _read_later(
    lowered: Lowered, schedule: Schedule, cut: int, count: Count
) -> Collection[str | None]:
    """Return the tensors that the backward half reads, moves or returns.

    None is among them: it stands for the states of generators, which have no name.
    """
    graph, storages = schedule.graph, schedule.graph.storages
    read: set[str | None] = {None, *lowered.results[count.results :]}
    offloaded = set()
    for step in schedule.instructions[cut:]:
        match step:
            case Compute(name) if lowered.calls[origin(name)] is not NOTHING:
                read.update(graph.by_name[name].inputs)
            case SwapOut(storage):
                offloaded.add(storage)
    read.update(name for name in storages if storages[name] in offloaded)
    return read


@dataclass(frozen=True, eq=False)
class Half:
    """One half of a program, as the target of a graph node.

    Attributes:
        own: Positions of arguments that it may overwrite: saved for it alone.
        without: Positions of arguments that it does not take, ascending.
        filled: Positions of results that it does not have, which become None.
    """

    segment: Segment
    own: tuple[int, ...] = ()
    without: tuple[int, ...] = ()
    filled: tuple[int, ...] = ()
    __name__ = "planned_half"

    def __call__(self, *args: Any) -> Any:
        """Run the half on arguments that the caller keeps."""
        return self.run(list(args))

    def run(self, args: list[Any]) -> list[Any]:
        """Run the half on arguments in a list, which it empties."""
        for i in reversed(self.without):
            del args[i]
        # A graph that is kept runs backward again, with what this run overwrites.
        if self.own and graph_is_kept():
            storages = {storage_of(args[i]): args[i] for i in self.own}
            copies = {key: bytes_of(tensor).clone() for key, tensor in storages.items()}
            for i in self.own:
                args[i] = Layout.of(args[i]).view_of(copies[storage_of(args[i])])
        results = self.segment.run(args)
        for i in self.filled:
            results.insert(i, None)
        return results


def runner_of(
    module: torch.fx.GraphModule, example: Sequence[Any]
) -> Callable[..., Any]:
    """Return the function that runs one half, or a graph without gradients."""
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
