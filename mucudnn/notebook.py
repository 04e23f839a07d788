"""How plans and studies look in a notebook.

Values do not know the report that draws them: it is looked up when something is shown.
"""

from importlib import import_module

__all__ = ["drawn"]


def drawn(kind: str, value: object) -> str:
    """A value as HTML that needs nothing else: no script, no other file.

    Args:
        kind: Name of a function of `mucudnn.report.pages.notebook`.
        value: What it draws.
    """
    html: str = getattr(import_module("mucudnn.report.pages.notebook"), kind)(value)
    return html
