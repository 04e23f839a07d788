"""Accessible drawings, and the marks of algorithms."""

from mucudnn.report.markup import Child, Markup, tag

__all__ = ["COLOURS", "box", "drawing", "marker"]

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
