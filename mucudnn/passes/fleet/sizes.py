"""At how few sizes a step has to be measured for its table to be right in between."""

import math
from collections.abc import Callable

from mucudnn.ir.fleet import StepPoint, StepTable

__all__ = ["TOLERANCE", "measured_table"]

TOLERANCE = 0.03
"""Of a time, what a line between two sizes may be off."""


def measured_table(
    device: str,
    least: int,
    most: int,
    measure: Callable[[int], StepPoint],
    *,
    tolerance: float = TOLERANCE,
) -> StepTable:
    """A table from as few measurements as its shape takes.

    The ends come first. A range is halved, in ratio, at a size whose time then is not
    on the line between its ends; where it is, the times in between are taken to be on
    that line too: fixed costs make a step's time concave in its size, and a concave
    curve that meets its chord in the middle is the chord.

    Args:
        device: What is measured.
        least: The smallest size.
        most: The largest.
        measure: Called with a size.
        tolerance: Of a time, what the line may be off.
    """
    known = {size: measure(size) for size in sorted({most, least}, reverse=True)}

    def refine(low: StepPoint, high: StepPoint) -> None:
        size = round(math.sqrt(low.samples * high.samples))
        if not low.samples < size < high.samples:
            return
        found = known[size] = measure(size)
        share = (size - low.samples) / (high.samples - low.samples)
        line = low.time_ms + share * (high.time_ms - low.time_ms)
        if abs(line - found.time_ms) > tolerance * found.time_ms:
            refine(low, found)
            refine(found, high)

    refine(known[least], known[most])
    return StepTable(device, tuple(known.values()))
