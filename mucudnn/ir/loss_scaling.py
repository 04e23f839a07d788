"""Describe loss scaling: a fixed factor, or one that adapts to overflows.

Small gradients underflow in a narrow type, large ones overflow. The loss is multiplied
by a factor before its gradients are computed, and the updates divide by it. A dynamic
factor stays as large as possible: it is halved when a gradient overflows, that step
changes no weight, and it is doubled after many steps without an overflow (Micikevicius
et al. 2018, section 3.2; the defaults are those of PyTorch's GradScaler).
"""

from dataclasses import dataclass

from mucudnn.arguments import a_number, an_integer

__all__ = ["DYNAMIC", "DynamicLossScale", "loss_scale_of"]

DYNAMIC = "dynamic"
"""Name of the dynamic scale with default settings."""

_MOST = {"float16": 2.0**15}
"""Largest power of two of a type; 2**127 for all others."""

_LEAST = 2.0**-14
"""Least normal number of float16: a gradient that still overflows here is broken."""


@dataclass(frozen=True, slots=True)
class DynamicLossScale:
    """A loss scale that adapts to overflows.

    Attributes:
        growth: Factor after `interval` steps without an overflow.
        backoff: Factor after a step with an overflow.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        a_number("the loss scale's initial value", self.initial, 0, above=True)
        a_number("the loss scale's growth", self.growth, 1)
        a_number("the loss scale's backoff", self.backoff, 0, above=True)
        if self.backoff >= 1:
            raise ValueError(
                f"the loss scale's backoff must be below 1, got {self.backoff}"
            )
        an_integer("the loss scale's interval", self.interval, least=1)

    def range_in(self, dtype: str) -> tuple[float, float]:
        """Return the least and the largest scale that a type can represent."""
        least, most = _LEAST, _MOST.get(dtype, 2.0**127)
        if not least <= self.initial <= most:
            raise ValueError(
                f"the loss is {dtype}: its scale starts from {least:g} to {most:g}, "
                f"not from {self.initial:g}"
            )
        return least, most


def loss_scale_of(
    choice: "DynamicLossScale | float | str | None", usual: float
) -> "DynamicLossScale | float":
    """Return the loss scale for an argument: a number, `dynamic`, or settings.

    None selects `usual`. Other words and numbers that are not positive raise a
    `ValueError`, other types a `TypeError`.
    """
    if choice is None:
        return usual
    if isinstance(choice, DynamicLossScale):
        return choice
    if isinstance(choice, str):
        if choice == DYNAMIC:
            return DynamicLossScale()
        raise ValueError(
            f'the loss scale is a positive number or "{DYNAMIC}", not {choice!r}'
        )
    return a_number("the loss scale", choice, 0, above=True, finite=False)
