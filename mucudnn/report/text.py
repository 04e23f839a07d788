"""Print tables to a terminal or a pipe.

In a terminal rich draws them; if it is narrow, less important columns are left out
instead of truncating all. In a pipe they are plain columns, two spaces apart, without
truncation and colour, for `grep`, `awk` and logs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from mucudnn.report.words import (
    DIRECTIONS,
    NOTHING,
    bytes_text,
    compared_text,
    limit_text,
    ms_text,
    plan_text,
    speedup_text,
)
from mucudnn.studies.outcome import Comparison, LayerResult, Outcome

__all__ = ["Table", "comparison_tables", "write_tables"]

_FASTER = 1.05
_NARROW = 110
_WRAPPED = {
    "layer": 7,
    "direction": 8,
    "limit": 7,
    "plan": 12,
    "device": 20,
    "first choice": 13,
    "best that fits": 13,
    "best at the mini-batch": 12,
}
"""Columns that may be wrapped, and their minimum widths."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a header, with one cell per column.

    Attributes:
        columns: Header; a leading `>` aligns a column to the right.
        strong: Indices of highlighted rows.
        notes: Lines below.
        spare: Columns that a narrow terminal leaves out, the first one first.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()


def comparison_tables(comparison: Comparison) -> tuple[Table, ...]:
    """Return the tables of layers and of the summary."""
    rows: list[tuple[str, ...]] = []
    strong = set()
    for layer in comparison.layers:
        for outcome in layer.outcomes:
            if (outcome.speedup or 0.0) >= _FASTER:
                strong.add(len(rows))
            rows.append(_row(layer, outcome))
    notes = _reasons(comparison)
    missing = comparison.asked - len(comparison.layers)
    if missing:
        notes.append(f"interrupted: {missing} of {comparison.asked} were not compared")
    columns = (
        *("layer", "direction", ">limit", ">undivided ms", ">planned ms", ">speed-up"),
        *(">workspace", "plan"),
    )
    layers = Table("", columns, tuple(rows), frozenset(strong), tuple(notes))
    return (layers, _summary(comparison))


def write_tables(tables: Sequence[Table], stream: TextIO) -> None:
    """Draw tables in a terminal, or print them plainly elsewhere."""
    if not stream.isatty():
        stream.write("\n".join(_plain(table) for table in tables))
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(file=stream, highlight=False)
    for table in tables:
        shown, left_out = _fit_to_width(table, console.width)
        console.print(_rich(shown, narrow=console.width < _NARROW), "\n", sep="")
        if left_out:
            console.print(
                f"[dim]left out: {escape(', '.join(left_out))}; a wider terminal and a "
                "pipe show them[/dim]"
            )
        for note in table.notes:
            console.print(f"[dim]{escape(note)}[/dim]")


def _row(layer: LayerResult, outcome: Outcome) -> tuple[str, ...]:
    head = (layer.name, DIRECTIONS[layer.direction], limit_text(outcome.limit))
    choice = outcome.choice
    if choice is None:
        return (*head, *(NOTHING,) * 5)
    return (
        *head,
        ms_text(choice.undivided_ms),
        ms_text(choice.planned_ms),
        speedup_text(outcome.speedup),
        bytes_text(choice.plan.workspace),
        plan_text(choice.plan),
    )


def _reasons(comparison: Comparison) -> list[str]:
    """Return one line per reason, with all layers it applies to."""
    found: dict[str, list[str]] = {}
    for layer in comparison.layers:
        where = f"{layer.name} {DIRECTIONS[layer.direction]}"
        shared = {outcome.reason for outcome in layer.outcomes}
        if len(shared) == 1 and (reason := shared.pop()) is not None:
            found.setdefault(reason, []).append(where)
            continue
        for outcome in layer.outcomes:
            if outcome.reason is not None:
                there = f"{where} within {limit_text(outcome.limit)}"
                found.setdefault(outcome.reason, []).append(there)
    return [f"{reason}: {', '.join(places)}" for reason, places in found.items()]


def _summary(comparison: Comparison) -> Table:
    """Return one row per limit, without a mean if layers lack time."""
    rows = tuple(
        (
            limit_text(entry.limit),
            f"{entry.layers} of {comparison.asked}",
            *(
                (NOTHING,) * 3
                if entry.cut_short
                else map(speedup_text, (entry.geomean, entry.best, entry.worst))
            ),
            ms_text(entry.undivided_ms if entry.layers else None),
            ms_text(entry.planned_ms if entry.layers else None),
        )
        for entry in comparison.summary
    )
    columns = (
        *(">limit", ">compared", ">geomean", ">largest", ">smallest"),
        *(">undivided ms", ">planned ms"),
    )
    notes = tuple(
        f"{limit_text(entry.limit)}: {compared_text(entry)}"
        for entry in comparison.summary
        if entry.missing
    )
    title = f"{comparison.backend}: {comparison.fingerprint}"
    return Table(title, columns, rows, notes=notes)


def _plain(table: Table) -> str:
    titles = [column.removeprefix(">") for column in table.columns]
    lines = [titles, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]

    def aligned(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(cells, widths, table.columns, strict=True)
        )
        return "  ".join(padded).rstrip()

    text = [table.title] if table.title else []
    text += [aligned(line) for line in lines]
    text += table.notes
    return "\n".join(text) + "\n"


def _fit_to_width(table: Table, width: int) -> tuple[Table, list[str]]:
    """Return a table that fits the width, and the names of columns left out."""
    left_out: list[str] = []
    for name in table.spare:
        if _minimum_width(table) <= width:
            break
        titles = [column.removeprefix(">") for column in table.columns]
        at = titles.index(name)
        table = replace(
            table,
            columns=table.columns[:at] + table.columns[at + 1 :],
            rows=tuple(row[:at] + row[at + 1 :] for row in table.rows),
        )
        left_out.append(name)
    return table, left_out


def _minimum_width(table: Table) -> int:
    total = len(table.columns) - 1
    for i, column in enumerate(table.columns):
        name = column.removeprefix(">")
        words = max(map(len, name.split()))
        cells = max((len(row[i]) for row in table.rows), default=0)
        total += max(words, min(cells, _WRAPPED.get(name, cells)))
    return total


def _rich(table: Table, *, narrow: bool) -> object:
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    drawn = RichTable(
        box=box.SIMPLE_HEAD,
        title=escape(table.title) or None,
        title_justify="left",
        padding=(0, 0) if narrow else (0, 1),
        show_edge=False,
    )
    for column in table.columns:
        name = column.removeprefix(">")
        drawn.add_column(
            escape(name.replace(" ", "\n")),
            justify="left" if name == column else "right",
            no_wrap=name not in _WRAPPED,
            min_width=_WRAPPED.get(name),
            overflow="fold",
        )
    for i, row in enumerate(table.rows):
        style = "bold green" if i in table.strong else None
        drawn.add_row(*map(escape, row), style=style)
    return drawn
