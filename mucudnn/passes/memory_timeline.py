"""Timeline of device memory over a simulated step.

The simulator gives the times of nodes and copies, the schedule the order of allocations
and frees. Together they give every storage's intervals and a memory curve whose maximum
is the schedule's peak.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mucudnn.ir.schedule import Alloc, Compute, Free, SwapIn, SwapOut, Wait
from mucudnn.passes.liveness import rounded
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.passes.simulate import Lane

__all__ = ["WORKSPACE", "Interval", "memory_intervals", "memory_points", "stalls"]

WORKSPACE = "workspace of "
"""Prefix of the names of nodes' workspaces."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes in device memory during a time interval.

    Attributes:
        name: Storage, or `WORKSPACE` and a node.
        nbytes: Aligned size in bytes.
        start_ms: Time of the allocation.
        stop_ms: Time of the free.
        first: Position of the allocation among all allocations and frees.
        last: Position of the free among all allocations and frees.
        persistent: Whether the bytes belong to resident parameters or state.
        kept: Whether the bytes are still in use at the end of the step.
    """

    name: str
    nbytes: int
    start_ms: float
    stop_ms: float
    first: int
    last: int
    persistent: bool = False
    kept: bool = False


def memory_intervals(plan: StepPlan) -> tuple[Interval, ...]:
    """Return all intervals of a step, in order of allocation."""
    resident = set(plan.schedule.resident)
    counter = itertools.count()
    allocated: dict[str, Interval] = {}
    found: list[Interval] = []

    def free(name: str, now: float, *, kept: bool = False) -> None:
        last = next(counter)
        found.append(replace(allocated.pop(name), stop_ms=now, last=last, kept=kept))

    for name, nbytes, now in _changes(plan):
        if nbytes is None:
            free(name, now)
        else:
            first, persistent = next(counter), name in resident
            allocated[name] = Interval(name, nbytes, now, now, first, first, persistent)
    for name in tuple(allocated):
        free(name, plan.prediction.step_ms, kept=True)
    return tuple(sorted(found, key=lambda interval: interval.first))


def _changes(plan: StepPlan) -> Iterator[tuple[str, int | None, float]]:
    """Yield allocations (name, bytes, time) and frees (name, None, time)."""
    schedule, lanes = plan.schedule, iter(plan.prediction.lanes)
    tensors = schedule.graph.tensors
    resident = set(schedule.resident)
    now = 0.0
    copied: dict[str, float] = {}
    for name in (*schedule.resident, *schedule.live_across):
        yield name, rounded(tensors[name].nbytes), now
    for instruction in schedule.instructions:
        match instruction:
            case Alloc(name) if name not in resident:
                yield name, rounded(tensors[name].nbytes), now
            case Free(name) if name not in resident:
                yield name, None, now
            case Compute(name):
                scratch = rounded(schedule.workspaces.get(name, 0))
                if scratch:
                    yield WORKSPACE + name, scratch, now
                now = next(lanes).stop_ms
                if scratch:
                    yield WORKSPACE + name, None, now
            case SwapOut(name) | SwapIn(name):
                copied[name] = next(lanes).stop_ms
            case Wait(name):
                now = max(now, copied.get(name, now))


def memory_points(intervals: Sequence[Interval]) -> tuple[tuple[float, int], ...]:
    """Return (time in ms, bytes from then on) at every change, in order."""
    changes = sorted(
        [(i.first, i.start_ms, i.nbytes) for i in intervals]
        + [(i.last, i.stop_ms, -i.nbytes) for i in intervals if not i.kept]
    )
    totals = itertools.accumulate(nbytes for _, _, nbytes in changes)
    return tuple((ms, total) for (_, ms, _), total in zip(changes, totals, strict=True))


def stalls(lanes: Sequence[Lane]) -> tuple[tuple[float, float], ...]:
    """Return (start, stop) in ms of every gap between consecutive nodes."""
    compute = [lane for lane in lanes if lane.engine == "compute"]
    pauses = zip([0.0, *(lane.stop_ms for lane in compute)], compute, strict=False)
    return tuple(
        (stop, lane.start_ms) for stop, lane in pauses if lane.start_ms - stop > 1e-9
    )
