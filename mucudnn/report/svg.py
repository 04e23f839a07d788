"""Drawing with numbers: scales, ticks and the marks of algorithms."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mucudnn.report.markup import Child, Markup, tag

__all__ = ["Scale", "byte_scale", "drawing", "marker", "time_scale"]

COLOURS = 10
"""Colour classes `a0` … in the style sheet."""
_LOG_FROM = 6.0
"""Times that differ by more than this factor are drawn on a logarithmic axis."""
_MOST_TICKS = 6


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to coordinates, linear or logarithmic to base 2.

    Attributes:
        low: Value at `start`.
        high: Value at `stop`.
        start: Coordinate.
        stop: Coordinate.
        ticks: Values to label.
        logarithmic: Whether factors, not differences, are equally long.
        zero: Where 0 is drawn on a logarithmic scale, which has no room for it.
    """

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[float, ...]
    logarithmic: bool = False
    zero: float | None = None

    def __call__(self, value: float) -> float:
        """The coordinate of a value."""
        if self.zero is not None and value <= 0:
            return self.zero
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log2(low), math.log2(high), math.log2(value)
        share = (value - low) / (high - low)
        return self.start + share * (self.stop - self.start)


def byte_scale(values: Iterable[int], start: float, stop: float) -> Scale:
    """Logarithmic, 0 at the left edge a little apart from the rest."""
    positive = [value for value in values if value > 0] or [1024]
    low = 2 ** math.floor(math.log2(min(positive)))
    high = 2 ** math.ceil(math.log2(max(positive)))
    if low == high:
        low, high = low / 2, high * 2
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first) / (_MOST_TICKS - 2)))
    powers = range(first, last + 1, step)
    ticks = (0.0, *(float(2**power) for power in powers))
    return Scale(low, high, start + 36, stop, ticks, logarithmic=True, zero=start)


def time_scale(values: Sequence[float], start: float, stop: float) -> Scale:
    """From 0, or logarithmic where the slowest is many times the fastest."""
    low, high = min(values), max(values)
    if low > 0 and high / low > _LOG_FROM:
        low, high = low / 1.15, high * 1.15
        return Scale(low, high, start, stop, _log_ticks(low, high), logarithmic=True)
    high = high * 1.08 or 1.0
    return Scale(0.0, high, start, stop, _linear_ticks(high))


def drawing(width: float, height: float, label: str, *children: Child) -> Markup:
    """An SVG that scales with the page and says what it shows."""
    view = f"0 0 {width:g} {height:g}"
    return tag("svg", children, viewBox=view, role="img", aria_label=label)


def marker(
    index: int, x: float, y: float, *, title: str = "", filled: bool = True
) -> Markup:
    """The shape and colour of the `index`-th algorithm, either of which is enough."""
    r = 4.0
    shapes = (
        lambda: (
            f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z"
        ),
        lambda: f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}z",
        lambda: f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z",
        lambda: f"M{x:.1f} {y - 5:.1f}l5 8.5h-10z",
        lambda: f"M{x:.1f} {y + 5:.1f}l5 -8.5h-10z",
    )
    return tag(
        "path",
        [tag("title", title)] if title else [],
        d=shapes[index % len(shapes)](),
        class_=f"mark a{index % COLOURS}" + ("" if filled else " hollow"),
    )


def _linear_ticks(high: float) -> tuple[float, ...]:
    power = 10.0 ** math.floor(math.log10(high / (_MOST_TICKS - 1)))
    step = next(
        power * factor
        for factor in (1, 2, 5, 10)
        if high / (power * factor) <= _MOST_TICKS - 1
    )
    return tuple(step * i for i in range(int(high / step) + 1))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = tuple(
            factor * 10.0**e
            for e in exponents
            for factor in factors
            if low <= factor * 10.0**e <= high
        )
        if len(ticks) <= _MOST_TICKS:
            break
    return ticks
