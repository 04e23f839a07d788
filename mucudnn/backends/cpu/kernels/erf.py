"""The error function on arrays, which NumPy lacks.

`erfc(x) exp(x²)` falls smoothly from 1 to 0. In s = (2 - x) / (2 + x) one polynomial
approximates it for all relevant x. It is fitted once, at Chebyshev's points, to values
from `math.erfc` and, where that product would lose digits, from the continued fraction
(Abramowitz and Stegun, 7.1.14).
"""

import functools
import math
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev

__all__ = ["erf", "normal_cdf", "normal_density"]

_FARTHEST = 6.2  # beyond, 1 - erf(x) is below half a unit in the last place of float64

_LOWEST = (2 - _FARTHEST) / (2 + _FARTHEST)
_DEGREE = {"float32": 8, "float64": 26}


def erf(x: Any) -> Any:
    """Compute the error function, within 1e-15 (float64) or 5e-7 (float32)."""
    magnitude = np.abs(x)
    tail = _erfc(magnitude)
    np.subtract(1, tail, out=tail)
    return np.copysign(tail, x, out=tail)


def normal_cdf(x: Any) -> Any:
    """Compute the probability that a standard normal variable is below x."""
    values = erf(x * math.sqrt(0.5))
    values += 1
    values *= 0.5
    return values


def normal_density(x: Any) -> Any:
    """Compute exp(-x²/2) / sqrt(2 pi)."""
    values = np.square(x)
    values *= -0.5
    np.exp(values, out=values)
    values *= 1 / math.sqrt(2 * math.pi)
    return values


def _erfc(x: Any) -> Any:
    """Compute the complementary error function of x >= 0; overwrite x."""
    np.minimum(x, _FARTHEST, out=x)
    u = np.add(x, 2)
    np.divide(4, u, out=u)
    u -= 1  # s = 4 / (2 + x) - 1
    u -= _LOWEST
    u *= 2 / (1 - _LOWEST)
    u -= 1
    highest, *others = _coefficients(_DEGREE[x.dtype.name])
    values = np.full_like(u, highest)
    for coefficient in others:
        values *= u
        values += coefficient
    np.square(x, out=x)
    np.negative(x, out=x)
    np.exp(x, out=x)
    values *= x
    return values


@functools.lru_cache
def _coefficients(degree: int) -> tuple[float, ...]:
    """Return the polynomial in u, highest power first; u = 1 is x = 0."""
    # Cosines of the angles: Chebyshev's recurrence would lose two digits.
    angles = (np.arange(degree + 1) + 0.5) * (math.pi / (degree + 1))
    points = _LOWEST + (np.cos(angles) + 1) * (1 - _LOWEST) / 2
    values = np.array([_scaled_erfc(2 * (1 - s) / (1 + s)) for s in points])
    waves = np.cos(np.outer(np.arange(degree + 1), angles))
    series = waves @ values * (2 / (degree + 1))
    series[0] /= 2
    return tuple(float(c) for c in chebyshev.cheb2poly(series)[::-1])


def _scaled_erfc(x: float) -> float:
    if x < 1.5:
        return math.erfc(x) * math.exp(x * x)
    fraction = x
    for n in range(200, 0, -1):
        fraction = x + n / 2 / fraction
    return 1 / (math.sqrt(math.pi) * fraction)
