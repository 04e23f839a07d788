"""Read layers from a CSV file in any of three dialects.

The dialects are DeepBench's (columns by position, with or without a header), that of
µ-cuDNN's benchmark files (`source,W,H,C_in,N,C_out,kernel_w,…`) and ours (any of
`COLUMNS`, in any order). Published files disagree on the order of filter sizes; here r
and `filter_h` are the height, s and `filter_w` the width.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mucudnn.ir.sizes import parse_integer
from mucudnn.suites.layer import PROBLEM_KEYS, Layer, problem_from_fields, short_name

__all__ = ["COLUMNS", "read_layers", "read_layers_file"]

COLUMNS = ("name", *PROBLEM_KEYS, "count", "set", "application")
"""Names of columns; `_ALIASES` has those of other projects."""

_ALIASES = {
    "batch": "n",
    "c_in": "c",
    "c_out": "k",
    **{
        f"{word}_{axis}": letter
        for word in ("filter", "kernel", "f")
        for axis, letter in (("w", "s"), ("h", "r"), ("d", "t"))
    },
    "source": "name",
}
_DEEPBENCH = (
    *("w", "h", "c", "n", "k", "s", "r"),
    *("pad_w", "pad_h", "stride_w", "stride_h"),
)
_MOST_TIMES = 2**31 - 1


def read_layers_file(path: str | Path) -> tuple[Layer, ...]:
    """Read all layers of a CSV file; unnamed ones get its name and their shape.

    Raises:
        ValueError: The file is no valid table; names file, line and column.
        OSError: The file cannot be read.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 text: {e}") from e
    return read_layers(text.splitlines(keepends=True), path.stem, str(path))


def read_layers(lines: Iterable[str], stem: str, where: str) -> tuple[Layer, ...]:
    """Read all layers of a CSV text.

    Unnamed layers are named after `stem`; messages call the text `where`.

    Raises:
        ValueError: The text is no valid table; names line and column.
    """
    layers: list[Layer] = []
    columns: dict[str, str] = {}
    by_position = False
    reader = csv.reader(lines, skipinitialspace=True)
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if not any(cells) or cells[0].startswith("#"):
                continue
            at = f"{where}:{reader.line_num}"
            if not columns:
                first = cells[: len(_DEEPBENCH)]  # a row of numbers has no header
                by_position = len(first) == len(_DEEPBENCH) and all(
                    cell.isascii() and cell.lstrip("-").isdigit() for cell in first
                )
                if not by_position:
                    columns = _header(cells, at)
                    continue
                columns = {key: key for key in _DEEPBENCH}
            if by_position:
                cells = cells[: len(columns)]
            layers.append(_layer(cells, columns, at, f"{stem}/{len(layers) + 1}"))
    except csv.Error as e:
        raise ValueError(f"{where}:{reader.line_num}: not CSV: {e}") from e
    if not layers:
        raise ValueError(f"{where} has no layers; a row needs at least n,c,w,k,s")
    return _distinct(layers, stem)


def _header(cells: Sequence[str], at: str) -> dict[str, str]:
    """Return key -> name in the file, column by column."""
    columns: dict[str, str] = {}
    for label in cells:
        key = _ALIASES.get(label.lower(), label.lower())
        if key not in COLUMNS:
            raise ValueError(
                f"{at}: unknown column {label!r}; known are {', '.join(COLUMNS)} "
                f"(and {', '.join(_ALIASES)}), or, without a header, "
                f"{','.join(_DEEPBENCH)} by position"
            )
        if key in columns:
            raise ValueError(f"{at}: two columns for {key!r} in {','.join(cells)}")
        columns[key] = label
    return columns


def _layer(
    cells: Sequence[str], columns: Mapping[str, str], at: str, fallback: str
) -> Layer:
    if len(cells) != len(columns):
        raise ValueError(
            f"{at}: {len(cells)} cells for {len(columns)} columns "
            f"({','.join(columns.values())})"
        )
    row = {key: cell for key, cell in zip(columns, cells, strict=True) if cell}
    labels = {key: f"column {label!r}" for key, label in columns.items()}
    try:
        count = _count(row.pop("count", "1"))
        problem = problem_from_fields(
            {key: cell for key, cell in row.items() if key in PROBLEM_KEYS}, labels
        )
    except ValueError as e:
        raise ValueError(f"{at}: {e}") from e
    name = row.get("name") or f"{fallback}:{short_name(problem)}"
    return Layer(name, problem, count)


def _count(text: str) -> int:
    try:
        return parse_integer(text, least=1, most=_MOST_TIMES)
    except ValueError:
        raise ValueError(
            f"column 'count' is {text!r}, not an integer from 1 to {_MOST_TIMES}"
        ) from None


def _distinct(layers: Sequence[Layer], stem: str) -> tuple[Layer, ...]:
    """Replace names that occur twice (a column of applications) by shapes."""
    seen = Counter(layer.name for layer in layers)
    return tuple(
        layer
        if seen[layer.name] == 1
        else replace(layer, name=f"{stem}/{i}:{short_name(layer.problem)}")
        for i, layer in enumerate(layers, start=1)
    )
