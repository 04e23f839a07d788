"""Convolution layers to measure, and their text form.

Letters are the field's: n, c, d, h, w for the input, k, t, r, s for the filters (t
deep, r high, s wide). The letters given determine the number of spatial axes: w and s
alone make a layer 1-D, h and r add the second axis, d and t the third.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.sizes import parse_integer

__all__ = [
    "PROBLEM_KEYS",
    "Layer",
    "parse_problem",
    "problem_from_fields",
    "short_name",
]

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
    values = _integers(fields, labels or {})
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
        raise ValueError(f"{values['c']} channels do not divide into {groups} groups")
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


def _integers(fields: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, int]:
    values = {}
    for key, text in fields.items():
        if key in _TEXT:
            continue
        label = labels.get(key, key)
        least = 0 if key.startswith("pad") else 1
        try:
            values[key] = parse_integer(text, least=least, most=_MOST)
        except ValueError as e:
            raise ValueError(f"{label} is {e}") from None
    return values


def _per_axis(values: Mapping[str, int], step: str, axes: Sequence[str]) -> list[int]:
    absent = [axis for axis in ("d", "h", "w") if axis not in axes]
    stray = [f"{step}_{axis}" for axis in absent if f"{step}_{axis}" in values]
    if stray:
        raise ValueError(
            f"{stray[0]} is given, but the input has only the axes {', '.join(axes)}"
        )
    default = values.get(step, _STEPS[step])
    return [values.get(f"{step}_{axis}", default) for axis in axes]
