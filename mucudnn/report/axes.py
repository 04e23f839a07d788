"""Axes of wide pictures: bytes upwards, time or bytes along, and step functions."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mucudnn.report.markup import Markup, tag
from mucudnn.report.svg import Scale

__all__ = [
    "Frame",
    "bytes_axis",
    "columns",
    "linear_scale",
    "steps_path",
    "unit_of",
]

_UNITS = (("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30))
_MOST_TICKS = 7
_MOST_ALONG = 13
_SHORT = 5


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a picture's axes are.

    Attributes:
        left: Of the vertical axis.
        right: End of the horizontal one.
        top: End of the vertical one.
        bottom: Of the horizontal axis.
    """

    left: float
    right: float
    top: float
    bottom: float

    def vertical(self, scale: Scale, unit: str, per_unit: float) -> Iterator[Markup]:
        """Lines across with numbers at the left, the unit above them."""
        for value in scale.ticks:
            at = scale(value)
            yield tag("line", class_="grid", x1=self.left, x2=self.right, y1=at, y2=at)
            text = f"{value / per_unit:g}"
            yield tag("text", text, class_="tick end", x=self.left - 6, y=at + 3.5)
        long = len(unit) > _SHORT
        class_, x = ("name", 2.0) if long else ("name end", self.left - 6)
        yield tag("text", unit, class_=class_, x=x, y=self.top - 10)

    def horizontal(
        self, scale: Scale, name: str, per_unit: float = 1.0
    ) -> Iterator[Markup]:
        """The axis at the bottom, its numbers, and at its end what they are."""
        yield tag(
            "line",
            class_="axis",
            x1=self.left,
            x2=self.right,
            y1=self.bottom,
            y2=self.bottom,
        )
        for value in scale.ticks:
            text = f"{value / per_unit:g}"
            yield tag(
                "text", text, class_="tick mid", x=scale(value), y=self.bottom + 15
            )
        yield tag("text", name, class_="name end", x=self.right, y=self.bottom + 30)


def linear_scale(
    high: float,
    start: float,
    stop: float,
    *,
    per_unit: float = 1.0,
    most_ticks: int | None = None,
) -> Scale:
    """From 0, with ticks at 1, 2 or 5 times a power of ten of the unit.

    Along there may be more of them than upwards.
    """
    most = (high or per_unit) / per_unit
    usual = _MOST_ALONG if stop > start else _MOST_TICKS
    spaces = (most_ticks or usual) - 1
    power = 10.0 ** math.floor(math.log10(most / spaces))
    step = next(
        power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= spaces
    )
    count = int(most / step + 1e-9) + 1
    ticks = tuple(round(step * i, 9) * per_unit for i in range(count))
    return Scale(0.0, high or per_unit, start, stop, ticks)


def unit_of(nbytes: float) -> tuple[str, int]:
    """The largest unit that keeps a number of bytes at least one."""
    return next(
        ((name, size) for name, size in reversed(_UNITS) if nbytes >= size), _UNITS[0]
    )


def bytes_axis(
    high: float, start: float, stop: float, *, most_ticks: int | None = None
) -> tuple[Scale, str, int]:
    """A scale of bytes up to a little above `high`, its unit, and bytes in one."""
    unit, size = unit_of(high)
    scale = linear_scale(high * 1.06, start, stop, per_unit=size, most_ticks=most_ticks)
    return scale, unit, size


def columns(
    points: Sequence[tuple[float, float]], width: float
) -> list[tuple[float, float]]:
    """A step function with one value a column: the largest in it.

    Args:
        points: (x, value from there on), ascending in x.
        width: Of a column.
    """
    found: list[tuple[float, float]] = []
    value = 0.0
    column = None
    for x, after in points:
        at = int(x / width)
        if at == column:
            before, most = found[-1]
            found[-1] = (before, max(most, after))
        else:
            if column is not None and found[-1][1] != value:
                found.append(((column + 1) * width, value))
            found.append((at * width, max(value, after)))
            column = at
        value = after
    if found and found[-1][1] != value:
        found.append((found[-1][0] + width, value))
    return found


def steps_path(points: Iterable[tuple[float, float]]) -> str:
    """A staircase through coordinates: along, then up or down."""
    parts: list[str] = []
    last = None
    for x, y in points:
        if last is None:
            parts.append(f"M{x:.1f} {y:.1f}")
        elif abs(y - last) >= 0.05:
            parts.append(f"H{x:.1f}V{y:.1f}")
        else:
            continue
        last = y
    return "".join(parts)
