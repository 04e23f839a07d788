"""What all pages are made of: one file that needs no other, cards, tables, legends."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.resources import files

from mucudnn.report.markup import Child, Markup, tag
from mucudnn.report.svg import box, drawing
from mucudnn.report.text import Table

__all__ = [
    "big_card",
    "card",
    "header",
    "legend",
    "page",
    "styles",
    "swatches",
    "table",
]

_LONG = dict.fromkeys(("plan", "reason"), "text plan")
"""Columns whose cells take several lines."""


def page(title: str, sheets: Sequence[str], *content: Child) -> str:
    """A whole file, as text, in the style of `sheets`."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} · mucudnn"),
        tag("style", Markup(styles(*sheets))),
    )
    text = tag("html", head, tag("body", content), lang="en")
    return f"<!DOCTYPE html>\n{text}\n"


def styles(*sheets: str) -> str:
    """Style sheets of this folder, one after another."""
    folder = files("mucudnn.report")
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in sheets)


def header(title: str, facts: str, warnings: Iterable[str]) -> Markup:
    """What a page is about, and what to be careful about."""
    return tag(
        "header",
        tag("p", "mucudnn", class_="brand"),
        tag("h1", title),
        tag("p", facts, class_="facts"),
        (tag("p", warning, class_="warn") for warning in warnings),
    )


def card(head: str, *content: Child) -> Markup:
    """A box with a line above."""
    return tag("div", tag("p", head, class_="limit-head"), content, class_="card")


def big_card(head: str, big: str, small: str, foot: str, *between: Child) -> Markup:
    """A box with one figure in large type, and what it is of."""
    figure = tag("p", big, tag("small", small), class_="big")
    return card(head, figure, between, tag("p", foot, class_="range"))


def table(
    shown: Table, *, captioned: bool = False, faint: Collection[int] = ()
) -> Markup:
    """A table of text in a box that scrolls, its notes left out.

    Args:
        shown: Columns that are aligned to the right are numbers.
        captioned: With its title above.
        faint: Indices of rows that stand back.
    """
    classes = [
        None if column.startswith(">") else _LONG.get(column, "text")
        for column in shown.columns
    ]
    head = (
        tag("th", column.removeprefix(">"), class_=class_ and "text", scope="col")
        for column, class_ in zip(shown.columns, classes, strict=True)
    )
    body = (
        tag(
            "tr",
            (tag("td", cell, class_=c) for cell, c in zip(row, classes, strict=True)),
            class_="best" if i in shown.strong else "unfit" if i in faint else None,
        )
        for i, row in enumerate(shown.rows)
    )
    drawn = tag(
        "table",
        tag("caption", shown.title) if captioned else [],
        tag("thead", tag("tr", head)),
        tag("tbody", body),
    )
    return tag("div", drawn, class_="scroll")


def legend(entries: Iterable[tuple[Child, str]], name: str | None = None) -> Markup:
    """What marks stand for.

    Args:
        entries: (mark, twelve wide and high; its meaning).
        name: Of the list, for who does not see it.
    """
    items = (tag("li", drawing(12, 12, "", mark), text) for mark, text in entries)
    return tag("ul", items, class_="legend", aria_label=name)


def swatches(kinds: Mapping[str, str]) -> Markup:
    """A legend of colours: class in the style sheet -> meaning."""
    return legend(
        (box(f"key {kind}", 1, 1, (10, 10), rx=2), text) for kind, text in kinds.items()
    )
