"""Describe learning rates as functions of the step.

Every schedule may begin with a linear warm-up: step s of `warmup_steps` runs at
(s + 1) / warmup_steps of the scheduled rate (Goyal et al. 2017, section 2.2).
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from mucudnn.arguments import a_number, an_integer, integers, of_type
from mucudnn.ir.sizes import parse_integer

__all__ = [
    "ConstantRate",
    "CosineRate",
    "LearningRate",
    "RateChoice",
    "StepRate",
    "parse_learning_rate",
    "rate_of",
]


class LearningRate(Protocol):
    """A learning rate for every step."""

    def at(self, step: int, total_steps: int) -> float:
        """Return the rate of step `step`, counted from 0, of `total_steps`."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantRate:
    """A constant learning rate."""

    base: float
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check(self.base, self.warmup_steps)

    def at(self, step: int, total_steps: int) -> float:
        """Return the rate of step `step`, counted from 0, of `total_steps`."""
        del total_steps
        return self.base * _warmup_factor(step, self.warmup_steps)


@dataclass(frozen=True, slots=True)
class StepRate:
    """A learning rate that is multiplied by `gamma` at each milestone, a step."""

    base: float
    milestones: tuple[int, ...]
    gamma: float = 0.1
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check(self.base, self.warmup_steps)
        a_number("gamma", self.gamma, 0)
        milestones = integers("milestones", self.milestones, least=0)
        object.__setattr__(self, "milestones", milestones)

    def at(self, step: int, total_steps: int) -> float:
        """Return the rate of step `step`, counted from 0, of `total_steps`."""
        del total_steps
        passed = sum(step >= milestone for milestone in self.milestones)
        return self.base * self.gamma**passed * _warmup_factor(step, self.warmup_steps)


@dataclass(frozen=True, slots=True)
class CosineRate:
    """Half a cosine from the base rate to `final` (Loshchilov & Hutter 2017).

    The decay begins after the warm-up and would reach `final` one step after the last.
    """

    base: float
    final: float = 0.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check(self.base, self.warmup_steps)
        a_number("final", self.final, 0)

    def at(self, step: int, total_steps: int) -> float:
        """Return the rate of step `step`, counted from 0, of `total_steps`."""
        if step < self.warmup_steps:
            return self.base * _warmup_factor(step, self.warmup_steps)
        length = max(1, total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / length)
        share = (1 + math.cos(math.pi * done)) / 2
        return self.final + (self.base - self.final) * share


def parse_learning_rate(
    text: str, base: float, *, warmup_steps: int = 0, milestone_unit: int = 1
) -> LearningRate:
    """Parse a schedule: "constant", "cosine" or "step:30,60,90".

    Args:
        text: The schedule.
        base: Rate after the warm-up.
        warmup_steps: Steps of linear warm-up.
        milestone_unit: Steps per unit of a milestone, such as those of an epoch.

    Raises:
        ValueError: The text is not a schedule, or a number is out of range.
    """
    _check(base, warmup_steps)
    an_integer("milestone_unit", milestone_unit, least=1)
    of_type("a learning-rate schedule", text, str, "a string such as 'cosine'")
    kind, _, rest = text.partition(":")
    if kind == "constant" and not rest:
        return ConstantRate(base, warmup_steps)
    if kind == "cosine" and not rest:
        return CosineRate(base, warmup_steps=warmup_steps)
    words = rest.split(",")
    if kind == "step":
        with suppress(ValueError):
            milestones = tuple(parse_integer(word) * milestone_unit for word in words)
            if list(milestones) == sorted(set(milestones)):
                return StepRate(base, milestones, warmup_steps=warmup_steps)
    raise ValueError(
        f"{text!r} is no learning-rate schedule; it is constant, cosine, or step: "
        "with ascending milestones, such as step:30,60,90"
    )


RateChoice = Callable[[int], float] | LearningRate | float | str
"""Types accepted for a learning rate."""


def rate_of(choice: Any, base: float) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, without a known last step.

    Args:
        choice: A function of the step, a number, a schedule or its text ("step:30,60"
            counts steps); None selects `base`.
        base: The optimizer's own rate.

    Raises:
        ValueError: The text is not a schedule, the number is out of range, or the
            schedule depends on the number of steps.
        TypeError: The choice has another type.
    """
    if choice is None:
        choice = base
    if isinstance(choice, str):
        choice = parse_learning_rate(choice, base)
    if isinstance(choice, CosineRate):
        raise ValueError(  # noqa: TRY004
            f"{choice!r} depends on how many steps there will be; pass a function of "
            "the step: lambda step: rate.at(step, total_steps)"
        )
    if isinstance(choice, ConstantRate | StepRate):
        schedule = choice
        return lambda step: schedule.at(step, 0)
    if callable(choice):
        return lambda step: a_number(f"learning_rate({step})", choice(step), 0)
    try:
        rate = a_number("learning_rate", choice, 0)
    except TypeError:
        raise TypeError(
            "learning_rate must be a number, a function from a step to one, or a "
            f"schedule such as 'step:300,600', got {choice!r}"
        ) from None
    return lambda step: rate


def _check(base: float, warmup_steps: int) -> None:
    a_number("the learning rate", base, 0)
    if an_integer("warmup_steps", warmup_steps) < 0:
        raise ValueError(f"warm-up takes at least 0 steps, got {warmup_steps}")


def _warmup_factor(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
