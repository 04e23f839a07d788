"""Loss scaling as data: by which factor, and how it follows what overflows.

Small gradients are zero in a narrow type, large ones infinite. The loss is multiplied
by a factor before its gradients are computed, and the updates divide by it. A dynamic
factor is as large as it can be: it is halved when a gradient overflows, that step
changes no weight, and it is doubled after many steps without (Micikevicius et al. 2018,
section 3.2; the defaults are those of PyTorch's GradScaler).
"""

from dataclasses import dataclass

from mucudnn.arguments import a_number, an_integer

__all__ = ["DYNAMIC", "DynamicLossScale", "loss_scale_of"]

DYNAMIC = "dynamic"
"""The word for a dynamic scale with the usual settings."""

_MOST = {"float16": 2.0**15}
"""Largest power of two of a type; of the others 2**127, as float32's."""

_LEAST = 2.0**-14
"""Below it float16 has no normal numbers: a gradient that still overflows is broken."""


@dataclass(frozen=True, slots=True)
class DynamicLossScale:
    """A loss scale that follows what overflows.

    Attributes:
        initial: What it starts from.
        growth: What it is multiplied by after `interval` steps without an overflow.
        backoff: What it is multiplied by after a step with one.
        interval: Steps.

    Raises:
        ValueError: A number is out of range.
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
        """The least and the largest scale that a type holds.

        Raises:
            ValueError: The initial one is not among them.
        """
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
    """The loss scale of an argument: a number, the word `dynamic`, or settings.

    Args:
        choice: What was asked for.
        usual: What None stands for.

    Raises:
        ValueError: It is another word, or not positive.
        TypeError: It is something else.
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
