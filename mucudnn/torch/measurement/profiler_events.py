"""What PyTorch's profiler saw of its allocator."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import profile

__all__ = ["allocations", "most_in_use", "spans"]


def allocations(prof: profile) -> list[tuple[int, int, int]]:
    """What the allocator handed out and took back: time in ns, bytes, address."""
    found = [
        (event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr)
        for event in _events(prof)
        if event.tag == _EventType.Allocation
    ]
    return sorted(found, key=lambda row: row[0])


def most_in_use(events: Iterable[tuple[int, int, int]]) -> int:
    """The most bytes in use at once, of what these allocations handed out."""
    now = most = 0
    mine = set()
    for _, nbytes, address in events:
        if nbytes > 0:
            mine.add(address)
        elif address in mine:
            mine.discard(address)
        else:
            continue  # allocated before
        now += nbytes
        most = max(most, now)
    return most


def spans(prof: profile, prefix: str) -> list[tuple[str, int, int]]:
    """Name, begin and end of every range whose name begins so."""
    return [
        (event.name, event.start_time_ns, event.end_time_ns)
        for event in _events(prof)
        if event.name.startswith(prefix)
    ]


def _events(prof: profile) -> Iterator[Any]:
    """Every event, in no order."""
    pending = list(prof.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        yield event
