"""SVG drawings: markup, axes, labels and marks."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TypeAlias

from markupsafe import Markup as Markup

Child: TypeAlias = "str | Iterable[Child]"
"""Text, an element, or any nesting of them."""

COLOURS = 10
"""Number of colour classes `a0` … in the style sheet."""


def drawing(width: float, height: float, label: str, *children: Child) -> Markup:
    """Return an SVG that scales with the page and has an accessible label."""
    view = f"0 0 {width:g} {height:g}"
    return tag("svg", children, viewBox=view, role="img", aria_label=label)


def box(
    class_: str | None,
    x: float,
    y: float,
    size: tuple[float, float],
    *,
    title: str = "",
    rx: int | None = None,
) -> Markup:
    """Return a rectangle of `size` (width, height) with top left corner (x, y)."""
    width, height = size
    tip = _tooltip(title)
    return tag("rect", tip, class_=class_, x=x, y=y, width=width, height=height, rx=rx)


def marker(
    index: int, x: float, y: float, *, title: str = "", filled: bool = True
) -> Markup:
    """Return the mark of the `index`-th algorithm, unique by shape or colour."""
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
        _tooltip(title),
        d=shapes[index % len(shapes)](),
        class_=f"mark a{index % COLOURS}" + ("" if filled else " hollow"),
    )


def _tooltip(title: str) -> Child:
    return tag("title", title) if title else []


# HTML and SVG elements as text that is escaped automatically.
#
# `Markup` is text that is safe to put into a page; other text is escaped when it
# becomes the child of an element. The output is also well-formed XML.


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """Return an element.

    In attribute names, `class_` becomes class and other `_` become `-`; None is left
    out; floats are rounded to hundredths.
    """
    opening = name + "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{opening}>{''.join(flat(children))}</{name}>")


def flat(children: Iterable[Child]) -> Iterable[str]:
    """Yield the markup of children, with text escaped."""
    for child in children:
        if isinstance(child, Markup):
            yield child
        elif isinstance(child, str):
            yield escape(child, quote=False)
        else:
            yield from flat(child)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)


# Scales, ticks, axes, and step functions of charts.


_UNITS = (("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30))

_LOG_FROM = 6.0
"""Ratio of times above which their axis is logarithmic."""

_MOST_TICKS, _MOST_ALONG, _MOST_OF_LAYER = 7, 13, 6
"""Maximum ticks of a vertical axis, a horizontal one, and in a layer's small charts."""

_SHORT = 5
"""Maximum letters of a unit that fit beside the axis."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A mapping from values to coordinates, linear or logarithmic to base 2.

    It maps `low` to `start` and `high` to `stop`. A logarithmic scale has no place for
    0, which is drawn at the coordinate `zero`.
    """

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[float, ...]
    logarithmic: bool = False
    zero: float | None = None

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        if self.zero is not None and value <= 0:
            return self.zero
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log2(low), math.log2(high), math.log2(value)
        return self.start + (value - low) / (high - low) * (self.stop - self.start)


def byte_scale(values: Iterable[int], start: float, stop: float) -> Scale:
    """Return a logarithmic scale of bytes; zero is drawn at the left edge."""
    positive = [value for value in values if value > 0] or [1024]
    low = 2 ** math.floor(math.log2(min(positive)))
    high = 2 ** math.ceil(math.log2(max(positive)))
    if low == high:
        low, high = low / 2, high * 2
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first) / (_MOST_OF_LAYER - 2)))
    ticks = (0.0, *(float(2**power) for power in range(first, last + 1, step)))
    return Scale(low, high, start + 36, stop, ticks, logarithmic=True, zero=start)


def time_scale(values: Sequence[float], start: float, stop: float) -> Scale:
    """Return a scale of times from 0, or a logarithmic one for a wide range."""
    low, high = min(values), max(values)
    if low > 0 and high / low > _LOG_FROM:
        low, high = low / 1.15, high * 1.15
        return Scale(low, high, start, stop, _log_ticks(low, high), logarithmic=True)
    return linear_scale(high * 1.08 or 1.0, start, stop, most_ticks=_MOST_OF_LAYER)


@dataclass(frozen=True, slots=True)
class Frame:
    """The rectangle enclosed by a chart's axes, by its coordinates."""

    left: float
    right: float
    top: float
    bottom: float

    def grid(self, scale: Scale, per_unit: float = 1.0) -> Iterator[Markup]:
        """Yield horizontal lines with numbers at the left."""
        for value in scale.ticks:
            at = scale(value)
            yield tag("line", class_="grid", x1=self.left, x2=self.right, y1=at, y2=at)
            text = f"{value / per_unit:g}"
            yield tag("text", text, class_="tick end", x=self.left - 6, y=at + 3.5)

    def base(self, scale: Scale, text: Callable[[float], str]) -> Iterator[Markup]:
        """Yield the axis at the bottom with its numbers."""
        y = self.bottom
        yield tag("line", class_="axis", x1=self.left, x2=self.right, y1=y, y2=y)
        for value in scale.ticks:
            yield tag("text", text(value), class_="tick mid", x=scale(value), y=y + 15)

    def vertical(self, scale: Scale, unit: str, per_unit: float) -> Iterator[Markup]:
        """Yield the grid, with the unit of its numbers above them."""
        yield from self.grid(scale, per_unit)
        long = len(unit) > _SHORT
        class_, x = ("name", 2.0) if long else ("name end", self.left - 6)
        yield tag("text", unit, class_=class_, x=x, y=self.top - 10)

    def horizontal(
        self, scale: Scale, name: str, per_unit: float = 1.0
    ) -> Iterator[Markup]:
        """Yield the axis at the bottom, with a name at its end."""
        yield from self.base(scale, lambda value: f"{value / per_unit:g}")
        yield tag("text", name, class_="name end", x=self.right, y=self.bottom + 30)


def linear_scale(
    high: float,
    start: float,
    stop: float,
    *,
    per_unit: float = 1.0,
    most_ticks: int | None = None,
) -> Scale:
    """Return a scale from 0 with ticks at 1, 2 or 5 times a power of ten of the unit.

    A horizontal axis may have more ticks than a vertical one.
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
    """Return the largest unit that keeps a number of bytes at least one."""
    return next(
        ((name, size) for name, size in reversed(_UNITS) if nbytes >= size), _UNITS[0]
    )


def bytes_axis(
    high: float, start: float, stop: float, *, most_ticks: int | None = None
) -> tuple[Scale, str, int]:
    """Return a scale of bytes beyond `high`, its unit, and the unit's bytes."""
    unit, size = unit_of(high)
    scale = linear_scale(high * 1.06, start, stop, per_unit=size, most_ticks=most_ticks)
    return scale, unit, size


def reduce_to_columns(
    points: Sequence[tuple[float, float]], width: float
) -> list[tuple[float, float]]:
    """Reduce a step function to its maximum in each column of pixels.

    Points are (x, value from there on), ascending in x.
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
    """Return a staircase through coordinates as an SVG path."""
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


# Place labels beside their marks without overlaps.


_LINE = 11.0
"""Height of a line of labels."""

_LETTER = 5.6
"""Average width of a letter, rounded up."""

_FLIP = 15.0
"""Vertical shift that is as bad as moving a label to the other side of its mark."""

_MARK = 5.0
"""Half the width of a mark."""

_BELOW, _ABOVE = 15.0, -8.0
"""Offsets from a mark's middle to the base lines of labels right below and above it."""


@dataclass(frozen=True, slots=True)
class Label:
    """Text label at distance `gap` from a mark at `x`, with its baseline at `y`."""

    x: float
    y: float
    text: str
    gap: float = 8.0
    left: bool = False
    class_: str = "label"

    @property
    def span(self) -> tuple[float, float]:
        """Left and right edge."""
        width = len(self.text) * _LETTER
        if self.left:
            return self.x - self.gap - width, self.x - self.gap
        return self.x + self.gap, self.x + self.gap + width


def labels(
    wanted: Iterable[Label], frame: Frame, marks: Sequence[tuple[float, float]] = ()
) -> Iterator[Markup]:
    """Yield labels as elements, each as near to its mark as possible within the frame.

    Labels avoid `marks`, the middles of other marks, if possible.
    """
    for one in _place_labels(wanted, frame, marks):
        x = one.x - one.gap if one.left else one.x + one.gap
        class_ = f"{one.class_} end" if one.left else one.class_
        yield tag("text", one.text, class_=class_, x=x, y=one.y)


def _place_labels(
    wanted: Iterable[Label], frame: Frame, marks: Sequence[tuple[float, float]]
) -> list[Label]:
    """Move labels so that no two overlap, if possible."""
    placed: list[Label] = []
    for label in sorted(wanted, key=lambda one: one.y):
        places = [*_free_positions(label, placed, frame, marks)]
        best = min(
            places or _free_positions(label, placed, frame, ()),
            key=lambda one: abs(one.y - label.y) + _FLIP * (one.left != label.left),
            default=label,
        )
        placed.append(best)
    return placed


def _free_positions(
    label: Label,
    placed: Iterable[Label],
    frame: Frame,
    marks: Iterable[tuple[float, float]],
) -> Iterator[Label]:
    """Yield free positions of a label on either side of its mark."""
    for side in (label, replace(label, left=not label.left)):
        start, stop = side.span
        near = [one.y for one in placed if one.span[0] < stop and start < one.span[1]]
        if start < frame.left or stop > frame.right:
            continue
        under = [y for x, y in marks if start < x + _MARK and x - _MARK < stop]
        beside_names = (y + d for y in near for d in (-_LINE, _LINE))
        beside_marks = (y + d for y in under for d in (_ABOVE, _BELOW))
        for y in (side.y, *beside_names, *beside_marks):
            free = all(abs(y - other) >= _LINE - 1e-9 for other in near)
            free &= not any(_ABOVE < y - middle < _BELOW for middle in under)
            if free and frame.top <= y <= frame.bottom:
                yield replace(side, y=y)
