"""The range of workspace limits that a performance table must serve."""

from dataclasses import dataclass
from math import inf

__all__ = ["ANY_LIMIT", "LimitRange"]


@dataclass(frozen=True, slots=True)
class LimitRange:
    """A range of workspace limits in bytes.

    Attributes:
        least: Smallest limit of any plan. An algorithm need not be timed if another one
            that fits into this limit is far ahead.
        most: Largest limit of any plan. Of algorithms that need more workspace, only
            those that may be faster are timed, to show what more workspace would gain.

    """

    least: float = 0.0
    most: float = inf

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ValueError(f"limits from {self.least} to {self.most} bytes: no range")

    def covers(self, other: "LimitRange") -> bool:
        """Return whether a table for these limits serves all of `other`."""
        return self.least <= other.least and other.most <= self.most

    def including(self, limit: float) -> "LimitRange":
        """Extend the range to include a limit."""
        return LimitRange(min(self.least, limit), max(self.most, limit))


ANY_LIMIT = LimitRange()
"""Range of unknown limits."""
