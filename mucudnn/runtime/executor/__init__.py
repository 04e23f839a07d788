"""Run a schedule on a backend: `Executor`, its feeds, results and replays.

A schedule is bound once: every tensor becomes a view at its offset in one arena, every
node a call without arguments. A step is then a loop over these calls without any
allocation. Adjacent parameter updates are one launch, and copies overlap with
computation.

Host-resident parameters and state are copied in and out of the arena. Tensors that are
live across iterations are fetched before the first one, and may then be newer on the
device than on the host; `park` copies them out.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any

from mucudnn.backends.base import Backend, Capture
from mucudnn.backends.device import Array, Arriving, Buffer, StepIO, Way
from mucudnn.errors import BackendError, MucudnnError, UnsupportedError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.schedule import Schedule
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.passes.liveness import rounded
from mucudnn.passes.placement.layout import Layout, host_blocks
from mucudnn.passes.placement.packing import pack
from mucudnn.runtime.executor.program import Binding, Memory, bind
from mucudnn.runtime.executor.tasks import (
    Call,
    Copies,
    HookFactory,
    Task,
    Watcher,
    batch_launches,
)
from mucudnn.runtime.executor.tiers import HostSlot, HostTier, Tiers


@dataclass(frozen=True, slots=True)
class Results:
    """Tensor -> its value, possibly pending."""

    found: Mapping[str, Arriving]

    def read(self) -> dict[str, Any]:
        """Wait for all tensors; return them as NumPy arrays."""
        return {name: arriving() for name, arriving in self.found.items()}

    @property
    def ready(self) -> bool:
        """True if the result can be read without waiting."""
        return all(arriving.ready for arriving in self.found.values())


Upload = Callable[[Any, Array], None]
"""(NumPy array, device tensor): copy the array into the tensor."""


class Executor:
    """A schedule bound to a backend, run step after step.

    Args:
        layout: Arena offsets of each workspace and of each residency interval of a
            storage.
        plans: Convolution node -> plan.
        state: Persistent tensor -> array; shared with other executors.
        arena: Memory that `layout` refers to (`arenas`); executors that do not run at
            the same time may share it. Allocated if not given.
        host: Offload targets; host memory allocated for this executor if not given. Not
            shared by executors that run at the same time.
        host_buffers: Host-resident persistent tensor -> its bytes on the host; shared
            with other executors, for which `park` brings them up to date.
        replay: Whether launches are captured as graphs in the second step and replayed
            later, where the backend can: one graph per step, or one between each two
            copies where copies cannot be captured (`replaying`).
        step_io: Asynchronous transfer of inputs and results of `launch`.
        watcher: Test hook, called before every task; overwrites memory when it is
            allocated and when it is freed. Slow.
        around: Factory of additional calls before and after nodes.

    Raises:
        UnsupportedError: The backend has no kernel for an operation.
        ScheduleError: A node reads what is still being copied back.
        OutOfMemoryError: There is no room for the arena, or on the host.
    """

    def __init__(
        self,
        backend: Backend,
        schedule: Schedule,
        layout: Layout,
        plans: Mapping[str, ConvPlan],
        state: Mapping[str, Array],
        arena: Buffer | None = None,
        *,
        host: Tiers | None = None,
        host_buffers: Mapping[str, Buffer] | None = None,
        replay: bool = False,
        step_io: StepIO | None = None,
        watcher: Watcher | None = None,
        around: HookFactory | None = None,
    ) -> None:
        self.host_bytes = 0
        self._backend, self._step_io = backend, step_io
        self._graph = schedule.graph
        # Mapped addresses exist only in the process that mapped them.
        self._process = os.getpid() if layout.pages else None
        # Memory: the arena, copy engines, and slots for offloaded tensors.
        if arena is None:
            (arena,) = arenas(backend, [layout])
        self._memory = Memory(backend, self._graph, layout, arena, state)
        device = backend.device
        self._copies = Copies([device.copier] if host is None else host.copiers(device))
        self._live_across = schedule.live_across
        self._is_parked = True
        self._host_buffers = {
            n: HostSlot(-1, 0, (host_buffers or {})[n], host.link(n) if host else 0)
            for n in schedule.hosted
        }
        slots = self._host_slots(schedule, host) | self._host_buffers
        memory, copies = self._memory, self._copies
        # Bind every instruction to its call.
        self._program = bind(
            Binding(backend, schedule, memory, plans, copies, slots, watcher)
        )
        self._watcher = watcher
        tasks = self._program.tasks
        self._single_calls = [task.call for task in tasks]
        if watcher is not None:
            self._single_calls = [
                partial(_in_order, (partial(watcher.before, task), task.call))
                for task in tasks
            ]
        if around is not None:
            by_node = {task.node: task for task in tasks}

            def array_at_node(node: str, tensor: str) -> Array:
                task = by_node[node]
                return memory.array_in((*task.reads, *task.writes), tensor)

            hooks = around(self._graph, array_at_node)
            for i, (task, call) in enumerate(
                zip(tasks, self._single_calls, strict=True)
            ):
                before = hooks.before.get(task.node or "", ())
                after = hooks.after.get(task.node or "", ())
                if before or after:
                    self._single_calls[i] = partial(_in_order, (*before, call, *after))
        # Single calls where something runs between them, else as few as possible.
        if watcher is not None or around is not None:
            self._calls = self._single_calls
        elif replay and backend.capture is not None:
            whole = not self._live_across and (host is None or host.locked)
            captured = self._copies if whole else None
            self._calls = replaying(tasks, backend.capture, captured)
        else:
            self._calls = batch_launches(tasks)
        inputs = list(self._graph.with_role(Role.INPUT))
        self._feeds = [(spec, self._memory.array(spec.name, 0)) for spec in inputs]
        self._before_feeding = self._program.touching(
            self._memory.byte_range(spec.name, 0) for spec in inputs
        )

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run one step and wait; `feeds` that are no inputs of the graph are ignored.

        Returns:
            The graph's outputs as NumPy arrays of their own.

        Raises:
            ValueError: An input is missing, or of another shape or type.
            BackendError: A kernel or a copy failed.
        """
        with self._step(feeds, self._backend.device.upload):
            for call in self._calls:
                call()
        return self._results()

    def launch(self, feeds: Mapping[str, Any]) -> Results:
        """Run one step; with a `step_io`, without waiting for its outputs.

        The next computation waits for copies of offloaded tensors.
        """
        step_io = self._step_io
        if step_io is None:
            return Results({n: Present(v) for n, v in self.run(feeds).items()})
        with self._step(feeds, step_io.upload, waits=False):
            for call in self._calls:
                call()
        return Results({n: step_io.download(self[n]) for n in self._graph.outputs})

    def run_timed(
        self, feeds: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Run one step; return its outputs, and the ms of each node, timed separately.

        Views have no time, and waits for copies are not attributed to any node.
        """
        device = self._backend.device
        with self._step(feeds, device.upload):
            marks = [device.record()]
            for call in self._single_calls:
                call()
                marks.append(device.record())
        results = self._results()
        timed = zip(self._program.tasks, pairwise(marks), strict=True)
        times = {
            task.node: device.elapsed_ms(start, stop)
            for task, (start, stop) in timed
            if task.node is not None
        }
        return results, times

    def park(self) -> None:
        """Offload the tensors that are live across iterations.

        Afterwards the host has the complete state, and the arena may be used for
        something else. The next step fetches them again.
        """
        if self._is_parked:
            self._copies.finish()  # those of a step that was launched without waiting
            return
        self._refuse_fork()
        with self._copies.of_a_step():
            self._copies.finish()
            self._copy_live("out")
        self._is_parked = True

    def _copy_live(self, way: Way) -> None:
        """Copy the tensors that are live across iterations, and wait for the copies."""
        for number, name in enumerate(self._live_across):
            device = self._memory.bytes_of(self._memory.byte_range(name, 0))
            slot = self._host_buffers[name]
            ends = device, slot.buffer
            ends = ends if way == "out" else ends[::-1]
            self._copies.bound(way, number, *ends, (), slot.link)()
        self._copies.finish()

    def close(self) -> None:
        """End the threads or streams of copies; a later run starts new ones.

        Tensors that are live across iterations are lost unless they were parked. Memory
        is freed with the executor.
        """
        self._copies.close()
        self._is_parked = True

    @contextmanager
    def _step(
        self, feeds: Mapping[str, Any], upload: Upload, *, waits: bool = True
    ) -> Iterator[None]:
        """Prepare and finish one step; `waits`: the host waits for its copies."""
        self._refuse_fork()
        # A copy of the step before may still use the bytes that inputs are written to.
        for number in self._before_feeding:
            self._copies.wait(number)
        for spec, target in self._feeds:
            upload(fed(spec, feeds), target)
        # Look the queue up once: bound calls are launched on the one that is current
        # now.
        self._backend.device.queue()
        try:
            carries = bool(self._live_across)
            with self._copies.of_a_step(carries=carries, waits=waits):
                if self._is_parked and carries:
                    self._copy_live("back")
                    self._is_parked = False
                if self._watcher is not None:
                    byte_range, tensors = self._memory.byte_range, self._graph.tensors
                    inputs = [s.name for s in self._graph.with_role(Role.INPUT)]
                    written = [byte_range(n, 0) for n in (*inputs, *self._live_across)]
                    written += [
                        slot.byte_range(name, tensors[name].nbytes)
                        for name, slot in self._host_buffers.items()
                    ]
                    self._watcher.begin(self._program, tuple(written))
                yield
        except BaseException:
            self._is_parked = True
            raise

    def _refuse_fork(self) -> None:
        """Raise `BackendError` in a fork, which lacks the mapped arena."""
        if self._process is not None and self._process != os.getpid():
            raise BackendError(
                "the memory of this step is mapped in the process that created it "
                f"({self._process}), not in its forks; create the step in the process "
                "that runs it"
            )

    def _host_slots(
        self, schedule: Schedule, host: Tiers | None
    ) -> dict[str, HostSlot]:
        """Allocate the host bytes of all offloaded storages."""
        blocks = host_blocks(schedule)
        if not blocks:
            return {}
        self.host_bytes = pack(blocks).nbytes
        if host is None:
            host = Tiers([HostTier(self._backend.device, self.host_bytes)])
        tensors = self._graph.tensors
        return host.place(blocks, {b.name: tensors[b.name].nbytes for b in blocks})

    def _results(self) -> dict[str, Any]:
        download = self._backend.device.download
        return {name: download(self[name]) for name in self._graph.outputs}

    def __getitem__(self, tensor: str) -> Array:
        """Return a tensor's array at the end of a step; valid only while live."""
        return self._memory.array(tensor, -1)


def fed(spec: TensorSpec, feeds: Mapping[str, Any]) -> Any:
    """Return the NumPy array of an input."""
    value = feeds.get(spec.name)
    if value is None:
        raise ValueError(f"input {spec.name!r} was not given")
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise ValueError(
            f"input {spec.name!r} must be {spec.dtype} {spec.shape}, got "
            f"{value.dtype} {value.shape}"
        )
    return value


@dataclass(frozen=True, slots=True)
class Present:
    """A tensor on the host that needs no waiting."""

    value: Any
    ready: bool = True

    def __call__(self) -> Any:
        """Return the array."""
        return self.value


# Capture the launches of a step as one graph, and replay it in later steps.
#
# One call launches a graph of any size, so a step of small kernels is no longer limited
# by the host. Learning rates, step numbers and loss scales are read on the device, so
# the same graph is valid for every step.
#
# Copies to pinned host memory are captured with the kernels: events order both as they
# do outside of a graph. A graph ends when everything in it is done, so a step whose
# copies continue in the next one is captured in parts, between its copies; likewise a
# step that copies to a file.


logger = logging.getLogger(__name__)


def replaying(
    tasks: Sequence[Task], capture: Capture, copies: Copies | None = None
) -> list[Call]:
    """Return the calls of a program: one graph, or one between each two copies.

    `copies` are those of the program, if they can be captured as well.
    """

    def between_copies() -> list[Call]:
        calls: list[Call] = []
        for launches, part in groupby(tasks, _launches):
            own = batch_launches(part)
            calls += [_Replayed(own, capture)] if launches and len(own) > 1 else own
        return calls

    if copies is None or all(map(_launches, tasks)):
        return between_copies()
    return [_Replayed([*batch_launches(tasks), copies.settle], capture, between_copies)]


def _launches(task: Task) -> bool:
    """Return whether a task only launches kernels."""
    return task.copy is None and task.waits_for is None


@dataclass(slots=True)
class _Replayed:
    """Launches that are captured as a graph the second time they are called.

    The first time, kernels are loaded and libraries initialize, which cannot be
    captured. Nothing runs while capturing, so a refused capture leaves nothing half
    done. From then on `otherwise` is called instead, or the launches one by one.
    """

    _calls: Sequence[Call]
    _capture: Capture
    _otherwise: Callable[[], Sequence[Call]] | None = None
    _graph: Call | None = None
    _warm: bool = False

    def __call__(self) -> None:
        if self._graph is None:
            launch_all = partial(_in_order, self._calls)
            if not self._warm:
                launch_all()
                self._warm = True
                return
            try:
                self._graph = self._capture(launch_all)
            except MucudnnError as e:
                logger.warning("the step is not replayed: %s", e)
                self._graph = launch_all
                if self._otherwise is not None:
                    self._graph = partial(_in_order, self._otherwise())
        self._graph()


def _in_order(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


# Device memory for layouts used in turn, which share the same bytes.
#
# Where a layout places tensors in chunks, the memory is mapped to addresses once per
# layout, before any step runs.


def shared_bytes(layouts: Sequence[Layout]) -> int:
    """Return the bytes of memory for all layouts, in whole chunks if one is mapped."""
    # The layouts are used in turn, so the largest one decides.
    nbytes = max(layout.nbytes for layout in layouts)
    return rounded(nbytes, max(_chunk_sizes(layouts), default=1))


def arenas(backend: Backend, layouts: Sequence[Layout]) -> list[Buffer]:
    """Allocate one memory; return a buffer over it for each layout."""
    nbytes = shared_bytes(layouts)
    if all(layout.pages is None for layout in layouts):
        return [backend.device.allocate(nbytes)] * len(layouts)
    mapper, sizes = backend.mapper, _chunk_sizes(layouts)
    if mapper is None or any(size % mapper.chunk_bytes for size in sizes):
        found = "nothing" if mapper is None else f"chunks of {mapper.chunk_bytes} bytes"
        raise UnsupportedError(
            f"the plan maps memory in chunks of {max(sizes)} bytes, and backend "
            f"{backend.name!r} in chunks of {found}; plan with a profile of this "
            "backend, or with the static placement"
        )
    memory = mapper.allocate(nbytes // mapper.chunk_bytes)
    return [memory.map(_chunks(a, nbytes, mapper.chunk_bytes)) for a in layouts]


def _chunks(layout: Layout, nbytes: int, chunk_bytes: int) -> Sequence[int]:
    """Return the device chunks behind a layout's consecutive addresses."""
    if layout.pages is None:
        return range(nbytes // chunk_bytes)
    parts = layout.pages.chunk_bytes // chunk_bytes
    return [
        chunk * parts + part for chunk in layout.pages.chunks for part in range(parts)
    ]


def _chunk_sizes(layouts: Sequence[Layout]) -> set[int]:
    return {each.pages.chunk_bytes for each in layouts if each.pages is not None}
