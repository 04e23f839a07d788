"""Interpret a schedule on a backend.

A schedule is bound once: every tensor becomes a view at its place in one arena, every
node a call without arguments. Running it is then a loop over calls; nothing is
allocated, and what a node costs beside its kernel is a function call. Neighbouring
updates are one call. Copies run beside it.

Parameters and state that are host-resident are swapped in and out of the arena. What is
live across iterations is fetched before the first one, and may have newer values there
than on the host: `park` copies them out.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from mucudnn.backends.base import Array, Backend, Buffer
from mucudnn.backends.transit import Transit
from mucudnn.errors import BackendError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.schedule import Schedule
from mucudnn.ir.tensor import Role
from mucudnn.passes.placement.layout import Layout, host_blocks
from mucudnn.passes.placement.packing import pack
from mucudnn.runtime.executor.arenas import arenas
from mucudnn.runtime.executor.copies import Copies
from mucudnn.runtime.executor.feeding import fed
from mucudnn.runtime.executor.host_memory import HostSlot, HostTier, Tiers
from mucudnn.runtime.executor.joining import joined
from mucudnn.runtime.executor.program import Binding, Memory, bind
from mucudnn.runtime.executor.replay import replaying
from mucudnn.runtime.executor.results import Present, Results
from mucudnn.runtime.executor.tasks import (
    Around,
    ByteRange,
    Call,
    Surrounding,
    Task,
    Watcher,
)

__all__ = ["Executor"]

Upload = Callable[[Any, Array], None]
"""Copies a NumPy array into a tensor."""


class Executor:
    """A schedule bound to a backend, run step after step.

    Args:
        backend: Computes.
        schedule: What to run.
        layout: Where in the arena each workspace is, and each storage, every time that
            it is there.
        plans: Convolution node -> how to run it.
        state: Arrays of the persistent tensors; shared with other executors.
        arena: What `layout` has places in (`arenas`), over memory which executors that
            do not run at once may share; its own if not given.
        host: Where storages go that leave the device; host memory of its own if not
            given. Not shared with executors that run at the same time.
        host_buffers: Bytes on the host of persistent tensors that are host-resident;
            shared with other executors, for which `park` brings them up to date.
        replay: Whether launches are captured as graphs by the second step and replayed
            by later ones, where the backend can: one for the step, or one for all that
            is between two copies where these cannot be captured (`replaying`).
        transit: Takes the inputs and results of what is launched.
        watcher: Told of every task before it is called, and overwrites memory when it
            is allocated and when it is freed: for tests. Slow.
        around: What else is called around nodes, given the graph and where its tensors
            are while a node runs.

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
        transit: Transit | None = None,
        watcher: Watcher | None = None,
        around: Surrounding | None = None,
    ) -> None:
        self.arena_bytes = layout.nbytes
        self.host_bytes = 0
        self._backend, self._transit = backend, transit
        self._graph = schedule.graph
        self._process = os.getpid() if layout.pages else None
        if arena is None:
            (arena,) = arenas(backend, [layout])
        self._memory = Memory(backend, self._graph, layout, arena, state)
        device = backend.device
        copiers = [device.copier] if host is None else host.copiers(device)
        self._copies = Copies(copiers)
        self._live_across = schedule.live_across
        self._away = True
        self._host_buffers = {
            n: HostSlot(-1, 0, (host_buffers or {})[n], host.link(n) if host else 0)
            for n in schedule.hosted
        }
        slots = self._host_slots(schedule, host) | self._host_buffers
        memory, copies = self._memory, self._copies
        self._program = bind(
            Binding(backend, schedule, memory, plans, copies, slots, watcher)
        )
        self._watcher = watcher
        tasks = self._program.tasks
        self._apart = [_call(task, watcher) for task in tasks]
        self._of_node = {task.node: task for task in tasks if task.node is not None}
        if around is not None:
            self._surround(around(self._graph, self._while_running))
        if watcher is not None or around is not None:
            self._calls = self._apart
        elif replay and backend.capture is not None:
            whole = not self._live_across and (host is None or host.locked)
            captured = self._copies if whole else None
            self._calls = replaying(tasks, backend.capture, captured)
        else:
            self._calls = joined(tasks)
        inputs = list(self._graph.with_role(Role.INPUT))
        self._feeds = [(spec, self._memory.array(spec.name, 0)) for spec in inputs]
        self._before_feeding = self._program.touching(
            self._memory.byte_range(spec.name, 0) for spec in inputs
        )

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run one step.

        Args:
            feeds: NumPy arrays for the graph's inputs; others are not looked at.

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
        """Run one step; with a `transit` the host does not wait for it.

        Copies of tensors that left the device are waited for by what computes next.

        Raises:
            ValueError: An input is missing, or of another shape or type.
            BackendError: A kernel or a copy failed.
        """
        transit = self._transit
        if transit is None:
            return Results({n: Present(v) for n, v in self.run(feeds).items()})
        with self._step(feeds, transit.upload, waits=False):
            for call in self._calls:
                call()
        return Results({n: transit.download(self[n]) for n in self._graph.outputs})

    def run_timed(
        self, feeds: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Run one step with a mark between its nodes, each launched by itself.

        Returns:
            What `run` returns, and node -> ms; views have no time, and waiting for
            copies is nobody's.
        """
        device = self._backend.device
        with self._step(feeds, device.upload):
            marks = [device.record()]
            for call in self._apart:
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
        """Swap out what is live across iterations; the next step fetches it.

        Afterwards the state is all there, and the arena may be used otherwise.

        Raises:
            BackendError: A copy failed.
        """
        if self._away:
            self._copies.finish()  # of a step that nobody waited for
            return
        self._refuse_fork()
        with self._copies.of_a_step():
            self._copies.finish()
            for number, (device, slot) in enumerate(self._live_bytes()):
                self._copies.start("out", number, device, slot.buffer, slot.link)
        self._away = True

    def _fetch(self) -> None:
        """Swap in what is live across iterations, where a step finds it."""
        for number, (device, slot) in enumerate(self._live_bytes()):
            self._copies.start("back", number, slot.buffer, device, slot.link)
        self._copies.finish()
        self._away = False

    def _live_bytes(self) -> Iterator[tuple[Buffer, HostSlot]]:
        """Bytes of what is live across iterations, on the device and on the host."""
        for name in self._live_across:
            device = self._memory.bytes_of(self._memory.byte_range(name, 0))
            yield device, self._host_buffers[name]

    def close(self) -> None:
        """End the threads or streams of copies; a later run starts new ones.

        What is live across iterations is lost unless it was parked. Memory is freed
        with the executor.
        """
        self._copies.close()
        self._away = True

    @contextmanager
    def _step(
        self, feeds: Mapping[str, Any], upload: Upload, *, waits: bool = True
    ) -> Iterator[None]:
        """Before a step and after it, which the host may wait for."""
        self._refuse_fork()
        self._feed(feeds, upload)
        self._backend.device.queue()  # what was made ready is launched on it
        try:
            carries = bool(self._live_across)
            with self._copies.of_a_step(carries=carries, waits=waits):
                if self._away and carries:
                    self._fetch()
                if self._watcher is not None:
                    self._watcher.begin(self._program, self._written())
                yield
        except BaseException:
            self._away = True
            raise

    def _refuse_fork(self) -> None:
        """Raise where the arena is another process's, which a forked child has not."""
        if self._process is not None and self._process != os.getpid():
            raise BackendError(
                "the memory of this step is mapped in the process that made it "
                f"({self._process}), not in one forked from it; make it there"
            )

    def _written(self) -> tuple[ByteRange, ...]:
        """Bytes that mean something as a step begins."""
        inputs = [spec.name for spec in self._graph.with_role(Role.INPUT)]
        tensors = self._graph.tensors
        return (
            *(
                self._memory.byte_range(name, 0)
                for name in (*inputs, *self._live_across)
            ),
            *(
                h.byte_range(n, tensors[n].nbytes)
                for n, h in self._host_buffers.items()
            ),
        )

    def _host_slots(
        self, schedule: Schedule, host: Tiers | None
    ) -> dict[str, HostSlot]:
        """Where on the host each storage goes that leaves."""
        blocks = host_blocks(schedule)
        if not blocks:
            return {}
        self.host_bytes = pack(blocks).nbytes
        if host is None:
            host = Tiers([HostTier(self._backend.device, self.host_bytes)])
        tensors = self._graph.tensors
        return host.place(blocks, {b.name: tensors[b.name].nbytes for b in blocks})

    def _feed(self, feeds: Mapping[str, Any], upload: Upload) -> None:
        for number in self._before_feeding:
            self._copies.wait(number)
        for spec, target in self._feeds:
            upload(fed(spec, feeds), target)

    def _results(self) -> dict[str, Any]:
        download = self._backend.device.download
        return {name: download(self[name]) for name in self._graph.outputs}

    def _while_running(self, node: str, tensor: str) -> Array:
        """A tensor's array where a node finds it."""
        task = self._of_node[node]
        return self._memory.array_in((*task.reads, *task.writes), tensor)

    def _surround(self, around: Around) -> None:
        """Put calls before and after those of nodes."""
        found: list[Call] = []
        for task, call in zip(self._program.tasks, self._apart, strict=True):
            node = task.node or ""
            before, after = around.before.get(node, ()), around.after.get(node, ())
            alone = not (before or after)
            found.append(call if alone else _in_order((*before, call, *after)))
        self._apart = found

    def __getitem__(self, tensor: str) -> Array:
        """A tensor's array at the end of a step; it means something while alive."""
        return self._memory.array(tensor, -1)


def _in_order(calls: Sequence[Call]) -> Call:
    """Several calls as one."""

    def called() -> None:
        for call in calls:
            call()

    return called


def _call(task: Task, watcher: Watcher | None) -> Call:
    """What runs a task; one that is watched is told of first."""
    if watcher is None:
        return task.call

    def watched() -> None:
        watcher.before(task)
        task.call()

    return watched
