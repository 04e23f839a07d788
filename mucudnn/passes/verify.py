"""Replay a schedule on paper: the oracle that every scheduler is tested against.

Of every storage it is known which tensors' values its bytes are at the moment. A view
adds a name, a result in place replaces what was there. A node that reads a tensor whose
value is gone, whatever the reason, is an error: an order, an alias or a copy at the
wrong time is found without computing anything.
"""

from mucudnn.errors import ScheduleError
from mucudnn.ir.graph import PERSISTENT, Node
from mucudnn.ir.schedule import (
    Alloc,
    Compute,
    Free,
    Instruction,
    Schedule,
    SwapIn,
    SwapOut,
    Wait,
)
from mucudnn.passes.dependencies import VIEWS
from mucudnn.passes.liveness import kept, rounded

__all__ = ["verify"]


def verify(
    schedule: Schedule, budget: float | None = None, *, granularity: int = 1
) -> int:
    """Check every rule of the instruction set.

    Args:
        schedule: To replay.
        budget: Bytes that it must never exceed.
        granularity: Every storage takes a multiple of this many bytes.

    Returns:
        The peak in bytes: persistent tensors, storages, and the workspace of the node
        that runs.

    Raises:
        ScheduleError: A read of what is not there, a write to what is not allocated,
            a double allocation or free, a free or write under a copy, a node that runs
            twice or never, a leak, a result that is lost, a peak that is not the one
            stated or over the budget.
    """
    replay = _Replay(schedule, granularity)
    for instruction in schedule.instructions:
        replay.step(instruction)
    replay.finish()
    if replay.peak != schedule.peak_bytes:
        raise ScheduleError(
            f"the schedule states a peak of {schedule.peak_bytes} bytes, "
            f"its instructions need {replay.peak}"
        )
    if budget is not None and replay.peak > budget:
        raise ScheduleError(f"peak {replay.peak} exceeds the budget of {budget}")
    return replay.peak


class _Replay:
    """What memory and host hold after the instructions so far."""

    def __init__(self, schedule: Schedule, granularity: int) -> None:
        self._graph = graph = schedule.graph
        self._granularity = granularity
        self._workspaces = schedule.workspaces
        self._storages = graph.storages
        self._nodes = {node.name: node for node in graph.nodes}
        self._ran: set[str] = set()
        self._persistent = {spec.name for spec in graph.with_role(*PERSISTENT)}
        self._content = {
            name: {name}
            for name in self._persistent
            if graph.tensors[name].alias is None
        }
        self._fed = {name: {name} for name in graph.inputs}
        self._hosted: dict[str, set[str]] = {}
        self._moving: dict[str, type[SwapIn] | type[SwapOut]] = {}
        self._used = sum(self._size(name) for name in self._content)
        self.peak = self._used

    def step(self, instruction: Instruction) -> None:
        """Carry out one instruction."""
        match instruction:
            case Compute(name):
                self._need(name in self._nodes, instruction, "there is no such node")
                self._compute(self._nodes[name], instruction)
            case Alloc(tensor):
                self._owner(tensor, instruction)
                absent = tensor not in self._content
                self._need(absent, instruction, "it is allocated already")
                self._content[tensor] = self._fed.pop(tensor, set())
                self._used += self._size(tensor)
                self.peak = max(self.peak, self._used)
            case Free(tensor):
                self._owner(tensor, instruction)
                self._settled(tensor, instruction)
                self._need(tensor in self._content, instruction, "it is not allocated")
                del self._content[tensor]
                self._used -= self._size(tensor)
            case SwapOut(tensor):
                self._owner(tensor, instruction)
                self._settled(tensor, instruction)
                held = bool(self._content.get(tensor))
                self._need(held, instruction, "there is nothing to save")
                self._moving[tensor] = SwapOut
                self._hosted[tensor] = set(self._content[tensor])
            case SwapIn(tensor):
                self._owner(tensor, instruction)
                self._settled(tensor, instruction)
                room = tensor in self._content
                self._need(room, instruction, "it has no room to return to")
                saved = tensor in self._hosted
                self._need(saved, instruction, "it is not on the host")
                self._moving[tensor] = SwapIn
                self._content[tensor] = set(self._hosted[tensor])
            case Wait(tensor):
                self._owner(tensor, instruction)
                self._moving.pop(tensor, None)

    def finish(self) -> None:
        """Check that everything has run, and what is left."""
        missing = [name for name in self._nodes if name not in self._ran]
        if missing:
            raise ScheduleError(f"nodes {missing} never run")
        if self._moving:
            raise ScheduleError(f"nothing waits for the copies of {list(self._moving)}")
        results = kept(self._graph)
        left = set(self._content) - results - self._persistent
        if leaked := sorted(left - self._unread()):
            raise ScheduleError(f"{leaked} are never freed")
        gradients = (
            name
            for name in self._graph.gradients.values()
            if self._storages[name] in results
        )
        for name in (*self._graph.outputs, *gradients):
            if name not in self._content.get(self._storages[name], ()):
                raise ScheduleError(f"output {name!r} is lost at the end")

    def _unread(self) -> set[str]:
        """Inputs that nobody reads: they stay, as nothing tells when to free them."""
        readers = self._graph.readers
        return {name for name in self._graph.inputs if not readers[name]}

    def _compute(self, node: Node, instruction: Instruction) -> None:
        self._need(node.name not in self._ran, instruction, "it has run already")
        self._ran.add(node.name)
        for name in node.inputs:
            storage = self._storages[name]
            there = name in self._content.get(storage, ())
            self._need(there, instruction, f"it reads {name!r}, which is not there")
            arriving = self._moving.get(storage) is SwapIn
            self._need(not arriving, instruction, f"it reads {name!r}, still copied")
        for name in (*node.mutates, *node.outputs):
            storage = self._storages[name]
            room = storage in self._content
            self._need(room, instruction, f"{name!r} has no memory")
            if node.op not in VIEWS:
                self._settled(storage, instruction)
        for name in node.mutates:
            storage = self._storages[name]
            persistent = storage in self._persistent
            self._content[storage] = {storage} if persistent else {name}
        for name in node.outputs:
            storage = self._storages[name]
            if node.op in VIEWS:
                self._content[storage].add(name)
                if node.inputs[0] in self._hosted.get(storage, ()):
                    self._hosted[storage].add(name)
            else:
                self._content[storage] = {name}
        self.peak = max(self.peak, self._used + self._workspaces.get(node.name, 0))

    def _size(self, storage: str) -> int:
        return rounded(self._graph.tensors[storage].nbytes, self._granularity)

    def _owner(self, tensor: str, instruction: Instruction) -> None:
        owner = self._storages.get(tensor)
        own = owner == tensor
        self._need(own, instruction, "it has no memory of its own in this graph")
        fixed = tensor in self._persistent
        self._need(not fixed, instruction, "it is persistent and never moves")

    def _settled(self, storage: str, instruction: Instruction) -> None:
        busy = storage in self._moving
        self._need(not busy, instruction, f"{storage!r} is being copied")

    @staticmethod
    def _need(holds: bool, instruction: Instruction, problem: str) -> None:
        if not holds:
            raise ScheduleError(f"{instruction}: {problem}")
