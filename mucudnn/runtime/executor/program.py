"""Bind a schedule to memory: every instruction becomes a call without arguments.

A storage has an offset a stay, so a tensor may be at another place after it came back,
and its view is another. What has to be waited for is found here, once: a step that
writes waits for copies that still use the bytes, a copy back for the copy out whose
result it reads. A program without copies has nothing of all that.

Where copies may still run as the next step begins, a program is bound twice: the second
time it knows of those that the first time left running.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mucudnn.backends.base import Array, Backend, Buffer
from mucudnn.errors import ScheduleError, UnsupportedError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import Graph, Node
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
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.passes.graph.dependencies import VIEWS
from mucudnn.passes.placement.layout import Layout
from mucudnn.runtime.executor.copies import Copies
from mucudnn.runtime.executor.hazards import DEVICE, Pending, PendingCopy, Span
from mucudnn.runtime.executor.host_memory import Place

__all__ = ["Call", "Memory", "Program", "Step", "bind"]

Call = Callable[[], None]

_POISON = 0xFF
"""All bits set is NaN in every floating-point type."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a program, and what it does to memory.

    Attributes:
        label: The instruction that it is for.
        call: Does it.
        node: The node that it computes.
        reads: Bytes that it reads.
        writes: Bytes that it writes.
        copy: The copy that it starts.
        after: The copies that this one is told to wait for.
        waits_for: The copy that it waits for.
    """

    label: str
    call: Call
    node: str | None = None
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    copy: PendingCopy | None = None
    after: tuple[int, ...] = ()
    waits_for: int | None = None


class Memory:
    """Where the tensors of a graph are: in an arena, or in the state.

    Args:
        backend: Makes views.
        graph: Whose tensors.
        layout: Offsets in the arena, also of parameters and state that visit it.
        arena: At least `layout.nbytes`.
        state: Arrays of the persistent tensors.
    """

    def __init__(
        self,
        backend: Backend,
        graph: Graph,
        layout: Layout,
        arena: Buffer,
        state: Mapping[str, Array],
    ) -> None:
        self._device = backend.device
        self._graph = graph
        self._layout = layout
        self._arena = arena
        self._state = state
        self._views: dict[tuple[str, int], Array] = {}

    def in_arena(self, storage: str) -> bool:
        """Whether a storage has places in the arena: all but state that never moves."""
        return storage in self._layout.stays

    def array(self, name: str, stay: int) -> Array:
        """A tensor's view during a stay of its storage; -1 for the last."""
        spec = self._graph.tensors[name]
        storage = self._graph.storages[name]
        if not self.in_arena(storage):
            array = self._state[storage]
            same = spec.shape == self._graph.tensors[storage].shape
            return array if same else array.reshape(spec.shape)
        offset = self._layout.stays[storage][stay]
        if (name, offset) not in self._views:
            self._views[name, offset] = self._device.view(self._arena, offset, spec)
        return self._views[name, offset]

    def span(self, storage: str, stay: int) -> Span:
        """The bytes of a storage in the arena."""
        offset = self._layout.stays[storage][stay]
        end = offset + self._graph.tensors[storage].nbytes
        return Span(DEVICE, offset, end, storage)

    def scratch(self, node: str, nbytes: int) -> Span | None:
        """The bytes of a node's workspace; None if it has none."""
        if nbytes == 0:
            return None
        offset = self._layout.workspace_offsets[node]
        return Span(DEVICE, offset, offset + nbytes, "")

    def bytes_of(self, span: Span) -> Buffer:
        """A view of some bytes of the arena."""
        spec = TensorSpec("bytes", (span.stop - span.start,), "uint8")
        return self._device.view(self._arena, span.start, spec)


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule as calls.

    Attributes:
        steps: In order.
        before: Copies of the step before that may be running when it begins.
        copies: How many it starts.
    """

    steps: tuple[Step, ...]
    before: tuple[PendingCopy, ...]
    copies: int

    def touching(self, spans: Iterable[Span]) -> tuple[int, ...]:
        """What to wait for to write some bytes before a step: copies by their calls."""
        known = Pending(self.before)
        found = (copy for span in spans for copy in known.touching(span))
        last = Pending.last_of_each_lane(found)
        return tuple(copy.number + self.copies for copy in last)


def bind(
    backend: Backend,
    schedule: Schedule,
    memory: Memory,
    plans: Mapping[str, ConvPlan],
    copies: Copies,
    places: Mapping[str, Place],
    *,
    poison: bool = False,
) -> Program:
    """The program of a schedule.

    Args:
        backend: Computes.
        schedule: What to run.
        memory: Of its tensors.
        plans: Convolution node -> how to run it.
        copies: Starts copies.
        places: Storage -> where on the host it goes.
        poison: Overwrite memory when it is allocated and when it is freed, so that
            whoever reads it without writing it computes NaN.

    Raises:
        UnsupportedError: The backend has no kernel for an operation.
        ScheduleError: A node reads what is still being copied back.
    """
    before: tuple[PendingCopy, ...] = ()
    total = 0
    for _ in range(2 if schedule.carried else 1):
        binder = _Binder(
            backend, schedule, memory, plans, copies, places, poison, before, total
        )
        for instruction in schedule.instructions:
            binder.visit(instruction)
        known, before, total = before, binder.left(), binder.count
    return Program(tuple(binder.steps), known, total)


class _Binder:
    def __init__(
        self,
        backend: Backend,
        schedule: Schedule,
        memory: Memory,
        plans: Mapping[str, ConvPlan],
        copies: Copies,
        places: Mapping[str, Place],
        poison: bool,
        before: tuple[PendingCopy, ...],
        total: int,
    ) -> None:
        self.steps: list[Step] = []
        self.count = 0
        self._total = total
        self._backend = backend
        self._graph = schedule.graph
        self._workspaces = schedule.workspaces
        self._memory = memory
        self._plans = plans
        self._copies = copies
        self._places = places
        self._poison = poison
        self._fed = {spec.name for spec in self._graph.with_role(Role.INPUT)}
        self._results = {self._graph.storages[name] for name in self._graph.outputs}
        self._carried = set(schedule.carried)
        self._stay = dict.fromkeys(schedule.carried, 0)
        self._last = {copy.source.storage: copy for copy in before}
        self._pending = Pending(before)

    def left(self) -> tuple[PendingCopy, ...]:
        """Copies that may be running at the end, numbered as the next step's past."""
        return tuple(replace(c, number=c.number - self.count) for c in self._pending)

    def visit(self, instruction: Instruction) -> None:
        match instruction:
            case Alloc(name):
                self._stay[name] = self._stay.get(name, -1) + 1
                if name not in self._fed or self._stay[name]:
                    self._spoil(f"Alloc({name})", self._span(name))
            case Free(name):
                if name not in self._results:
                    self._spoil(f"Free({name})", self._span(name))
            case Compute(name):
                self._compute(self._graph.by_name[name])
            case SwapOut(name):
                source, target = self._span(name), self._host(name)
                self._copy("out", f"SwapOut({name})", source, target)
            case SwapIn(name):
                source, target = self._host(name), self._span(name)
                self._copy("in", f"SwapIn({name})", source, target)
            case Wait(name):
                if name in self._last:
                    self._wait([self._last[name]], f"Wait({name})")
                elif name not in self._carried:
                    raise ScheduleError(f"{instruction}: nothing is being copied")

    def _compute(self, node: Node) -> None:
        label = f"Compute({node.name})"
        reads = self._spans(node.inputs)
        for span in reads:
            for copy in self._pending.writing(span):
                raise ScheduleError(
                    f"{label} reads {span.storage!r} while {copy.label} may be running"
                )
        if node.op in VIEWS:
            return
        writes = self._spans((*node.outputs, *node.mutates))
        scratch = self._memory.scratch(node.name, self._workspaces.get(node.name, 0))
        if scratch is not None:
            writes.append(scratch)
        for span in writes:
            self._wait(self._pending.touching(span), f"wait before {label}")
        workspace = None if scratch is None else self._memory.bytes_of(scratch)
        if scratch is not None:
            self._spoil(f"workspace of {node.name}", scratch)
        call = self._call(node, workspace)
        step = Step(label, call, node.name, tuple(reads), tuple(writes))
        self.steps.append(step)

    def _call(self, node: Node, workspace: Buffer | None) -> Call:
        inputs = [self._array(name) for name in node.inputs]
        outputs = [self._array(name) for name in node.outputs]
        if node.op == "conv":
            runner = self._backend.bind(self._plans[node.name])
            a, b = inputs
            out = outputs[0]
            return lambda: runner.run(a, b, out, workspace, False)
        kernel = self._backend.kernels.get(node.op)
        if kernel is None:
            raise UnsupportedError(
                f"backend {self._backend.name!r} has no kernel for {node.op!r} "
                f"({node.name})"
            )
        run, attrs = kernel.run, node.attrs
        return lambda: run(inputs, outputs, attrs, workspace)

    def _copy(self, lane: str, label: str, source: Span, target: Span) -> None:
        """Start a copy once those of the other lane that it collides with are done."""
        number, copies = self.count, self._copies
        self.count += 1
        copy = PendingCopy(number, lane, label, source, target)
        known = [*self._pending.writing(source), *self._pending.touching(target)]
        earlier = Pending.last_of_each_lane(c for c in known if c.lane != lane)
        after = tuple(c.number for c in earlier)
        tickets = tuple(map(self._ticket, after))
        storage = source.storage
        there, here = self._places[storage].buffer, self._span(storage)
        array = self._memory.bytes_of(here)
        call: Call
        if lane == "out":
            call = lambda: copies.out(number, array, there, tickets)  # noqa: E731
        else:
            call = lambda: copies.back(number, there, array, tickets)  # noqa: E731
        self.steps.append(
            Step(label, call, None, (source,), (target,), copy=copy, after=after)
        )
        self._pending.add(copy)
        self._last[storage] = copy

    def _wait(self, for_copies: Iterable[PendingCopy], label: str) -> None:
        """Wait for what is not known to be done."""
        for copy in Pending.last_of_each_lane(for_copies):
            if not self._pending.has(copy.number):
                continue
            call = _waiting(self._copies, self._ticket(copy.number))
            self.steps.append(Step(label, call, waits_for=copy.number))
            self._pending.waited(copy)

    def _ticket(self, number: int) -> int:
        """What a copy is called as it runs: every step numbers them alike."""
        return number if number >= 0 else number + self._total

    def _spoil(self, label: str, span: Span) -> None:
        """Poison memory, unless a copy of what was in it may be running."""
        if not self._poison or span.start == span.stop or self._pending.touching(span):
            return
        target = self._memory.bytes_of(span)
        upload, nbytes = self._backend.device.upload, span.stop - span.start

        def spoil() -> None:
            upload(np.full(nbytes, _POISON, np.uint8), target)

        spoilt = Span(span.space, span.start, span.stop, "")
        self.steps.append(Step(label, spoil, writes=(spoilt,)))

    def _array(self, name: str) -> Array:
        return self._memory.array(name, self._stay.get(self._graph.storages[name], 0))

    def _span(self, storage: str) -> Span:
        return self._memory.span(storage, self._stay.get(storage, 0))

    def _spans(self, names: Iterable[str]) -> list[Span]:
        """Bytes in the arena of some tensors."""
        storages = dict.fromkeys(self._graph.storages[name] for name in names)
        return [self._span(s) for s in storages if self._memory.in_arena(s)]

    def _host(self, storage: str) -> Span:
        nbytes = self._graph.tensors[storage].nbytes
        return self._places[storage].span(storage, nbytes)


def _waiting(copies: Copies, number: int) -> Call:
    return lambda: copies.wait(number)
