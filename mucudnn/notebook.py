"""Render plans and studies in notebooks.

Values do not import the report that draws them; it is looked up when they are shown.
"""

from importlib import import_module


def html_of(kind: str, value: object) -> str:
    """Return a value as self-contained HTML, by a function of the notebook report."""
    html: str = getattr(import_module("mucudnn.report.notebook"), kind)(value)
    return html
