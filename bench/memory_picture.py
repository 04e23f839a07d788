"""Draw charts of speed against memory beside each other, as one SVG file."""

from collections.abc import Sequence
from importlib.resources import files

from mucudnn.report.svg import Child, Markup, marker, tag

_ACROSS = 3
_WIDTH, _HEIGHT, _GAP = 330.0, 236.0, 14.0
CHART = (_WIDTH, _HEIGHT)
_HEAD, _FOOT, _MARGIN = 24.0, 40.0, 12.0
_LEGEND_STEP = 200.0


def panels(
    title: str,
    charts: Sequence[tuple[str, Markup]],
    names: Sequence[str],
    strong: str,
) -> str:
    """Pictures beside and below each other, and the marks of their curves.

    Args:
        title: What they show.
        charts: Their names, and drawings of the size `CHART`.
        names: What the curves are called.
        strong: The one that stands out.
    """
    rows = -(-len(charts) // _ACROSS)
    width = _ACROSS * _WIDTH + (_ACROSS - 1) * _GAP
    panels_end = rows * (_HEAD + _HEIGHT + _GAP)
    content: list[Markup] = []
    for i, chart in enumerate(charts):
        row, column = divmod(i, _ACROSS)
        x, y = column * (_WIDTH + _GAP), row * (_HEAD + _HEIGHT + _GAP)
        content.append(placed(*chart, x, y, CHART))
    content += _legend(names, strong, panels_end + 10)
    return framed(title, content, width, panels_end + _FOOT)


def framed(title: str, content: Child, width: float, height: float) -> str:
    """A drawing of a size as a file of its own, with its style."""
    m = _MARGIN
    full = (width + 2 * m, height + 2 * m)
    return tag(
        "svg",
        tag("title", title),
        tag("style", Markup(_style())),
        tag("rect", class_="page", x=-m, y=-m, width=full[0], height=full[1], rx=10),
        content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"{-m:g} {-m:g} {full[0]:g} {full[1]:g}",
        width=full[0],
        height=full[1],
    )


def _style() -> str:
    sheets = (
        files("mucudnn.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("style.css", "memory.css")
    )
    font = 'svg { font-family: system-ui, "Segoe UI", Roboto, sans-serif; }'
    page = "svg .page { fill: var(--card); }"
    return "".join(sheets) + font + page


def placed(
    name: str, chart: Markup, x: float, y: float, size: tuple[float, float]
) -> Markup:
    """Return a chart of a size below its name, at a place in a larger drawing."""
    width, height = size
    moved = str(chart).replace(
        "<svg ", f'<svg x="0" y="{_HEAD:g}" width="{width:g}" height="{height:g}" ', 1
    )
    return tag(
        "g",
        tag("text", name, class_="row-name", x=8, y=14),
        Markup(moved),
        transform=f"translate({x:g} {y:g})",
    )


def _legend(names: Sequence[str], strong: str, top: float) -> list[Markup]:
    across = 5
    found = []
    for i, name in enumerate(names):
        x, y = 14 + (i % across) * _LEGEND_STEP, top + (i // across) * 18
        found.append(marker(i, x, y, filled=name == strong))
        found.append(tag("text", name, x=x + 9, y=y + 3.5))
    return found
