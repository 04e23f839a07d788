"""A step table measured on demand, only at the sizes that load balancing asks for.

Few sizes are worth measuring where each takes long, as where a step has to be planned
within a budget first. A fixed cost makes times concave in the size, so a line through
two measured sizes overestimates larger ones. A table therefore starts with its smallest
size and an equal share, and is extrapolated on that line; each planned share is
measured, and the split planned again, until all planned shares are measured.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mucudnn.ir.fleet import StepPoint, StepTable

__all__ = ["AskedTable", "Told"]

_FINE = 16
"""Sizes within 1 / _FINE of each other count as equal."""


@dataclass(frozen=True, slots=True)
class Told:
    """The step table a rank reports to the others.

    Attributes:
        table: Times by size; the last may be extrapolated.
        measured: Sizes that were measured.
    """

    table: StepTable
    measured: frozenset[int]

    def knows(self, samples: int) -> bool:
        """Return whether a share fits and was measured, up to 1 / _FINE of its size."""
        near = any(abs(n - samples) <= samples // _FINE for n in self.measured)
        return near and samples <= max(self.measured)


class AskedTable:
    """The step table of one rank, measured on demand.

    Args:
        device: Name of the device.
        least: Smallest size, which has to fit.
        most: Largest size.
        measure: Function that measures a size.
        unfitting: Exceptions `measure` raises for sizes that do not fit; for the
            smallest size they are propagated.
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
        """Return the table, extrapolated to the largest size that may fit."""
        points = [self._known[samples] for samples in sorted(self._known)]
        if points[-1].samples < self._most:
            points.append(_extrapolate(points, self._most))
        return Told(StepTable(self._device, tuple(points)), frozenset(self._known))

    def ask(self, samples: int) -> None:
        """Measure a size; if it does not fit, search for the largest that does."""
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


def _extrapolate(points: list[StepPoint], samples: int) -> StepPoint:
    """Extrapolate from the last two points, or in proportion from a single one."""
    last = points[-1]
    slope = last.time_ms / last.samples
    if len(points) > 1:
        before = points[-2]
        slope = (last.time_ms - before.time_ms) / (last.samples - before.samples)
    return StepPoint(samples, last.time_ms + max(0.0, slope) * (samples - last.samples))
