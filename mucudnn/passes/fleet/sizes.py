"""Measure a step at few sizes such that its table is accurate in between."""

import math
from collections.abc import Callable

from mucudnn.ir.fleet import StepPoint, StepTable

__all__ = ["TOLERANCE", "measured_table"]

TOLERANCE = 0.03
"""Relative error allowed for interpolated times."""

_FINE = 16
"""The largest size that fits is found up to 1 / _FINE of it."""


def measured_table(
    device: str,
    least: int,
    most: int,
    measure: Callable[[int], StepPoint],
    *,
    tolerance: float = TOLERANCE,
    unfitting: type[Exception] | tuple[type[Exception], ...] = (),
) -> StepTable:
    """Measure a table with as few sizes as its shape requires.

    The two ends are measured first. A range is bisected (geometrically) until the time
    of its middle is on the line between its ends. Fixed costs make a step's time
    concave in its size, and a concave curve that meets its chord in the middle is the
    chord. If the largest size does not fit, the table ends with the largest one that
    does, up to a sixteenth. `unfitting` are the exceptions `measure` raises for sizes
    that do not fit; for the smallest size they are propagated.
    """
    known: dict[int, StepPoint] = {}

    def fits(size: int) -> bool:
        try:
            known[size] = measure(size)
        except unfitting:
            return False
        return True

    if not fits(most):
        known[least], beyond = measure(least), most
        most = least
        while beyond - most > max(1, most // _FINE):
            middle = (most + beyond) // 2
            if fits(middle):
                most = middle
            else:
                beyond = middle
    elif least not in known:
        known[least] = measure(least)

    def refine(low: StepPoint, high: StepPoint) -> None:
        size = round(math.sqrt(low.samples * high.samples))
        if not low.samples < size < high.samples:
            return
        found = known.get(size) or measure(size)
        known[size] = found
        share = (size - low.samples) / (high.samples - low.samples)
        line = low.time_ms + share * (high.time_ms - low.time_ms)
        if abs(line - found.time_ms) > tolerance * found.time_ms:
            refine(low, found)
            refine(found, high)

    refine(known[least], known[most])
    return StepTable(device, tuple(known.values()))
