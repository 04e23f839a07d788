"""How many bytes calls have allocated at once, all in one look at the allocator."""

from collections.abc import Callable, Sequence

from torch.profiler import ProfilerActivity, profile, record_function

from mucudnn.torch.measure import allocations

__all__ = ["Prepared", "most_allocated"]

Prepared = Callable[[], Callable[[], object]]
"""Makes what a call needs beforehand, which is not counted; the call."""

_MARK = "mucudnn:call:"


def most_allocated(calls: Sequence[Prepared]) -> list[int]:
    """The most that each call has in use of what it allocates, its result included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        for number, prepared in enumerate(calls):
            run = prepared()
            with record_function(f"{_MARK}{number}"):
                result = run()
            del run, result
    events = allocations(prof)
    found = [0] * len(calls)
    for number, start, stop in _spans(prof):
        found[number] = _peak([e[1:] for e in events if start <= e[0] <= stop])
    return found


def _peak(events: Sequence[tuple[int, int]]) -> int:
    now = most = 0
    mine = set()
    for nbytes, address in events:
        if nbytes > 0:
            mine.add(address)
        elif address not in mine:
            continue  # freed here, allocated before
        now += nbytes
        most = max(most, now)
    return most


def _spans(prof: profile) -> list[tuple[int, int, int]]:
    """Number, begin and end of every call."""
    found = []
    pending = list(prof.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name.startswith(_MARK):
            number = int(event.name.removeprefix(_MARK))
            found.append((number, event.start_time_ns, event.end_time_ns))
    return found
