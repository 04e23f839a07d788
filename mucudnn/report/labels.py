"""Place labels beside their marks without overlaps."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mucudnn.report.axes import Frame
from mucudnn.report.markup import Markup, tag

__all__ = ["Label", "labels"]

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
    """A name beside a mark at `x`, `gap` apart; `y` is the base line of the text."""

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
