"""What a call really has in use: the events of PyTorch's own allocator."""

from collections.abc import Callable, Iterator
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def real_peak(call: Callable[[], object]) -> int:
    """The most bytes that a call has allocated at once, beyond what was there.

    A release by a thread that PyTorch does not profile, as gloo's are, shows only when
    the address is allocated again: until then the bytes count. So the least of several
    runs is nearest to the truth, and never below it.
    """
    with profile(
        activities=[ProfilerActivity.CPU],
        profile_memory=True,
        acc_events=True,  # of which older versions warn
    ) as prof:
        call()
    now = most = 0
    mine: dict[int, int] = {}
    for _, nbytes, address in _allocations(prof):
        now -= mine.pop(address, 0)  # freed here, or earlier and not seen
        if nbytes > 0:
            mine[address] = nbytes
            now += nbytes
        most = max(most, now)
    return most


def _allocations(prof: profile) -> list[tuple[int, int, int]]:
    """What the allocator handed out and took back: time in ns, bytes, address."""
    found = [
        (event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr)
        for event in _events(prof)
        if event.tag == _EventType.Allocation
    ]
    return sorted(found, key=lambda row: row[0])


def _events(prof: profile) -> Iterator[Any]:
    """Every event, in no order."""
    pending = list(prof.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        yield event
