"""At how few sizes a step has to be measured for its table to be right in between."""

import math
from collections.abc import Callable

from mucudnn.ir.fleet import StepPoint, StepTable

__all__ = ["TOLERANCE", "measured_table"]

TOLERANCE = 0.03
"""Of a time, what a line between two sizes may be off."""

_FINE = 16
"""How exactly the largest size that fits is looked for, as a fraction."""


def measured_table(
    device: str,
    least: int,
    most: int,
    measure: Callable[[int], StepPoint],
    *,
    tolerance: float = TOLERANCE,
    unfitting: type[Exception] | tuple[type[Exception], ...] = (),
) -> StepTable:
    """A table from as few measurements as its shape takes.

    The ends come first. A range is halved, in ratio, at a size whose time then is not
    on the line between its ends; where it is, the times in between are taken to be on
    that line too: fixed costs make a step's time concave in its size, and a concave
    curve that meets its chord in the middle is the chord. Where the largest does not
    fit, the table ends with one that does, next to it or by a sixteenth less.

    Args:
        device: What is measured.
        least: The smallest size.
        most: The largest.
        measure: Called with a size.
        tolerance: Of a time, what the line may be off.
        unfitting: What `measure` raises of a size that does not fit; of the smallest
            it is raised again.
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
