"""Drawings that say what they show, and the marks of algorithms."""

from mucudnn.report.markup import Child, Markup, tag

__all__ = ["COLOURS", "box", "drawing", "marker"]

COLOURS = 10
"""Colour classes `a0` … in the style sheet."""


def drawing(width: float, height: float, label: str, *children: Child) -> Markup:
    """An SVG that scales with the page and says what it shows."""
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
    """A rectangle with its top left corner at (x, y), `size` being (width, height)."""
    width, height = size
    said = _titled(title)
    return tag("rect", said, class_=class_, x=x, y=y, width=width, height=height, rx=rx)


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
        _titled(title),
        d=shapes[index % len(shapes)](),
        class_=f"mark a{index % COLOURS}" + ("" if filled else " hollow"),
    )


def _titled(title: str) -> Child:
    """What an element says when it is pointed at, if anything."""
    return tag("title", title) if title else []
