"""What a call really has in use: the events of PyTorch's own allocator."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from mucudnn.torch.measure import allocations

__all__ = ["real_peak"]


def real_peak(call: Callable[[], object]) -> int:
    """The most bytes that a call has allocated at once, beyond what was there."""
    with profile(
        activities=[ProfilerActivity.CPU],
        profile_memory=True,
        acc_events=True,  # of which older versions warn
    ) as prof:
        call()
    now = most = 0
    mine = set()
    for _, nbytes, address in allocations(prof):
        if nbytes > 0:
            mine.add(address)
        elif address not in mine:
            continue  # freed here, allocated before
        else:
            mine.discard(address)
        now += nbytes
        most = max(most, now)
    return most
