"""Arguments as callers give them, checked where they come in.

Every message says which argument it is, what was found, and what would work. A number
may be of any type that is one (NumPy's too); a text never is. Everywhere a value of
another kind is a `TypeError`, one out of range, empty or unknown a `ValueError`.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

__all__ = [
    "a_flag",
    "a_function",
    "a_number",
    "a_path",
    "a_text",
    "an_integer",
    "integers",
    "of_type",
    "one_of",
]

_LONGEST = 80
"""Characters of a value that a message shows."""


def an_integer(
    name: str, value: Any, least: int | None = None, most: int | None = None
) -> int:
    """A whole number."""
    try:
        number = operator.index(_no_text(value))
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, got {number}")
    return number


def integers(name: str, values: Any, least: int | None = None) -> tuple[int, ...]:
    """A tuple of whole numbers, from any sequence of them."""
    if isinstance(values, str | bytes | Mapping):
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}")
    try:
        items = tuple(values)
    except TypeError:
        raise TypeError(f"{name} must be a sequence, got {values!r}") from None
    return tuple(an_integer(f"{name}[{i}]", v, least) for i, v in enumerate(items))


def a_number(
    name: str,
    value: Any,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: bool = False,
    finite: bool = True,
) -> float:
    """A number, of a range that is closed but for `above`, where it is open below."""
    try:
        number = float(_no_text(value))
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    in_range = number > least if above else number >= least
    if not (in_range and number <= most) or (finite and math.isinf(number)):
        wanted = "finite"
        if least > -math.inf:
            wanted = f"{'above' if above else 'at least'} {least:g}"
        if most < math.inf:
            wanted += f"{' and' if least > -math.inf else ','} at most {most:g}"
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    return number


def _no_text(value: Any) -> Any:
    """A value, unless it is a text or a flag, which nobody means a number by."""
    if isinstance(value, bool | str | bytes | bytearray):
        raise TypeError
    return value


def a_flag(name: str, value: Any) -> bool:
    """True or False, nothing that is merely taken for it."""
    if isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool", "bool_"):  # NumPy's
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r}")


def a_text(name: str, value: Any) -> str:
    """A string that is not empty."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}")
    if not value:
        raise ValueError(f"{name} must not be empty")
    return value


def one_of(name: str, value: Any, choices: Iterable[str]) -> str:
    """One of some words."""
    valid = ", ".join(choices := tuple(choices))
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; choose one of: {valid}")
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; choose one of: {valid}")
    return value


def a_path(name: str, value: Any) -> Path:
    """A path, from a string or anything that stands for one."""
    path = fspath(value) if isinstance(value, str | PathLike) else None
    if not isinstance(path, str):
        raise TypeError(f"{name} must be a path, got {value!r}")
    if not path or "\0" in path:
        found = "empty" if not path else f"a text with a null character, {path!r}"
        raise ValueError(f"{name} must not be {found}")
    return Path(path)


def a_function(name: str, value: Any, wanted: str) -> None:
    """Refuse what cannot be called; `wanted` says in words with what."""
    if not callable(value):
        raise TypeError(f"{name} must be {wanted}, got {_shown(value)}")


def of_type(name: str, value: Any, kind: type | Sequence[type], wanted: str) -> None:
    """Refuse what is of another type; `wanted` says in words how to come by one."""
    kinds = (kind,) if isinstance(kind, type) else tuple(kind)
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, got {_shown(value)}")


def _shown(value: Any) -> str:
    """Return a value as a message shows it: by its type if it takes many words."""
    text = repr(value)
    return text if len(text) <= _LONGEST and "\n" not in text else f"{type(value)}"
