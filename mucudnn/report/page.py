"""What all pages are made of: one file that needs no other, cards, tables, legends."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files

from mucudnn.report.markup import Child, Markup, tag
from mucudnn.report.svg import drawing

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


def page(title: str, sheets: Sequence[str], *content: Child) -> str:
    """A whole file, as text.

    Args:
        title: Of the window.
        sheets: Names of style sheets.
        content: Of the body.
    """
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
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    classes: Mapping[str, str],
    *,
    caption: str | None = None,
    row_class: Callable[[int], str | None] = lambda row: None,
) -> Markup:
    """Rows under a header, in a box that scrolls.

    Args:
        columns: Header.
        rows: One cell a column.
        classes: Column -> class of its cells; numbers have none.
        caption: A line above.
        row_class: Index of a row -> its class.
    """
    of = [classes.get(column) for column in columns]
    head = (
        tag("th", column, class_=class_ and "text", scope="col")
        for column, class_ in zip(columns, of, strict=True)
    )
    body = (
        tag(
            "tr",
            (tag("td", cell, class_=c) for cell, c in zip(row, of, strict=True)),
            class_=row_class(i),
        )
        for i, row in enumerate(rows)
    )
    drawn = tag(
        "table",
        [] if caption is None else tag("caption", caption),
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
        (tag("rect", class_=f"key {kind}", x=1, y=1, width=10, height=10, rx=2), text)
        for kind, text in kinds.items()
    )
