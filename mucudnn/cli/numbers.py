"""Numbers on the command line: plain decimal digits, of a range that is always bounded.

click's own types take whatever Python reads (`1_000`, other scripts' digits, four
hundred digits, infinity), and what then computes with it fails, or never ends.
"""

import math
import re
from collections.abc import Callable

import click

from mucudnn.ir.sizes import parse_integer

__all__ = ["MOST", "MOST_IMAGES", "count", "real"]

MOST = 2**31 - 1
"""Of images, steps, layers, sides: what libraries count in 32 bits."""

MOST_IMAGES = 2**20
"""Of a mini-batch: planning looks at each size of a part, and would not end."""

_REAL = re.compile(r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?\s*", re.I | re.A)


def count(least: int = 1, most: int = MOST) -> Callable[[str | int], int]:
    """A type of option: an integer from `least` to `most`."""

    def integer(text: str | int) -> int:
        try:
            return parse_integer(str(text), least=least, most=most)
        except ValueError as e:
            raise click.BadParameter(f"the value is {e}") from None

    return integer


def real(
    least: float = 0.0, most: float = math.inf, *, beyond: bool = False, of: str = ""
) -> Callable[[str | float], float]:
    """A type of option: a finite number.

    Args:
        least: The smallest.
        most: The largest.
        beyond: Whether the least itself is none of it.
        of: What it is a number of, for messages.
    """

    def number(text: str | float) -> float:
        value = float(text) if _REAL.fullmatch(str(text)) else math.nan
        within = least < value <= most if beyond else least <= value <= most
        if not (within and math.isfinite(value)):
            above = f"above {least:g}" if beyond else f"from {least:g}"
            upto = "" if most == math.inf else f" up to {most:g}"
            unit = of and f" of {of}"
            raise click.BadParameter(f"{text!r} is not a number{unit} {above}{upto}")
        return value

    return number
