"""Interpret a schedule on a backend.

A schedule is bound once: every tensor becomes a view at its place in one arena, every
node a call without arguments. Running it is then a loop over calls; nothing is
allocated, and what a node costs beside its kernel is a function call. Copies run
beside it; at the end of a step all of them are finished.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from mucudnn.backends.base import Array, Backend, Buffer
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.schedule import Schedule
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.passes.layout import Layout, host_blocks
from mucudnn.passes.packing import pack
from mucudnn.passes.placement import Placement
from mucudnn.runtime.copying import Copies
from mucudnn.runtime.order_check import OrderCheck
from mucudnn.runtime.program import Memory, bind
from mucudnn.runtime.tiers import HostTier, Place, Tiers

__all__ = ["Executor"]


class Executor:
    """A schedule bound to a backend, run step after step.

    Args:
        backend: Computes.
        schedule: What to run.
        placement: Where in the arena each workspace is, and each storage that does not
            outlive a step; a `Layout` if storages leave the device and come back.
        plans: Convolution node -> how to run it.
        state: Arrays of the persistent tensors; shared with other executors.
        arena: Memory of `placement.nbytes` at least, which executors that do not run
            at once may share; its own if not given.
        host: Where storages go that leave the device; host memory of its own if not
            given. Not shared with executors that run at the same time.
        check: Watch every step: memory is overwritten when it is allocated and when it
            is freed, and what touches memory too early is an error. Slow.

    Raises:
        UnsupportedError: The backend has no kernel for an operation.
        ScheduleError: A node reads what is still being copied back.
        OutOfMemoryError: There is no room for the arena, or on the host.
    """

    def __init__(
        self,
        backend: Backend,
        schedule: Schedule,
        placement: Placement | Layout,
        plans: Mapping[str, ConvPlan],
        state: Mapping[str, Array],
        arena: Buffer | None = None,
        *,
        host: Tiers | None = None,
        check: bool = False,
    ) -> None:
        layout = (
            Layout.of(schedule, placement)
            if isinstance(placement, Placement)
            else placement
        )
        self.arena_bytes = layout.nbytes
        self.host_bytes = 0
        self._backend = backend
        self._graph = schedule.graph
        if arena is None:
            arena = backend.device.allocate(layout.nbytes)
        self._memory = Memory(backend, self._graph, layout, arena, state)
        self._copies = Copies(backend.device)
        places = self._places(schedule, host)
        self._steps = bind(
            backend, schedule, self._memory, plans, self._copies, places, poison=check
        )
        self._check = check
        self._program = [step.call for step in self._steps]
        self._feeds = [
            (spec, self._memory.array(spec.name, 0))
            for spec in self._graph.with_role(Role.INPUT)
        ]

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
        self._feed(feeds)
        with self._copies.of_a_step():
            if self._check:
                self._run_checked()
            else:
                for call in self._program:
                    call()
        return self._results()

    def run_timed(
        self, feeds: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Run one step with a mark between its nodes.

        Returns:
            What `run` returns, and node -> ms; views have no time, and waiting for
            copies is nobody's.
        """
        device = self._backend.device
        self._feed(feeds)
        with self._copies.of_a_step():
            marks = [device.record()]
            for call in self._program:
                call()
                marks.append(device.record())
        results = self._results()
        times = {
            step.node: device.elapsed_ms(start, stop)
            for step, (start, stop) in zip(self._steps, pairwise(marks), strict=True)
            if step.node is not None
        }
        return results, times

    def close(self) -> None:
        """End the threads or streams of copies; a later run starts new ones.

        Memory is freed with the executor.
        """
        self._copies.close()

    def _run_checked(self) -> None:
        inputs = (spec.name for spec in self._graph.with_role(Role.INPUT))
        order = OrderCheck(tuple(self._memory.span(name, 0) for name in inputs))
        for step in self._steps:
            order.before(step)
            step.call()

    def _places(self, schedule: Schedule, host: Tiers | None) -> dict[str, Place]:
        """Where on the host each storage goes that leaves."""
        blocks = host_blocks(schedule)
        if not blocks:
            return {}
        self.host_bytes = pack(blocks).nbytes
        if host is None:
            host = Tiers([HostTier(self._backend.device, self.host_bytes)])
        tensors = self._graph.tensors
        return host.place(blocks, {b.name: tensors[b.name].nbytes for b in blocks})

    def _feed(self, feeds: Mapping[str, Any]) -> None:
        upload = self._backend.device.upload
        for spec, target in self._feeds:
            upload(_checked(spec, feeds), target)

    def _results(self) -> dict[str, Any]:
        download = self._backend.device.download
        return {name: download(self[name]) for name in self._graph.outputs}

    def __getitem__(self, tensor: str) -> Array:
        """A tensor's array at the end of a step; it means something while alive."""
        return self._memory.array(tensor, -1)


def _checked(spec: TensorSpec, feeds: Mapping[str, Any]) -> Any:
    try:
        value = feeds[spec.name]
    except KeyError:
        raise ValueError(f"input {spec.name!r} was not given") from None
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise ValueError(
            f"input {spec.name!r} must be {spec.dtype} {spec.shape}, got "
            f"{value.dtype} {value.shape}"
        )
    return value
