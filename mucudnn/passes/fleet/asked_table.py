"""A table that is measured only at the sizes that sharing out asks for.

Where a size takes long to measure, as where a step has to be planned within a budget
first, few are worth it. A fixed cost makes times concave in the size: a line through
two measured sizes says no less than what a larger one takes. So a table begins with its
smallest size and an equal share, and ends on such a line; every share that is planned
by it is measured before it counts, until all that are planned are.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mucudnn.ir.fleet import StepPoint, StepTable

__all__ = ["AskedTable", "Told"]

_FINE = 16
"""How exactly sizes are asked for, as a fraction."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank tells the others.

    Attributes:
        table: Its end may not be measured.
        measured: Sizes that are.
    """

    table: StepTable
    measured: frozenset[int]

    def knows(self, samples: int) -> bool:
        """Whether a share fits, and was measured, or one that is hardly another."""
        near = any(abs(n - samples) <= samples // _FINE for n in self.measured)
        return near and samples <= max(self.measured)


class AskedTable:
    """The table of one rank, as far as it was asked for.

    Args:
        device: What is measured.
        least: The smallest size, which has to fit.
        most: The largest.
        measure: Called with a size.
        unfitting: What `measure` raises of a size that does not fit; of the smallest
            it is raised again.
    """

    def __init__(
        self,
        device: str,
        least: int,
        most: int,
        measure: Callable[[int], StepPoint],
        *,
        unfitting: tuple[type[Exception], ...] = (),
    ) -> None:
        self._device = device
        self._measure = measure
        self._unfitting = unfitting
        self._most = most
        self._known = {least: measure(least)}

    def told(self) -> Told:
        """What is known, and a line up to the largest size that may fit."""
        points = [self._known[samples] for samples in sorted(self._known)]
        if points[-1].samples < self._most:
            points.append(_on_line(points, self._most))
        return Told(StepTable(self._device, tuple(points)), frozenset(self._known))

    def ask(self, samples: int) -> None:
        """Measure a size; where it does not fit, the largest that does."""
        if samples in self._known or self._fits(samples):
            return
        most, beyond = max(n for n in self._known if n < samples), samples
        while beyond - most > max(1, most // _FINE):
            middle = (most + beyond) // 2
            if self._fits(middle):
                most = middle
            else:
                beyond = middle
        self._most = most

    def _fits(self, samples: int) -> bool:
        try:
            self._known[samples] = self._measure(samples)
        except self._unfitting:
            return False
        return True


def _on_line(points: list[StepPoint], samples: int) -> StepPoint:
    """A point behind the last two; behind one, as long for every sample."""
    last = points[-1]
    slope = last.time_ms / last.samples
    if len(points) > 1:
        before = points[-2]
        slope = (last.time_ms - before.time_ms) / (last.samples - before.samples)
    return StepPoint(samples, last.time_ms + max(0.0, slope) * (samples - last.samples))
