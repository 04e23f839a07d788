"""Describe initial values of parameters; the runtime draws them.

Fan-in is the number of inputs that one output sums over, fan-out the number of outputs
that one input reaches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mucudnn.arguments import check_bool, check_number


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant initial value."""

    value: float

    def __post_init__(self) -> None:
        check_number("value", self.value)


@dataclass(frozen=True, slots=True)
class Normal:
    """A normal distribution around zero (AlexNet: standard deviation 0.01)."""

    std: float

    def __post_init__(self) -> None:
        check_number("std", self.std, 0)


@dataclass(frozen=True, slots=True)
class HeNormal:
    """A normal distribution with variance 2 / fan (He et al. 2015, equation 10)."""

    fan_out: bool = False

    def __post_init__(self) -> None:
        check_bool("fan_out", self.fan_out)

    def std(self, shape: Sequence[int]) -> float:
        """Return the standard deviation for a weight of this shape."""
        return math.sqrt(2 / fans(shape)[1 if self.fan_out else 0])


@dataclass(frozen=True, slots=True)
class XavierUniform:
    """A uniform distribution, variance 2 / (fan-in + fan-out) (Glorot 2010, eq. 16)."""

    def limit(self, shape: Sequence[int]) -> float:
        """Return the largest absolute value for a weight of this shape."""
        return math.sqrt(6 / sum(fans(shape)))


@dataclass(frozen=True, slots=True)
class LecunUniform:
    """A uniform distribution, variance scale / fan-in (LeCun et al. 1998, 4.6).

    Caffe's `xavier` has scale 1, Torch's default 1/3.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        check_number("scale", self.scale, 0)

    def limit(self, shape: Sequence[int]) -> float:
        """Return the largest absolute value for a weight of this shape."""
        return math.sqrt(3 * self.scale / fans(shape)[0])


@dataclass(frozen=True, slots=True)
class CopyOf:
    """A copy of a parameter in another type or layout, never saved itself.

    Changing the parameter changes its copy.
    """

    parameter: str


Initializer = Constant | Normal | HeNormal | XavierUniform | LecunUniform


def fans(shape: Sequence[int]) -> tuple[int, int]:
    """Return fan-in and fan-out of a weight (K, C, *kernel) or (features, inputs)."""
    taps = math.prod(shape[2:])
    return max(1, shape[1] * taps), max(1, shape[0] * taps)
