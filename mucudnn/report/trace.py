"""A planned step as a trace for Perfetto, or as a PyTorch memory snapshot.

Chrome's trace event format: complete events (`X`) on a lane for compute, one for each
direction of copies, and one for collectives if there are any; counters (`C`) for
memory, times in microseconds.
"""

import json
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from mucudnn.ir.operations import LIBRARY
from mucudnn.passes.placement.layout import PlacedStep
from mucudnn.passes.scheduling.problem import origin
from mucudnn.passes.scheduling.step_plan import (
    WORKSPACE,
    Interval,
    StepPlan,
    memory_intervals,
    memory_points,
)

LANES = {
    "compute": "compute",
    "out": "copies to the host",
    "in": "copies from the host",
}
"""Engine -> name of its lane, in order."""

_NETWORK = {"network": "collectives"}
"""The lane of a step of one of several devices."""

_PROCESS = 1
_US = 1e3


def lanes_of(plan: StepPlan) -> dict[str, str]:
    """Return the name of each lane of a plan, by engine."""
    used = any(lane.engine in _NETWORK for lane in plan.prediction.lanes)
    return LANES | _NETWORK if used else LANES


def trace_json(plan: StepPlan) -> str:
    """Return the trace as JSON text."""
    title = f"a training step, {plan.policy} with {plan.scheduler}"
    names = [("process_name", 0, title)]
    lanes = lanes_of(plan).values()
    names += [("thread_name", i, name) for i, name in enumerate(lanes, 1)]
    about = (
        {"ph": "M", "pid": _PROCESS, "tid": i, "name": what, "args": {"name": name}}
        for what, i, name in names
    )
    events = [*about, *_lanes(plan), *_memory(plan)]
    data = {"displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(data, ensure_ascii=False, allow_nan=False)


def _lanes(plan: StepPlan) -> Iterator[dict[str, Any]]:
    graph = plan.schedule.graph
    threads = {engine: i for i, engine in enumerate(lanes_of(plan), start=1)}
    for lane in plan.prediction.lanes:
        args: dict[str, Any]
        if lane.engine == "compute":
            node = graph.by_name[lane.name]
            again = origin(lane.name) != lane.name
            category = "recompute" if again else node.phase.value
            args = {"operation": node.op, "phase": node.phase.value}
            scratch = plan.schedule.workspaces.get(lane.name, 0)
            if scratch:
                args["workspace_bytes"] = scratch
            if LIBRARY in node.attrs:
                args["library"] = node.attrs[LIBRARY]
            if lane.name in plan.plans:
                steps = plan.plans[lane.name].steps
                args["plan"] = " + ".join(f"{s.algo}({s.batch})" for s in steps)
        elif lane.engine in _NETWORK:
            category = "collective"
            args = {"operation": graph.by_name[lane.name].op}
        else:
            category = "copy"
            args = {"bytes": graph.tensors[lane.name].nbytes}
        yield {
            "ph": "X",
            "pid": _PROCESS,
            "tid": threads[lane.engine],
            "name": lane.name,
            "cat": category,
            "ts": lane.start_ms * _US,
            "dur": (lane.stop_ms - lane.start_ms) * _US,
            "args": args,
        }


def _memory(plan: StepPlan) -> Iterator[dict[str, Any]]:
    """Yield the counter: maximum and last total of changes at the same time."""
    most: dict[float, int] = {}
    last: dict[float, int] = {}
    for ms, nbytes in memory_points(memory_intervals(plan)):
        most[ms] = max(most.get(ms, 0), nbytes)
        last[ms] = nbytes
    for ms in most:
        for nbytes in dict.fromkeys((most[ms], last[ms])):
            yield {
                "ph": "C",
                "pid": _PROCESS,
                "name": "device memory",
                "ts": ms * _US,
                "args": {"bytes": nbytes},
            }


# Export a planned step's memory as a snapshot for PyTorch's memory_viz.
#
# The format is a pickle of plain dictionaries: segments of device memory with their
# blocks, and for every device a trace of allocations, oldest first. Every tensor has
# its planned address: resident tensors come first, followed by the arena. The name is
# in the event's stack frame.


_BASE = 0x7F00_0000_0000
"""Start of the memory, similar to addresses of real devices."""

_PROTOCOL = 4
"""Pickle protocol that the page can read."""


def snapshot_bytes(placed: PlacedStep) -> bytes:
    """Return the pickled snapshot."""
    return pickle.dumps(snapshot(placed), protocol=_PROTOCOL)


def snapshot(placed: PlacedStep) -> dict[str, Any]:
    """Return the snapshot as dictionaries; its one segment has all bytes."""
    plan, size = placed.plan, placed.nbytes
    intervals = memory_intervals(plan)
    addresses = _addresses(placed, intervals)
    end = max((i.stop_ms for i in intervals), default=0.0)
    # Allocations and frees; storages kept to the end are not freed.
    events: list[tuple[int, dict[str, Any]]] = []
    left = []
    for interval, address in zip(intervals, addresses, strict=True):
        nbytes, name = interval.nbytes, interval.name
        allocated = _event("alloc", address, nbytes, interval.start_ms, name)
        events.append((interval.first, allocated))
        if interval.kept:
            left += [(address, interval)] if nbytes else []
            continue
        for action in ("free_requested", "free_completed"):
            freed = _event(action, address, nbytes, interval.stop_ms, name)
            events.append((interval.last, freed))
    arena = _event("segment_alloc", _BASE, size, 0.0, "arena")
    trace = [arena, *(e for _, e in sorted(events, key=lambda pair: pair[0]))]
    return {
        "segments": [_segment(sorted(left), size)],
        "device_traces": [trace],
        "external_annotations": [],
        "allocator_settings": {
            "mucudnn": f"{plan.policy} with {plan.scheduler}, {end:.3f} ms predicted"
        },
    }


def _addresses(placed: PlacedStep, intervals: Sequence[Interval]) -> list[int]:
    """Return the planned address of each interval; offsets are in storage order."""
    layout, bottom = placed.layout, _BASE + placed.state_bytes
    following = {name: iter(offsets) for name, offsets in layout.offsets.items()}
    found, free = [], _BASE
    for interval in intervals:
        if interval.persistent:
            found.append(free)
            free += interval.nbytes
        elif interval.name.startswith(WORKSPACE):
            node = interval.name.removeprefix(WORKSPACE)
            found.append(bottom + layout.workspace_offsets[node])
        else:
            found.append(bottom + next(following[interval.name]))
    return found


def _event(
    action: str, address: int, size: int, at_ms: float, name: str
) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": int(at_ms * _US),
        "frames": [{"filename": "mucudnn", "line": 0, "name": name}],
    }


def _segment(left: Sequence[tuple[int, Interval]], size: int) -> dict[str, Any]:
    """Return the memory after the step: remaining blocks and gaps between them."""
    blocks: list[dict[str, Any]] = []
    at = _BASE
    for address, interval in left:
        # Blocks have to cover the segment: gaps are inactive ones.
        if address > at:
            blocks.append(_block(at, address - at, "inactive", ""))
        nbytes, name = interval.nbytes, interval.name
        blocks.append(_block(address, nbytes, "active_allocated", name))
        at = address + nbytes
    if at < _BASE + size:
        blocks.append(_block(at, _BASE + size - at, "inactive", ""))
    active = sum(interval.nbytes for _, interval in left)
    return {
        "device": 0,
        "address": _BASE,
        "total_size": size,
        "allocated_size": active,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, size: int, state: str, name: str) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": size if name else 0,
        "state": state,
        "frames": [{"filename": "mucudnn", "line": 0, "name": name}] if name else [],
    }
