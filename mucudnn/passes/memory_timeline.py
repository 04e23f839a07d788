"""What is in device memory when: a planned step, second by second.

The simulator says when every node and copy runs; the program says between which of them
memory is taken and given back. Together they give every storage's intervals, and a
curve whose highest point is the schedule's peak.
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
        kept: Whether they are still there when the step is over.
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
    """Everything that is ever in device memory, in order of arrival."""
    resident = set(plan.schedule.resident)
    counter = itertools.count()
    taken: dict[str, Interval] = {}
    found: list[Interval] = []

    def give_back(name: str, now: float, *, kept: bool = False) -> None:
        last = next(counter)
        found.append(replace(taken.pop(name), stop_ms=now, last=last, kept=kept))

    for name, nbytes, now in _changes(plan):
        if nbytes is None:
            give_back(name, now)
        else:
            first, persistent = next(counter), name in resident
            taken[name] = Interval(name, nbytes, now, now, first, first, persistent)
    for name in tuple(taken):
        give_back(name, plan.prediction.step_ms, kept=True)
    return tuple(sorted(found, key=lambda interval: interval.first))


def _changes(plan: StepPlan) -> Iterator[tuple[str, int | None, float]]:
    """Memory taken (name, bytes) or given back (name, None), and when."""
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
    """(time in ms, bytes from then on) at every change, in order."""
    changes = sorted(
        [(i.first, i.start_ms, i.nbytes) for i in intervals]
        + [(i.last, i.stop_ms, -i.nbytes) for i in intervals if not i.kept]
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
