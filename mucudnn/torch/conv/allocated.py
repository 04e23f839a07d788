"""How many bytes calls have allocated at once, all in one look at the allocator."""

from collections.abc import Callable, Sequence

from torch.profiler import ProfilerActivity, profile, record_function

from mucudnn.torch.measurement.profiler_events import allocations, most_in_use, spans

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
    for name, start, stop in spans(prof, _MARK):
        within = (event for event in events if start <= event[0] <= stop)
        found[int(name.removeprefix(_MARK))] = most_in_use(within)
    return found
