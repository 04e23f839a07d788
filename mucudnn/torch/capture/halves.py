"""A program in two halves: what runs before the loss, and what after it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mucudnn.ir.graph import Phase
from mucudnn.ir.schedule import Compute, Schedule, SwapOut
from mucudnn.passes.scheduling.costs import origin
from mucudnn.torch.execution.lanes import Copies, copies_for, device_of
from mucudnn.torch.execution.program import Kept, Program, Segment
from mucudnn.torch.internals import graph_is_kept
from mucudnn.torch.lowering.lowered import NOTHING, Layout, Lowered
from mucudnn.torch.storages import storage_of

__all__ = ["Count", "Half", "Halves", "bind_halves", "runner_of"]


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
