"""When nodes start, counted round and round: every step takes as long."""

import bisect
import itertools
import math
from collections.abc import Sequence

__all__ = ["Clock"]


class Clock:
    """When nodes start if nothing has to be waited for.

    Positions beyond the last node are those of the next step, negative ones of the
    step before.

    Args:
        node_ms: How long each node takes.
    """

    def __init__(self, node_ms: Sequence[float]) -> None:
        self._starts = list(itertools.accumulate(node_ms, initial=0.0))
        self._count = len(node_ms)

    def start(self, position: int) -> float:
        """When a node starts; the one behind the last with the step's end."""
        step, at = divmod(position, max(1, self._count))
        return step * self._starts[-1] + self._starts[at]

    def after(self, ms: float) -> int:
        """The first node that starts at a moment or later."""
        step, rest = self._step(ms)
        return step * self._count + bisect.bisect_left(self._starts, rest)

    def before(self, ms: float) -> int:
        """The last node that starts at a moment or earlier."""
        step, rest = self._step(ms)
        return step * self._count + bisect.bisect_right(self._starts, rest) - 1

    def _step(self, ms: float) -> tuple[int, float]:
        whole = self._starts[-1]
        if 0 <= ms <= whole or not whole:
            return 0, ms
        step = math.floor(ms / whole)
        return step, ms - step * whole
