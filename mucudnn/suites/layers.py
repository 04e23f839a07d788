"""Layers of a benchmark suite, and how they are read from text and CSV files.

Letters are the field's: n, c, d, h, w for the input, k, t, r, s for the filters (t
deep, r high, s wide). The letters given determine the number of spatial axes: w and s
alone make a layer 1-D, h and r add the second axis, d and t the third.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.sizes import parse_integer

_AXES = (("d", "t"), ("h", "r"), ("w", "s"))
"""(input letter, filter letter) of each axis, depth first."""

_STEPS = {"pad": 0, "stride": 1, "dilation": 1}
"""Option for all axes or for one -> its default."""

_MOST = 2**31 - 1  # libraries count in 32 bits
_TEXT = ("dtype", "layout")

PROBLEM_KEYS = (
    *("n", "c", "d", "h", "w", "k", "t", "r", "s"),
    *(f"{step}{axis}" for step in _STEPS for axis in ("", "_d", "_h", "_w")),
    *("groups", *_TEXT),
)
"""All keys of a problem's text form."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A named convolution and its number of occurrences in the network."""

    name: str
    problem: ConvProblem
    count: int = 1


def parse_problem(text: str) -> ConvProblem:
    """Parse `n=256,c=64,h=27,w=27,k=192,r=5,s=5,pad=2` as a forward problem.

    Raises:
        ValueError: A key is unknown, missing or given twice, or a value is no integer;
            the message quotes the text and lists the valid keys.
    """
    fields: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ValueError(f"problem {text!r}: {part!r} is not of the form key=value")
        if key not in PROBLEM_KEYS:
            raise ValueError(
                f"problem {text!r}: unknown key {key!r}; "
                f"valid keys: {', '.join(PROBLEM_KEYS)}"
            )
        if key in fields:
            raise ValueError(f"problem {text!r}: {key!r} is given twice")
        fields[key] = value
    try:
        return problem_from_fields(fields)
    except ValueError as e:
        raise ValueError(f"problem {text!r}: {e}") from e


def problem_from_fields(
    fields: Mapping[str, str], labels: Mapping[str, str] | None = None
) -> ConvProblem:
    """Return the forward problem of the texts given for `PROBLEM_KEYS`.

    `labels` has the names of keys in messages, where they differ.

    Raises:
        ValueError: A key is missing or a value is not valid.
    """
    values = {}
    for key, text in fields.items():
        if key not in _TEXT:
            least = 0 if key.startswith("pad") else 1
            try:
                values[key] = parse_integer(text, least=least, most=_MOST)
            except ValueError as e:
                raise ValueError(f"{(labels or {}).get(key, key)} is {e}") from None
    given = [i for i, pair in enumerate(_AXES[:2]) if values.keys() & {*pair}]
    axes = _AXES[min(given, default=2) :]
    inputs, filters = [i for i, _ in axes], [f for _, f in axes]
    keys = ("n", "c", *inputs, "k", *filters)
    if missing := [key for key in keys if key not in values]:
        raise ValueError(
            f"{', '.join(missing)} missing; a {len(keys) // 2 - 1}-D convolution needs "
            f"{', '.join(keys)}"
        )
    groups = values.get("groups", 1)
    if groups < 1 or values["c"] % groups:
        raise ValueError(
            f"{values['c']} channels cannot be divided into {groups} groups"
        )
    return ConvProblem(
        direction=Direction.FORWARD,
        x_shape=(values["n"], values["c"], *(values[i] for i in inputs)),
        w_shape=(values["k"], values["c"] // groups, *(values[f] for f in filters)),
        stride=_per_axis(values, "stride", inputs),
        padding=_per_axis(values, "pad", inputs),
        dilation=_per_axis(values, "dilation", inputs),
        groups=groups,
        dtype=fields.get("dtype", "float32"),
        layout=fields.get("layout", "NCHW"),
    )


def short_name(problem: ConvProblem) -> str:
    """Return input, filters and kernel, width first: `112x112x64-128-3x3`."""
    image = "x".join(str(size) for size in reversed(problem.x_shape[2:]))
    kernel = "x".join(str(size) for size in reversed(problem.w_shape[2:]))
    return f"{image}x{problem.x_shape[1]}-{problem.w_shape[0]}-{kernel}"


def _per_axis(values: Mapping[str, int], step: str, axes: Sequence[str]) -> list[int]:
    absent = [axis for axis in ("d", "h", "w") if axis not in axes]
    stray = [f"{step}_{axis}" for axis in absent if f"{step}_{axis}" in values]
    if stray:
        raise ValueError(
            f"{stray[0]} is given, but the input has only these axes: {', '.join(axes)}"
        )
    default = values.get(step, _STEPS[step])
    return [values.get(f"{step}_{axis}", default) for axis in axes]


# Read layers from a CSV file in any of three dialects.
#
# The dialects are DeepBench's (columns by position, with or without a header), that of
# µ-cuDNN's benchmark files (`source,W,H,C_in,N,C_out,kernel_w,…`) and ours (any of
# `COLUMNS`, in any order). Published files disagree on the order of filter sizes; here
# r and `filter_h` are the height, s and `filter_w` the width.


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


def read_layers_file(path: str | Path) -> tuple[Layer, ...]:
    """Read all layers of a CSV file; unnamed layers are named by file and shape.

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
                f"{at}: unknown column {label!r}; known columns are "
                f"{', '.join(COLUMNS)} (and {', '.join(_ALIASES)}), or, without a "
                f"header, {','.join(_DEEPBENCH)} by position"
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
    text = row.pop("count", "1")
    try:
        count = parse_integer(text, least=1, most=_MOST)
    except ValueError:
        raise ValueError(
            f"{at}: column 'count' is {text!r}, not an integer from 1 to {_MOST}"
        ) from None
    try:
        problem = problem_from_fields(
            {key: cell for key, cell in row.items() if key in PROBLEM_KEYS}, labels
        )
    except ValueError as e:
        raise ValueError(f"{at}: {e}") from e
    name = row.get("name") or f"{fallback}:{short_name(problem)}"
    return Layer(name, problem, count)


def _distinct(layers: Sequence[Layer], stem: str) -> tuple[Layer, ...]:
    """Replace names that occur twice (a column of applications) by shapes."""
    seen = Counter(layer.name for layer in layers)
    return tuple(
        layer
        if seen[layer.name] == 1
        else replace(layer, name=f"{stem}/{i}:{short_name(layer.problem)}")
        for i, layer in enumerate(layers, start=1)
    )
