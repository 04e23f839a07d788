"""Building blocks of all pages: the file itself, cards, tables, legends.

Their HTML is in `templates/` and the style sheets; charts are `drawing`s.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from mucudnn.ir.sizes import format_count
from mucudnn.report.svg import Child, Markup, box, drawing, flat
from mucudnn.report.text import (
    DIRECTIONS,
    Table,
    bytes_text,
    fold_empty_rows,
    ms_text,
    speedup_text,
)

SHEETS = ("style.css", "memory.css")
"""Style sheets of pages with charts of a step."""

_LONG = dict.fromkeys(("plan", "reason"), "text plan")
"""Columns whose cells may have several lines."""


def page(title: str, sheets: Sequence[str], *content: Child) -> str:
    """Return a whole file as text, in the style of `sheets`."""
    return _template("page.html.j2").render(
        title=title,
        styles=Markup(styles(*sheets)),
        content=Markup("".join(flat(content))),
        script=Markup(_file("tips.js")),
    )


def styles(*sheets: str) -> str:
    """Return concatenated style sheets of this package."""
    return "".join(map(_file, sheets))


def header(title: str, facts: str, warnings: Iterable[str]) -> Markup:
    """Return the title, facts and warnings of a page."""
    return _part("header", title, facts, list(warnings))


def interrupted(done: int, asked: int) -> list[str]:
    """Return a warning if a study of convolutions did not finish."""
    warning = f"Interrupted: {done} of {asked} convolutions are finished."
    return [warning] if done < asked else []


def table(
    shown: Table, *, captioned: bool = False, faint: Collection[int] = ()
) -> Markup:
    """Return a table of text in a box that scrolls, without its notes.

    It has its title if `captioned`; rows with indices in `faint` have a faint style.
    """
    shown, folded = fold_empty_rows(shown)
    columns = [
        {
            "name": column.removeprefix(">"),
            "class_": None if column.startswith(">") else _LONG.get(column, "text"),
        }
        for column in shown.columns
    ]
    rows = [
        {
            "cells": row,
            "class_": "best" if i in shown.strong else "unfit" if i in faint else None,
        }
        for i, row in enumerate(shown.rows)
    ]
    return _part("table", columns, rows, shown.title if captioned else "", folded)


def legend(entries: Iterable[tuple[Child, str]], name: str | None = None) -> Markup:
    """Return the meanings of marks (12 × 12); `name` is the list's accessible name."""
    items = [(drawing(12, 12, "", mark), text) for mark, text in entries]
    return _part("legend", items, name)


def swatches(kinds: Mapping[str, str]) -> Markup:
    """Return a legend of colours from classes in the style sheet to meanings."""
    return legend(
        (box(f"key {kind}", 1, 1, (10, 10), rx=2), text) for kind, text in kinds.items()
    )


def rendered(name: str, **values: object) -> Markup:
    """Render a template, which may use the formats and tables of all pages."""
    return Markup(_template(f"{name}.html.j2").render(**values))


def _part(name: str, *values: object) -> Markup:
    """Render a macro of the parts' template."""
    return Markup(getattr(_template("parts.html.j2").module, name)(*values))


def _file(name: str) -> str:
    return files("mucudnn.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _template(name: str) -> Template:
    environment = Environment(
        loader=PackageLoader("mucudnn.report"),
        autoescape=True,
        undefined=StrictUndefined,
    )
    environment.globals |= {
        "DIRECTIONS": DIRECTIONS,
        "bytes_text": bytes_text,
        "format_count": format_count,
        "ms_text": ms_text,
        "speedup_text": speedup_text,
        "swatches": swatches,
        "table": table,
    }
    return environment.get_template(name)
