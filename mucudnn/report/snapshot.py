"""Export a planned step's memory as a snapshot for PyTorch's memory_viz.

The format is a pickle of plain dictionaries: segments of device memory with their
blocks, and for every device a trace of allocations, oldest first. Every tensor has its
planned address: resident tensors come first, followed by the arena. The name is in the
event's stack frame.
"""

import pickle
from collections.abc import Sequence
from typing import Any

from mucudnn.passes.memory_timeline import WORKSPACE, Interval, memory_intervals
from mucudnn.passes.planning.place_step import PlacedStep

__all__ = ["snapshot", "snapshot_bytes"]

_BASE = 0x7F00_0000_0000
"""Start of the memory, similar to addresses of real devices."""

_PROTOCOL = 4
"""Pickle protocol that the page can read."""

_US = 1e3


def snapshot_bytes(placed: PlacedStep) -> bytes:
    """Return the pickled snapshot."""
    return pickle.dumps(snapshot(placed), protocol=_PROTOCOL)


def snapshot(placed: PlacedStep) -> dict[str, Any]:
    """Return the snapshot as dictionaries; its one segment has all bytes."""
    plan, size = placed.plan, placed.nbytes
    intervals = memory_intervals(plan)
    addresses = _addresses(placed, intervals)
    end = max((i.stop_ms for i in intervals), default=0.0)
    trace = [
        _event("segment_alloc", _BASE, size, 0.0, "arena"),
        *_events(intervals, addresses),
    ]
    left = [
        (address, interval)
        for address, interval in zip(addresses, intervals, strict=True)
        if interval.kept and interval.nbytes
    ]
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


def _events(
    intervals: Sequence[Interval], addresses: Sequence[int]
) -> list[dict[str, Any]]:
    """Return allocations and frees; storages kept to the end are not freed."""
    found: list[tuple[int, dict[str, Any]]] = []
    for interval, address in zip(intervals, addresses, strict=True):
        size, name = interval.nbytes, interval.name
        taken = _event("alloc", address, size, interval.start_ms, name)
        found.append((interval.first, taken))
        if not interval.kept:
            for action in ("free_requested", "free_completed"):
                freed = _event(action, address, size, interval.stop_ms, name)
                found.append((interval.last, freed))
    return [event for _, event in sorted(found, key=lambda pair: pair[0])]


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
