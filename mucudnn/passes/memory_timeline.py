"""What is in device memory when: a planned step, second by second.

The simulator says when every node and copy runs; the program says between which of them
memory is taken and given back. Together they give every storage's intervals, and a
curve whose highest point is the schedule's peak.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mucudnn.ir.schedule import Alloc, Compute, Free, SwapIn, SwapOut, Wait
from mucudnn.passes.liveness import rounded
from mucudnn.passes.planning.evaluate import StepPlan
from mucudnn.passes.scheduling.occupancy import uses_of
from mucudnn.passes.simulate import Lane

__all__ = ["WORKSPACE", "Interval", "memory_intervals", "memory_points", "stalls"]

WORKSPACE = "workspace of "
"""Before a node's name: its scratch memory."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes in device memory from one moment to another.

    Attributes:
        name: Storage, or `WORKSPACE` and a node.
        nbytes: Rounded up as they are allocated.
        start_ms: When they are taken.
        stop_ms: When they are given back.
        first: Position among all changes of memory, ascending.
        last: Position of giving back; later than of everything that overlaps.
        persistent: Whether they are parameters or state that never leave.
        stays: Whether they are still there when the step is over.
    """

    name: str
    nbytes: int
    start_ms: float
    stop_ms: float
    first: int
    last: int
    persistent: bool = False
    stays: bool = False


@dataclass(slots=True)
class _Open:
    nbytes: int
    start_ms: float
    first: int
    persistent: bool = False


def memory_intervals(plan: StepPlan) -> tuple[Interval, ...]:
    """Everything that is ever in device memory, in order of arrival."""
    replay = _Replay()
    sizes = {use.storage: use.nbytes for use in uses_of(plan.schedule.graph).values()}
    for name in plan.schedule.resident:
        if name in sizes:
            replay.open(name, sizes[name], 0.0, persistent=True)
    for name in plan.schedule.carried:
        replay.open(name, sizes[name], 0.0)
    for change, now in _changes(plan):
        match change:
            case (name, None):
                replay.close(name, now)
            case (name, int(nbytes)):
                replay.open(name, nbytes, now)
    return replay.done(plan.prediction.step_ms)


class _Replay:
    def __init__(self) -> None:
        self._count = 0
        self._open: dict[str, _Open] = {}
        self._found: list[Interval] = []

    def open(
        self, name: str, nbytes: int, now: float, *, persistent: bool = False
    ) -> None:
        self._open[name] = _Open(nbytes, now, self._count, persistent)
        self._count += 1

    def close(self, name: str, now: float, *, stays: bool = False) -> None:
        at = self._open.pop(name)
        self._found.append(
            Interval(
                name,
                at.nbytes,
                at.start_ms,
                now,
                at.first,
                self._count,
                at.persistent,
                stays,
            )
        )
        self._count += 1

    def done(self, end_ms: float) -> tuple[Interval, ...]:
        for name in tuple(self._open):
            self.close(name, end_ms, stays=True)
        return tuple(sorted(self._found, key=lambda interval: interval.first))


def _changes(plan: StepPlan) -> Iterator[tuple[tuple[str, int | None], float]]:
    """Memory taken (name, bytes) or given back (name, None), and when."""
    graph, lanes = plan.schedule.graph, iter(plan.prediction.lanes)
    workspaces, resident = plan.schedule.workspaces, set(plan.schedule.resident)
    now = 0.0
    copied: dict[str, float] = {}
    for instruction in plan.schedule.instructions:
        match instruction:
            case Alloc(name):
                if name not in resident:
                    yield (name, rounded(graph.tensors[name].nbytes)), now
            case Free(name):
                if name not in resident:
                    yield (name, None), now
            case Compute(name):
                scratch = rounded(workspaces.get(name, 0))
                if scratch:
                    yield (WORKSPACE + name, scratch), now
                now = next(lanes).stop_ms
                if scratch:
                    yield (WORKSPACE + name, None), now
            case SwapOut(name) | SwapIn(name):
                copied[name] = next(lanes).stop_ms
            case Wait(name):
                now = max(now, copied.get(name, now))


def memory_points(intervals: Sequence[Interval]) -> tuple[tuple[float, int], ...]:
    """(time in ms, bytes from then on) at every change, in order."""
    changes = sorted(
        [(i.first, i.start_ms, i.nbytes) for i in intervals]
        + [(i.last, i.stop_ms, -i.nbytes) for i in intervals if not i.stays]
    )
    totals = itertools.accumulate(nbytes for _, _, nbytes in changes)
    return tuple((ms, total) for (_, ms, _), total in zip(changes, totals, strict=True))


def stalls(lanes: Sequence[Lane]) -> tuple[tuple[float, float], ...]:
    """(from, to) in ms of every pause between one node and the next."""
    compute = [lane for lane in lanes if lane.engine == "compute"]
    pauses = zip([0.0, *(lane.stop_ms for lane in compute)], compute, strict=False)
    return tuple(
        (stop, lane.start_ms) for stop, lane in pauses if lane.start_ms - stop > 1e-9
    )
