"""Tables as text for terminals and pipes, and DeepBench's table.

In a terminal rich draws them; if it is narrow, less important columns are left out
instead of truncating all. In a pipe they are plain columns, two spaces apart, without
truncation and colour, for `grep`, `awk` and logs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TextIO

from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction
from mucudnn.ir.sizes import format_bytes, format_count
from mucudnn.studies.convolutions import Comparison, Limit, LimitSummary

_FASTER = 1.05
_NARROW = 110

MOST_EMPTY_ROWS = 3
"""Largest number of empty rows that a table shows; more become one line."""

_MOST_PLACES = 6
"""Largest number of layers that a note lists; further ones are counted."""

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
        empty: Index of a row without results -> short reason; see `fold_empty_rows`.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    empty: Mapping[int, str] = field(default_factory=dict)


def fold_empty_rows(table: Table) -> tuple[Table, str]:
    """Replace many rows without results by a line that counts them, with reasons.

    Returns the table without them and the line, which is empty if nothing was folded.
    """
    if len(table.empty) <= MOST_EMPTY_ROWS:
        return table, ""
    kept = [i for i in range(len(table.rows)) if i not in table.empty]
    folded = replace(
        table,
        rows=tuple(table.rows[i] for i in kept),
        strong=frozenset(new for new, i in enumerate(kept) if i in table.strong),
        empty={},
    )
    return folded, empty_text("rows", table.empty.values())


def empty_text(things: str, reasons: Iterable[str]) -> str:
    """Summarize as `9 rows without results are not listed: time limit (9)`."""
    counts = Counter(reasons)
    why = ", ".join(f"{reason} ({n})" for reason, n in counts.most_common())
    return f"{counts.total()} {things} without results are not listed: {why}"


def comparison_tables(comparison: Comparison) -> tuple[Table, ...]:
    """Return the tables of layers and of the summary."""
    rows: list[tuple[str, ...]] = []
    strong, empty = set(), {}
    for layer in comparison.layers:
        for outcome in layer.outcomes:
            if (outcome.speedup or 0.0) >= _FASTER:
                strong.add(len(rows))
            choice, figures = outcome.choice, (NOTHING,) * 5
            if choice is None:
                empty[len(rows)] = str(outcome.missing)
            else:
                figures = (
                    ms_text(choice.undivided_ms),
                    ms_text(choice.planned_ms),
                    speedup_text(outcome.speedup),
                    bytes_text(choice.plan.workspace),
                    plan_text(choice.plan),
                )
            limit = limit_text(outcome.limit)
            rows.append((layer.name, DIRECTIONS[layer.direction], limit, *figures))
    notes = _reasons(comparison)
    missing = comparison.asked - len(comparison.layers)
    if missing:
        notes.append(f"interrupted: {missing} of {comparison.asked} were not compared")
    columns = (
        *("layer", "direction", ">limit", ">undivided ms", ">planned ms", ">speed-up"),
        *(">workspace", "plan"),
    )
    layers = Table(
        *("", columns, tuple(rows), frozenset(strong), tuple(notes)),
        spare=("workspace", "undivided ms", "planned ms", "direction", "limit"),
        empty=empty,
    )
    return (layers, _summary(comparison))


def write_tables(tables: Sequence[Table], stream: TextIO) -> None:
    """Draw tables in a terminal, or print them plainly elsewhere."""
    tables = [
        replace(folded, notes=(line, *folded.notes)) if line else folded
        for folded, line in map(fold_empty_rows, tables)
    ]
    if not stream.isatty():
        stream.write("\n".join(_plain(table) for table in tables))
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(file=stream, highlight=False)
    for table in tables:
        shown, left_out = _fit_to_width(table, console.width)
        console.print(_rich(shown, console.width), "\n", sep="")
        if left_out:
            console.print(
                f"[dim]left out: {escape(', '.join(left_out))}; a wider terminal and a "
                "pipe show them[/dim]"
            )
        for note in table.notes:
            console.print(f"[dim]{escape(note)}[/dim]")


def _reasons(comparison: Comparison) -> list[str]:
    """Return one line per reason, with the layers it applies to."""
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
    return [f"{reason}: {places_text(places)}" for reason, places in found.items()]


def places_text(places: Sequence[str], most: int = _MOST_PLACES) -> str:
    """List the first places and count further ones."""
    more = len(places) - most
    return ", ".join([*places[:most], *([f"{more} more"] if more > 0 else [])])


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
    spare = ("smallest", "largest", "undivided ms", "planned ms")
    return Table(title, columns, rows, notes=notes, spare=spare)


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
    return sum(least for least, _ in _column_widths(table)) + len(table.columns) - 1


def _column_widths(table: Table) -> list[tuple[int, int]]:
    """Return the least and the usual width of each column."""
    widths = []
    for i, column in enumerate(table.columns):
        name = column.removeprefix(">")
        words = max(map(len, name.split()))
        cells = max((len(row[i]) for row in table.rows), default=0)
        wrapped = min(cells, _WRAPPED.get(name, cells))
        widths.append((max(words, wrapped), max(words, cells)))
    return widths


def _rich(table: Table, width: int) -> object:
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    narrow = width < _NARROW
    # Rich may shrink columns below their least width, and then cuts their cells.
    widths = _column_widths(table)
    padding = 0 if narrow else 2 * len(widths)
    left = max(0, width - _minimum_width(table) - padding)
    drawn = RichTable(
        box=box.SIMPLE_HEAD,
        title=escape(table.title) or None,
        title_justify="left",
        padding=(0, 0) if narrow else (0, 1),
        show_edge=False,
    )
    for column, (least, usual) in zip(table.columns, widths, strict=True):
        name = column.removeprefix(">")
        more = min(left, usual - least)
        left -= more
        drawn.add_column(
            escape(name.replace(" ", "\n")),
            justify="left" if name == column else "right",
            no_wrap=name not in _WRAPPED,
            width=least + more,
            overflow="fold",
        )
    for i, row in enumerate(table.rows):
        style = "bold green" if i in table.strong else None
        drawn.add_row(*map(escape, row), style=style)
    return drawn


# Formats of numbers, plans and problems, shared by all reports.


NOTHING = "–"

DIRECTIONS = {
    Direction.FORWARD: "forward",
    Direction.BACKWARD_DATA: "backward data",
    Direction.BACKWARD_FILTER: "backward filter",
}


def bytes_text(nbytes: int | None, *beside: int) -> str:
    """Format bytes such as `64 MiB`, whole numbers without decimals."""
    if nbytes is None:
        return NOTHING
    return format_bytes(nbytes, *beside).replace(".0 ", " ")


def limit_text(limit: Limit) -> str:
    """Format a limit such as `64 MiB`, or `64 MiB total`."""
    size = bytes_text(limit.nbytes)
    return f"{size} total" if limit.total else size


def ms_text(time_ms: float | None) -> str:
    """Format milliseconds with at least three significant digits."""
    if time_ms is None:
        return NOTHING
    if time_ms >= 100:
        return f"{time_ms:,.0f}"
    return f"{time_ms:#.3g}" if time_ms >= 0.001 else f"{time_ms:.1g}"


def compared_text(entry: LimitSummary) -> str:
    """Summarize as `1 of 15 layers compared; 14 not measured: time limit`."""
    missing = sum(n for _, n in entry.missing)
    text = f"{entry.layers} of {format_count(entry.layers + missing, 'layer')} compared"
    if not missing:
        return text
    what = "not measured" if entry.cut_short else "without a speed-up"
    several = len(entry.missing) > 1
    reasons = (f"{why} ({n})" if several else why for why, n in entry.missing)
    return f"{text}; {missing} {what}: {', '.join(reasons)}"


def speedup_text(speedup: float | None) -> str:
    """Format a speed-up such as `1.63×`."""
    return NOTHING if speedup is None else f"{speedup:.2f}×"


def runs(plan: ConvPlan) -> tuple[tuple[str, int, int], ...]:
    """Return runs of equal micro-batches: (algorithm, micro-batch, length)."""
    return tuple(
        (algo, batch, sum(1 for _ in same))
        for (algo, batch), same in groupby((s.algo, s.batch) for s in plan.steps)
    )


def plan_text(plan: ConvPlan | None) -> str:
    """Format a plan such as `8 × FFT(32)`: length of the run, micro-batch size."""
    if plan is None:
        return NOTHING
    parts = (
        f"{algo}({batch})" if times == 1 else f"{times} × {algo}({batch})"
        for algo, batch, times in runs(plan)
    )
    return " + ".join(parts)


def problem_text(problem: ConvProblem) -> str:
    """Format shapes and all parameters that differ from their defaults."""
    x = "×".join(map(str, problem.x_shape[1:]))
    w = "×".join(map(str, problem.w_shape[2:]))
    parts = [f"N = {problem.batch}", f"{x} → {problem.w_shape[0]}", f"{w} filters"]
    for word, values, usual in (
        ("padding", problem.padding, 0),
        ("stride", problem.stride, 1),
        ("dilation", problem.dilation, 1),
    ):
        if any(value != usual for value in values):
            same = len(set(values)) == 1
            text = str(values[0]) if same else "×".join(map(str, values))
            parts.append(f"{word} {text}")
    if problem.groups > 1:
        parts.append(f"{problem.groups} groups")
    return ", ".join([*parts, problem.dtype, problem.layout])


# Print results in DeepBench's format: one row per convolution, times in microseconds.
#
# Columns and their names are those of its `conv_bench`. DeepBench has no workspace
# limit; each limit has its own table.


_COLUMNS = (
    *("w", "h", "c", "n", "k", "f_w", "f_h", "pad_w", "pad_h"),
    *("stride_w", "stride_h", "precision"),
    *("fwd_time", "bwd_inputs_time", "bwd_params_time", "total_time"),
)

_PRECISION = {
    "float16": "half",
    "bfloat16": "bfloat16",
    "float32": "float",
    "float64": "double",
}

_NOT_TIMED = "-"


def check_deepbench(problems: Iterable[ConvProblem]) -> None:
    """Refuse problems that DeepBench's columns cannot describe."""
    for problem in problems:
        rank = len(problem.x_shape) - 2
        if rank != 2 or problem.groups != 1 or set(problem.dilation) != {1}:
            raise ValueError(
                "DeepBench's table has columns for ungrouped, undilated 2-D "
                f"convolutions only, this one is {rank}-D with {problem.groups} "
                f"groups and dilation {problem.dilation}; use the format 'table'"
            )


def deepbench_tables(comparison: Comparison) -> tuple[Table, ...]:
    """Return one table of planned times per limit."""
    check_deepbench(layer.problem for layer in comparison.layers)
    several = len(comparison.limits) > 1
    return tuple(
        Table(
            f"# workspace limit {limit_text(limit)}" if several else "",
            tuple(f">{column}" for column in _COLUMNS),
            tuple(_rows(comparison, i)),
        )
        for i, limit in enumerate(comparison.limits)
    )


def _rows(comparison: Comparison, index: int) -> Iterable[tuple[str, ...]]:
    """Yield shapes and times in microseconds, a row per layer."""
    times: dict[tuple[str, ConvProblem], dict[Direction, float | None]] = {}
    for layer in comparison.layers:
        key = (layer.name, layer.problem.with_direction(Direction.FORWARD))
        choice = layer.outcomes[index].choice
        planned = None if choice is None else choice.planned_ms
        times.setdefault(key, {})[layer.direction] = planned
    for (_, problem), by_direction in times.items():
        known = [ms for ms in by_direction.values() if ms is not None]
        total = sum(known) if len(known) == len(by_direction) else None
        cells = (
            _NOT_TIMED if time_ms is None else f"{time_ms * 1e3:.0f}"
            for time_ms in (*map(by_direction.get, Direction), total)
        )
        (n, c, h, w), (k, _, r, s) = problem.x_shape, problem.w_shape
        pads, strides = problem.padding[::-1], problem.stride[::-1]
        sizes = (w, h, c, n, k, s, r, *pads, *strides)
        yield (*map(str, sizes), _PRECISION[problem.dtype], *cells)
