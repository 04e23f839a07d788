"""Bind a schedule to memory: every instruction becomes a call without arguments.

A storage has one arena offset per residency interval, so a tensor may be at another
offset after it was fetched, and then has another view. Waits are derived once, here: a
task that writes waits for copies that still use the bytes, and a fetch waits for the
offload whose result it reads. A program without copies has no waits.

Where copies may still run as the next step begins, a program is bound twice: the second
pass starts from the copies that the first one left running.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mucudnn.backends.base import Backend, Kernel
from mucudnn.backends.device import Array, Buffer, Way
from mucudnn.errors import ScheduleError, UnsupportedError
from mucudnn.ir.channels_last import operands_of
from mucudnn.ir.conv import ConvPlan, Direction
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.operations import EPILOGUE, make_node
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
from mucudnn.passes.placement.layout import Layout
from mucudnn.runtime.executor.tasks import (
    DEVICE,
    Batchable,
    ByteRange,
    Call,
    Copies,
    Pending,
    PendingCopy,
    Program,
    Task,
    Watcher,
    batchable,
)
from mucudnn.runtime.executor.tiers import HostSlot


class Memory:
    """Addresses of the tensors of a graph, in an arena or in the persistent state.

    `offsets` has the storages in the arena: all but persistent state that is resident.
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
        self.offsets = layout.offsets
        self._arena = arena
        self._state = state
        self._views: dict[tuple[str, int], Array] = {}

    def array(self, name: str, interval: int) -> Array:
        """Return a tensor's view in a residency interval; -1 for the last."""
        spec = self._graph.tensors[name]
        storage = self._graph.storages[name]
        if storage not in self.offsets:
            array = self._state[storage]
            same = spec.shape == self._graph.tensors[storage].shape
            return array if same else array.reshape(spec.shape)
        return self._view(name, self.offsets[storage][interval])

    def array_in(self, touched: Iterable[ByteRange], name: str) -> Array:
        """Return a tensor's view among byte ranges that a task touches."""
        storage = self._graph.storages[name]
        if storage not in self.offsets:
            return self.array(name, 0)
        found = next(part for part in touched if part.storage == storage)
        return self._view(name, found.start)

    def _view(self, name: str, start: int) -> Array:
        offset = start + self._graph.offset(name)
        if (name, offset) not in self._views:
            spec = self._graph.tensors[name]
            self._views[name, offset] = self._device.view(self._arena, offset, spec)
        return self._views[name, offset]

    def byte_range(self, storage: str, interval: int) -> ByteRange:
        """Return the arena bytes of a storage in a residency interval."""
        offset = self.offsets[storage][interval]
        return self._part(offset, self._graph.tensors[storage].nbytes, storage)

    def scratch(self, node: str, nbytes: int) -> ByteRange | None:
        """Return the bytes of a node's workspace; None if it has none."""
        if nbytes == 0:
            return None
        return self._part(self._layout.workspace_offsets[node], nbytes, "")

    def _part(self, offset: int, nbytes: int, storage: str) -> ByteRange:
        stop = offset + nbytes
        pages = self._layout.pages
        pieces = () if pages is None else pages.extents(offset, stop)
        return ByteRange(DEVICE, offset, stop, storage, pieces)

    def bytes_of(self, part: ByteRange) -> Buffer:
        """Return a view of some bytes of the arena."""
        spec = TensorSpec("bytes", (part.stop - part.start,), "uint8")
        return self._device.view(self._arena, part.start, spec)


@dataclass(frozen=True, slots=True)
class Binding:
    """A schedule and everything that its calls are bound to.

    Attributes:
        plans: Convolution node -> plan.
        host: Offloaded storage -> slot on the host.
        watcher: Test hook that overwrites memory when it is allocated and freed.
    """

    backend: Backend
    schedule: Schedule
    memory: Memory
    plans: Mapping[str, ConvPlan]
    copies: Copies
    host: Mapping[str, HostSlot]
    watcher: Watcher | None = None


def bind(binding: Binding) -> Program:
    """Bind a schedule to a program."""
    before: tuple[PendingCopy, ...] = ()
    total = 0
    for _ in range(2 if binding.schedule.live_across else 1):
        binder = _Binder(binding, before, total)
        for instruction in binding.schedule.instructions:
            binder.visit(instruction)
        # The next step numbers the copies that this one leaves running below 0.
        unfinished = (
            replace(c, number=c.number - binder.count) for c in binder.pending
        )
        known, before, total = before, tuple(unfinished), binder.count
    return Program(tuple(binder.tasks), known, total)


def kernel_of(backend: Backend, node: Node) -> Kernel:
    """Return the kernel of a node; `UnsupportedError` if there is none."""
    kernel = backend.kernels.get(node.op)
    if kernel is None:
        raise UnsupportedError(
            f"backend {backend.name!r} has no kernel for {node.op!r} ({node.name})"
        )
    return kernel


class _Binder:
    """State of binding: tasks, copies in flight, current residency intervals.

    `before` has the copies of the previous step that may still run, of `total` in all.
    """

    def __init__(
        self, binding: Binding, before: tuple[PendingCopy, ...], total: int
    ) -> None:
        self.tasks: list[Task] = []
        self.count = 0
        self._binding = binding
        self._memory = binding.memory
        self._graph = binding.schedule.graph
        self._total = total
        self._interval = dict.fromkeys(binding.schedule.live_across, 0)
        self._last = {copy.source.storage: copy for copy in before}
        self.pending = Pending(before)

    def visit(self, instruction: Instruction) -> None:
        match instruction:
            case Alloc(name):
                self._interval[name] = self._interval.get(name, -1) + 1
                # Inputs are written before the program begins: overwriting would lose
                # them.
                fed = self._graph.tensors[name].role is Role.INPUT
                if not fed or self._interval[name]:
                    self._overwrite(f"Alloc({name})", self._device_bytes(name))
            case Free(name):
                # Outputs are read behind the last instruction, when they are freed
                # already.
                if all(name != self._graph.storages[o] for o in self._graph.outputs):
                    self._overwrite(f"Free({name})", self._device_bytes(name))
            case Compute(name):
                self._compute(self._graph.by_name[name])
            case SwapOut(name):
                self._copy("out", name)
            case SwapIn(name):
                self._copy("back", name)
            case Wait(name):
                if name in self._last:
                    self._wait([self._last[name]], f"Wait({name})")
                elif name not in self._binding.schedule.live_across:
                    raise ScheduleError(f"{instruction}: no copy is running")

    def _compute(self, node: Node) -> None:
        label = f"Compute({node.name})"
        # A missing `Wait` is a fault of the schedule: the node would read half a
        # tensor.
        reads = self._touched(node.inputs)
        for part in reads:
            for copy in self.pending.writing(part):
                raise ScheduleError(
                    f"{label} reads {part.storage!r} while {copy.label} may be running"
                )
        if node.traits.view:
            return
        writes = self._touched((*node.outputs, *node.mutates))
        nbytes = self._binding.schedule.workspaces.get(node.name, 0)
        scratch = self._memory.scratch(node.name, nbytes)
        if scratch is not None:
            writes.append(scratch)
        for part in writes:
            self._wait(self.pending.touching(part), f"wait before {label}")
        workspace = None
        if scratch is not None:
            workspace = self._memory.bytes_of(scratch)
            self._overwrite(f"workspace of {node.name}", scratch)
        joins = None
        if node.op == "conv":
            call = self._convolution(node, workspace)
        else:
            call, joins = self._kernel(node, workspace)
        touched = tuple(reads), tuple(writes)
        self.tasks.append(Task(label, call, node.name, *touched, batchable=joins))

    def _convolution(self, node: Node, workspace: Buffer | None) -> Call:
        backend, plan = self._binding.backend, self._binding.plans[node.name]
        a, b, *more = map(self._array, node.inputs)
        out = self._array(node.outputs[0])
        if more and plan.problem.direction is Direction.FORWARD:
            operands = a, b, *more, out, workspace
            if backend.epilogues is not None:
                fused = backend.epilogues.bind(plan, *operands)
                if fused is not None:
                    return fused
            # Without a fused kernel, bias and ReLU are a call of their own, in place.
            y, op = node.outputs[0], EPILOGUE[1]
            inputs = y, node.inputs[2]
            behind = make_node(
                self._graph.tensors, f"{node.name}:{op}", op, inputs, (y,)
            )
            return _unfused(backend, plan, operands, self._kernel(behind, None)[0])
        return partial(backend.bind(plan).run, a, b, out, workspace, bool(more))

    def _kernel(
        self, node: Node, workspace: Buffer | None
    ) -> tuple[Call, Batchable | None]:
        """Return the call of a node with a kernel, and how to batch the call."""
        # Kernels know channels-first shapes only: channels-last images are seen as
        # such.
        kernel = kernel_of(self._binding.backend, node)
        reads, writes, attrs = operands_of(self._graph, node)
        inputs, outputs = map(self._seen, reads), map(self._seen, writes)
        arguments = list(inputs), list(outputs), attrs, workspace
        joins = batchable(self._graph, node, kernel, arguments)
        return kernel.call(*arguments), joins

    def _copy(self, way: Way, storage: str) -> None:
        """Start a copy after the conflicting copies on other streams."""
        copies, slot = self._binding.copies, self._binding.host[storage]
        stream = f"{way} {slot.link}" if slot.link else way
        device = self._device_bytes(storage)
        host = slot.byte_range(storage, self._graph.tensors[storage].nbytes)
        array = self._memory.bytes_of(device)
        if way == "out":
            label, source, target = f"SwapOut({storage})", device, host
            ends = array, slot.buffer
        else:
            label, source, target = f"SwapIn({storage})", host, device
            ends = slot.buffer, array
        # A copy waits for copies that write its source, or read or write its target.
        # Copies on one stream run in order, so the last one of each other stream is
        # enough.
        known = [*self.pending.writing(source), *self.pending.touching(target)]
        earlier = Pending.last_of_each_stream(c for c in known if c.stream != stream)
        after = tuple(c.number for c in earlier)
        tickets = tuple(map(self._ticket, after))
        call = copies.bound(way, self.count, *ends, tickets, slot.link)
        copy = PendingCopy(self.count, stream, label, source, target)
        self.tasks.append(
            Task(label, call, None, (source,), (target,), copy=copy, after=after)
        )
        self.pending.add(copy)
        self._last[storage] = copy
        self.count += 1

    def _wait(self, for_copies: Iterable[PendingCopy], label: str) -> None:
        for copy in Pending.last_of_each_stream(for_copies):
            if any(other.number == copy.number for other in self.pending):
                call = partial(self._binding.copies.wait, self._ticket(copy.number))
                self.tasks.append(Task(label, call, waits_for=copy.number))
                self.pending.waited(copy)

    def _ticket(self, number: int) -> int:
        """Return a copy's number at run time, which is the same in every step."""
        return number if number >= 0 else number + self._total

    def _overwrite(self, label: str, part: ByteRange) -> None:
        """Let a watcher overwrite memory, unless a copy of its contents may run."""
        watcher = self._binding.watcher
        empty = part.start == part.stop
        if watcher is None or empty or self.pending.touching(part):
            return
        # A task that reads the memory without writing it first then computes garbage.
        call = partial(watcher.overwrite, self._memory.bytes_of(part))
        self.tasks.append(Task(label, call, writes=(replace(part, storage=""),)))

    def _array(self, name: str) -> Array:
        return self._memory.array(
            name, self._interval.get(self._graph.storages[name], 0)
        )

    def _seen(self, spec: TensorSpec) -> Array:
        """Return a tensor's view in the shape that its kernel expects."""
        array = self._array(spec.name)
        same = self._graph.tensors[spec.name].shape == spec.shape
        return array if same else array.reshape(spec.shape)

    def _device_bytes(self, storage: str) -> ByteRange:
        return self._memory.byte_range(storage, self._interval.get(storage, 0))

    def _touched(self, names: Iterable[str]) -> list[ByteRange]:
        storages = dict.fromkeys(self._graph.storages[name] for name in names)
        return [self._device_bytes(s) for s in storages if s in self._memory.offsets]


def ways_to_run(
    backend: Backend,
    plan: ConvPlan,
    graph: Graph,
    operands: Sequence[Array],
    workspace: Buffer | None,
) -> tuple[Call, ...]:
    """Return the fused and the separate call of conv + bias + ReLU; () if unfusable.

    `graph` has one node, bias and ReLU in place; `operands` are x, w, y and the bias.
    """
    x, w, y, bias = operands
    assert backend.epilogues is not None
    fused = backend.epilogues.bind(plan, x, w, bias, y, workspace)
    if fused is None:
        return ()
    (node,) = graph.nodes
    (image, _), _, attrs = operands_of(graph, node)
    seen = y.reshape(image.shape)
    behind = backend.kernels[node.op].call([seen, bias], [seen], attrs, None)
    return fused, _unfused(backend, plan, (x, w, bias, y, workspace), behind)


def _unfused(
    backend: Backend, plan: ConvPlan, operands: Sequence[Any], behind: Call
) -> Call:
    x, w, _, y, workspace = operands
    runner = backend.bind(plan)

    def call() -> None:
        runner.run(x, w, y, workspace, False)
        behind()

    return call
