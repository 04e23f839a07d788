"""What a share of the mini-batch takes on one rank, whatever its size."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from mucudnn.ir.fleet import Rank

__all__ = ["ShareTimes", "share_times"]


@dataclass(frozen=True, slots=True, eq=False)
class ShareTimes:
    """Times of shares of 0, 1, … samples; an object is equal to itself alone.

    They never fall: where a table's do, which is noise or a size that its device is
    bad at, a share counts as long as the longest of the smaller ones. So no share
    takes longer than is said here, and what fits into a time is an interval.

    Attributes:
        times_ms: Of each size; of 0 it is 0.
        at_once: Samples of the largest step that fits; larger shares run as several.
    """

    times_ms: tuple[float, ...]
    at_once: int

    @property
    def most(self) -> int:
        """The largest share that can be taken."""
        return len(self.times_ms) - 1

    def most_by(self, time_ms: float) -> int:
        """The largest share that takes no longer."""
        return bisect_right(self.times_ms, time_ms) - 1

    def most_before(self, time_ms: float) -> int:
        """The largest share that takes less; -1 if none does."""
        return bisect_left(self.times_ms, time_ms) - 1

    def passes(self, samples: int) -> int:
        """How many steps a share runs as."""
        return -(-samples // self.at_once) if samples else 0


def share_times(rank: Rank, most: int) -> ShareTimes:
    """The times of a rank's shares of up to `most` samples.

    A share that does not fit runs as the fewest steps that do, as equal as can be.
    """
    at_once = min(rank.most_at_once, most)
    if at_once == 0:
        return ShareTimes((0.0,), 0)
    times = rank.table.times(at_once)
    if rank.accumulates:
        for samples in range(at_once + 1, most + 1):
            passes = -(-samples // at_once)
            each, more = divmod(samples, passes)
            total = (passes - more) * times[each]
            times.append(total + more * times[each + 1] if more else total)
    return ShareTimes(tuple(accumulate(times, max)), at_once)
