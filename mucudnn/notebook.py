"""Render plans and studies in notebooks.

Values know no pages: `_repr_html_ = html_of` looks up their drawing, by their type,
among those of the notebook report when they are shown.
"""

from importlib import import_module


def html_of(value: object, *, whole: bool = False) -> str:
    """Return a value as self-contained HTML: a piece of a page, or a whole file."""
    draw = import_module("mucudnn.report.notebook").draw
    html: str = draw(value, whole=True) if whole else draw(value)
    return html
