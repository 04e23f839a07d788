"""Squeaky wheel optimisation of the order of a greedy placement.

A greedy placement is as good as its order. Items that fared badly in one order move by
a random distance towards the front of the next (Joslin & Clements 1999). Now and then
the search returns to the best order so far; without that it cycles.
"""

import math
import random
from collections.abc import Iterable, Sequence

__all__ = ["SqueakyWheel"]

_RETURN = 0.1
"""Probability of returning from a worse order to the best one."""


class SqueakyWheel:
    """Sequence of orders to try, starting from `order`.

    Attributes:
        order: The order to try next.
        least: Cost of the best order so far.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self.order = self._best = order
        self.least = math.inf
        self._chance = random.Random(0)

    def judge(self, cost: float) -> None:
        """Report the cost of the current order, and maybe return to the best order."""
        if cost <= self.least:
            self.least, self._best = cost, self.order
        elif self._chance.random() < _RETURN:
            self.order = self._best

    def reorder(self, squeaking: Iterable[int]) -> None:
        """Make the next order by moving badly placed items towards the front."""
        rank = {i: r + 1.0 for r, i in enumerate(self.order)}
        for i in squeaking:
            rank[i] *= self._chance.random()
        self.order = sorted(self.order, key=rank.__getitem__)
