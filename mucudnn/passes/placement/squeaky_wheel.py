"""Squeaky wheel optimisation: what found no place comes earlier in the next order.

Greedy placement is as good as the order of what it places. So an order is tried, and
those that fared badly in it move to the front of the next (Joslin & Clements 1999). How
far is left to chance, up to the very first; now and then the search returns to the best
order so far: without that it repeats itself.
"""

import math
import random
from collections.abc import Iterable, Sequence

__all__ = ["SqueakyWheel"]

_RETURN = 0.1
"""How often a worse order is given up for the best one."""


class SqueakyWheel:
    """One order after the other, each with what squeaked in the last one earlier.

    Args:
        order: The first one.

    Attributes:
        order: The one to try.
        least: Cost of the best order so far.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self.order = self._best = order
        self.least = math.inf
        self._chance = random.Random(0)

    def judge(self, cost: float) -> None:
        """Say what came of the order; it may be given up for the best one."""
        if cost <= self.least:
            self.least, self._best = cost, self.order
        elif self._chance.random() < _RETURN:
            self.order = self._best

    def reorder(self, squeaking: Iterable[int]) -> None:
        """Make the next order: those that squeaked come earlier."""
        rank = {i: r + 1.0 for r, i in enumerate(self.order)}
        for i in squeaking:
            rank[i] *= self._chance.random()
        self.order = sorted(self.order, key=rank.__getitem__)
