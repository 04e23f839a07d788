"""The workspace limits that plans will be asked for under: what a table must serve."""

from dataclasses import dataclass
from math import inf

__all__ = ["ANY_LIMIT", "LimitRange"]


@dataclass(frozen=True, slots=True)
class LimitRange:
    """Bytes of workspace, from the tightest limit to the widest one.

    Attributes:
        least: What every plan may use. An algorithm need not be timed where another
            one within it is far ahead.
        most: What no plan may exceed. Of what needs more, only what may be faster is
            timed: it tells what more workspace would buy.

    Raises:
        ValueError: The least is more than the most.
    """

    least: float = 0.0
    most: float = inf

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ValueError(f"limits from {self.least} to {self.most} bytes: no range")

    def covers(self, other: "LimitRange") -> bool:
        """Whether what serves these limits serves all of the others."""
        return self.least <= other.least and other.most <= self.most

    def including(self, limit: float) -> "LimitRange":
        """The range that has this limit, too."""
        return LimitRange(min(self.least, limit), max(self.most, limit))


ANY_LIMIT = LimitRange()
"""Nothing is known of the limits."""
