"""HTML and SVG elements as text that is escaped automatically.

`Markup` is text that is safe to put into a page; other text is escaped when it becomes
the child of an element. The output is also well-formed XML.
"""

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

__all__ = ["Child", "Markup", "flat", "tag"]

Child: TypeAlias = "str | Iterable[Child]"
"""Text, an element, or any nesting of them."""

_VOID = frozenset({"meta", "link", "br", "hr", "img"})


class Markup(str):
    """Text that needs no escaping."""

    __slots__ = ()

    def __html__(self) -> str:
        """Return the text itself, as templates expect."""
        return self


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
    if name in _VOID:
        return Markup(f"<{opening}/>")
    content = "".join(flat(children))
    return Markup(f"<{opening}>{content}</{name}>")


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
