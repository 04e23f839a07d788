"""Replay a schedule on paper: the oracle that every scheduler is tested against.

Of every storage it is known which tensors' values its bytes are at the moment. A view
adds a name, a result in place replaces what was there. A node that reads a tensor whose
value is gone, whatever the reason, is an error: an order, an alias or a copy at the
wrong time is found without computing anything. What is carried into the next step must
be found there as this step found it.
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
from mucudnn.ir.tensor import Role
from mucudnn.passes.liveness import live_at_end, rounded


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
            twice or never, a leak, a result or new weights that are lost, a step that
            ends otherwise than it began, a peak that is not the one stated or over the
            budget.
    """
    replay = _Replay(schedule, granularity)
    replay.run()
    if (
        schedule.live_across
    ):  # the next step finds on the host what this one leaves there
        replay = _Replay(schedule, granularity, replay.outdated)
        replay.run()
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

    def __init__(
        self,
        schedule: Schedule,
        granularity: int,
        outdated: frozenset[str] = frozenset(),
    ) -> None:
        self._schedule = schedule
        self._graph = graph = schedule.graph
        self._granularity = granularity
        self._workspaces = schedule.workspaces
        self._storages = graph.storages
        self._nodes = {node.name: node for node in graph.nodes}
        self._ran: set[str] = set()
        self._persistent = {spec.name for spec in graph.with_role(*PERSISTENT)}
        self._resident = set(schedule.resident)
        self._live_across = set(schedule.live_across)
        self._given: dict[str, set[str]] = {}  # tied ones are several names for one
        for name in graph.inputs:
            self._given.setdefault(graph.storages[name], set()).add(name)
        self._content = {
            name: set(self._given[name])
            for name in self._persistent
            if name in self._resident or name in self._live_across
        }
        inputs = (spec.name for spec in graph.with_role(Role.INPUT))
        self._fed = {name: set(self._given[name]) for name in inputs}
        left = (name for name in schedule.hosted if name not in outdated)
        self._hosted = {name: set(self._given[name]) for name in left}
        self._moving = _moving_at_the_end(schedule)
        self._at_first = dict(self._moving)
        self._used = sum(self._size(name) for name in self._content)
        self.peak = self._used

    @property
    def outdated(self) -> frozenset[str]:
        """What is at home on the host, but has new values on the device only."""
        return frozenset(self._schedule.hosted) - set(self._hosted)

    def run(self) -> None:
        """Carry out a step."""
        for instruction in self._schedule.instructions:
            self._step(instruction)
        self._finish()

    def _step(self, instruction: Instruction) -> None:
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
                safe = tensor not in self._persistent or tensor in self._hosted
                self._need(safe, instruction, "its new values are nowhere else")
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

    def _finish(self) -> None:
        """Check that everything has run, and what is left."""
        missing = [name for name in self._nodes if name not in self._ran]
        if missing:
            raise ScheduleError(f"nodes {missing} never run")
        if self._moving != self._at_first:
            raise ScheduleError(f"nothing waits for the copies of {list(self._moving)}")
        results = live_at_end(self._graph)
        visiting = self._persistent & set(self._content) - self._resident
        if visiting != self._live_across:
            odd = sorted(visiting ^ self._live_across)
            raise ScheduleError(f"the next step does not find {odd} as this one did")
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
            if not node.traits.view:
                self._settled(storage, instruction)
        for name in node.mutates:
            storage = self._storages[name]
            persistent = storage in self._persistent
            self._content[storage] = set(self._given[storage]) if persistent else {name}
            self._outdate(storage)
        for name in node.outputs:
            storage = self._storages[name]
            if node.traits.view:
                self._content[storage].add(name)
                if not self._hosted.get(storage, set()).isdisjoint(node.inputs):
                    self._hosted[storage].add(name)
            else:
                self._content[storage] = {name}
                self._outdate(storage)
        self.peak = max(self.peak, self._used + self._workspaces.get(node.name, 0))

    def _outdate(self, storage: str) -> None:
        """The host's copy of a parameter or of state is no longer good."""
        if storage in self._persistent:
            self._hosted.pop(storage, None)
            self._content[storage] |= self._given[storage]

    def _size(self, storage: str) -> int:
        return rounded(self._graph.tensors[storage].nbytes, self._granularity)

    def _owner(self, tensor: str, instruction: Instruction) -> None:
        owner = self._storages.get(tensor)
        own = owner == tensor
        self._need(own, instruction, "it has no memory of its own in this graph")
        fixed = tensor in self._resident
        self._need(not fixed, instruction, "it is persistent and never moves")

    def _settled(self, storage: str, instruction: Instruction) -> None:
        busy = storage in self._moving
        self._need(not busy, instruction, f"{storage!r} is being copied")

    @staticmethod
    def _need(holds: bool, instruction: Instruction, problem: str) -> None:
        if not holds:
            raise ScheduleError(f"{instruction}: {problem}")


def _moving_at_the_end(schedule: Schedule) -> dict[str, type[SwapIn] | type[SwapOut]]:
    """Copies of what is carried that no instruction after them waits for."""
    found: dict[str, type[SwapIn] | type[SwapOut]] = {}
    for instruction in schedule.instructions:
        match instruction:
            case SwapOut(name) | SwapIn(name) if name in schedule.live_across:
                found[name] = type(instruction)
            case Wait(name):
                found.pop(name, None)
    return found
