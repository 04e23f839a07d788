"""Sizes in bytes, as people write them: `64MiB`, `1.5 GiB`, `8 MB`, `4096`.

Binary units (KiB, MiB …) are powers of 1024, decimal ones (kB, MB …) of 1000, as IEC
80000-13 has it. A bare `64M` is refused: it means both.
"""

import operator
import re
from decimal import Decimal

__all__ = ["exact_bytes", "format_bytes", "parse_bytes"]

_PREFIXES = "kmgtp"
_UNITS = (
    {"": 1, "b": 1}
    | {f"{p}ib": 1024**i for i, p in enumerate(_PREFIXES, start=1)}
    | {f"{p}b": 1000**i for i, p in enumerate(_PREFIXES, start=1)}
)
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", re.ASCII)


def format_bytes(nbytes: int) -> str:
    """Bytes in the largest binary unit that keeps the number at least one."""
    size, unit = float(abs(nbytes)), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        # 1023.95 would print as 1024.0, which the next unit says better.
        if size < (1024 if unit == "B" else 1023.95):
            break
        size, unit = size / 1024, larger
    sign = "-" if nbytes < 0 else ""
    return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.1f} {unit}"


def exact_bytes(nbytes: int) -> str:
    """Bytes as they are read, and to the last one: `1.7 MiB (1774592 bytes)`."""
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"


def parse_bytes(size: str | int) -> int:
    """A size in whole bytes, rounded down; an integer is taken as bytes.

    Raises:
        ValueError: The text is empty, negative, not a number, or has an unknown unit.
        TypeError: `size` is neither text nor an integer.
    """
    if not isinstance(size, str):
        try:
            nbytes = operator.index(size)
        except TypeError:
            raise TypeError(f"a size is text or an integer, got {size!r}") from None
        if nbytes < 0:
            raise ValueError(f"a size cannot be negative, got {size}")
        return nbytes
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
    return int(Decimal(number) * _UNITS[unit.lower()])
