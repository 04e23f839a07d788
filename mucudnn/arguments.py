"""Validate arguments at public entry points.

Each message names the argument, the value found, and what is allowed. A number may be
of any numeric type (also NumPy's), but not text. A value of the wrong type is a
`TypeError`; one that is out of range, empty or unknown is a `ValueError`.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

_LONGEST = 80
"""Maximum characters of a value in a message."""


def check_integer(
    name: str, value: Any, least: int | None = None, most: int | None = None
) -> int:
    """Return an integer of a range."""
    try:
        number = operator.index(_reject_text(value))
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, got {number}")
    return number


def check_integers(name: str, values: Any, least: int | None = None) -> tuple[int, ...]:
    """Return a tuple of integers from any sequence of them."""
    if isinstance(values, str | bytes | Mapping):
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}")
    try:
        items = tuple(values)
    except TypeError:
        raise TypeError(f"{name} must be a sequence, got {values!r}") from None
    return tuple(check_integer(f"{name}[{i}]", v, least) for i, v in enumerate(items))


def check_number(
    name: str,
    value: Any,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: bool = False,
    finite: bool = True,
) -> float:
    """Return a float of a closed range; with `above`, it is open below."""
    try:
        number = float(_reject_text(value))
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    # Written so that NaN, which compares false with everything, is out of range.
    in_range = number > least if above else number >= least
    if not (in_range and number <= most) or (finite and math.isinf(number)):
        wanted = "finite"
        if least > -math.inf:
            wanted = f"{'above' if above else 'at least'} {least:g}"
        if most < math.inf:
            wanted += f"{' and' if least > -math.inf else ','} at most {most:g}"
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    return number


def _reject_text(value: Any) -> Any:
    """Raise for text and flags, which `float` and `index` would accept."""
    if isinstance(value, bool | str | bytes | bytearray):
        raise TypeError
    return value


def check_bool(name: str, value: Any) -> bool:
    """Return True or False; other truthy values are refused."""
    if isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool", "bool_"):  # NumPy's
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r}")


def check_text(name: str, value: Any) -> str:
    """Return a string that is not empty."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}")
    if not value:
        raise ValueError(f"{name} must not be empty")
    return value


def check_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """Return one of some words."""
    valid = ", ".join(choices := tuple(choices))
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; choose one of: {valid}")
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; choose one of: {valid}")
    return value


def check_path(name: str, value: Any) -> Path:
    """Return a path from a string or a path-like object."""
    path = fspath(value) if isinstance(value, str | PathLike) else None
    if not isinstance(path, str):
        raise TypeError(f"{name} must be a path, got {value!r}")
    if not path or "\0" in path:
        found = "empty" if not path else f"a text with a null character, {path!r}"
        raise ValueError(f"{name} must not be {found}")
    return Path(path)


def check_function(name: str, value: Any, wanted: str) -> None:
    """Refuse a value that is not callable; `wanted` describes the signature."""
    if not callable(value):
        raise TypeError(f"{name} must be {wanted}, got {_abbreviate(value)}")


def check_type(name: str, value: Any, kind: type | Sequence[type], wanted: str) -> None:
    """Refuse a value of another type; `wanted` describes a valid one."""
    kinds = (kind,) if isinstance(kind, type) else tuple(kind)
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, got {_abbreviate(value)}")


def _abbreviate(value: Any) -> str:
    """Return the `repr` of a value, or its type if that is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST and "\n" not in text else f"{type(value)}"
