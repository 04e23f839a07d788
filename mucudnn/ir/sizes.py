"""Parse and format sizes in bytes: `64MiB`, `1.5 GiB`, `4096`.

Binary units (KiB, MiB …) are powers of 1024, decimal ones (kB, MB …) of 1000, as in IEC
80000-13; a bare letter (`64M`, `8G`) is binary, as in most tools that take sizes of
memory. Only ASCII digits are accepted, and sizes are bounded: Python's integers are
not, but the code that computes with them is.
"""

import operator
import re
from decimal import Decimal, localcontext

LARGEST = 2**63 - 1
"""Largest number of elements or steps."""

_MOST_BYTES = 2**80
_LEAST_BYTES = 1024
"""Smaller sizes, but for zero, are fractions or lack their unit."""

_PREFIXES = "kmgtp"
_UNITS = (
    {"": 1, "b": 1}
    | {p + end: 1024**i for end in ("ib", "") for i, p in enumerate(_PREFIXES, start=1)}
    | {f"{p}b": 1000**i for i, p in enumerate(_PREFIXES, start=1)}
)
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", re.ASCII)
_INTEGER = re.compile(r"\s*[-+]?[0-9]+\s*", re.ASCII)
_DIGITS = len(str(LARGEST))
_FACTOR = len(str(max(_UNITS.values())))


def format_bytes(nbytes: int, *beside: int) -> str:
    """Format bytes in the largest binary unit that keeps the number at least one.

    Digits are added until sizes that are printed `beside` differ in print.
    """
    others = {other for other in beside if other != nbytes}
    for digits in (1, 2, 3, 4):
        text = _rounded(nbytes, digits)
        if text not in {_rounded(other, digits) for other in others}:
            return text
    return f"{nbytes} bytes"


def _rounded(nbytes: int, digits: int) -> str:
    if abs(nbytes) > _MOST_BYTES:
        return f"{Decimal(nbytes) / 1024**5:.1e} PiB"
    size, unit = float(abs(nbytes)), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        # 1023.95 would print as 1024.0, which the next unit says better.
        if size < (1024 if unit == "B" else 1024 - 0.5 * 0.1**digits):
            break
        size, unit = size / 1024, larger
    sign = "-" if nbytes < 0 else ""
    return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.{digits}f} {unit}"


def exact_bytes(nbytes: int) -> str:
    """Format bytes rounded and exactly: `1.7 MiB (1774592 bytes)`, or `358 bytes`."""
    exact = f"{nbytes} bytes"
    return exact if nbytes < 1024 else f"{format_bytes(nbytes)} ({exact})"


def format_count(number: int, one: str, several: str = "") -> str:
    """Format a number of things: `1 step`, or `2 steps`; `several` if not by an s."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def parse_bytes(size: str | int) -> int:
    """Return a size in whole bytes, rounded down; integers are bytes."""
    if not isinstance(size, str):
        try:
            nbytes = operator.index(size)
        except TypeError:
            raise TypeError(
                f"a size must be a string or an integer, got {size!r}"
            ) from None
        if isinstance(size, bool):
            raise TypeError(f"a size must be a string or an integer, got {size!r}")
        if nbytes < 0:
            raise ValueError(f"a size must not be negative, got {size}")
        return _bounded(nbytes, "the size")
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(
            f"{size!r} is not a size; write a non-negative number of bytes with or "
            "without a unit: 4096, 64MiB, 1.5GiB, 8 MB"
        )
    number, unit = match.groups()
    if unit.lower() not in _UNITS:
        raise ValueError(
            f"{size!r} has the unknown unit {unit!r}; choose one of: B, KiB, MiB, GiB, "
            "TiB, PiB (powers of 1024), kB, MB, GB, TB, PB (powers of 1000)"
        )
    if not unit:
        refuse_fraction(float(number), repr(size))
    with localcontext(prec=len(number) + _FACTOR):  # enough to be exact
        return _bounded(Decimal(number) * _UNITS[unit.lower()], repr(size))


def refuse_fraction(nbytes: float, name: str) -> None:
    """Refuse a number of bytes that was meant as a fraction, or with a unit.

    Raises:
        ValueError: It is above zero and below 1024.
    """
    if 0 < nbytes < _LEAST_BYTES:
        raise ValueError(
            f"{name} is less than 1 KiB; sizes are in bytes, not a fraction of the "
            "memory: write 8GiB, 512MiB or a number of bytes"
        )


def parse_integer(text: str, *, least: int = 0, most: int = LARGEST) -> int:
    """Parse decimal digits; the `ValueError`'s message completes "… is"."""
    if _INTEGER.fullmatch(text) is None:
        raise ValueError(f"{text!r}, not an integer")
    # Python itself refuses to read thousands of digits; these are too many in any case.
    digits = text.strip().lstrip("+-").lstrip("0")[: _DIGITS + 1]
    value = int(digits or "0") * (-1 if text.strip().startswith("-") else 1)
    if value < least:
        raise ValueError(f"{text.strip()}; the least is {least}")
    if value > most:
        raise ValueError(f"{text.strip()}; the most is {most}")
    return value


def _bounded(nbytes: int | Decimal, name: str) -> int:
    whole = int(nbytes)
    if whole > _MOST_BYTES:
        raise ValueError(
            f"{name} is more than any machine has; the maximum is 2**80 bytes"
        )
    return whole
