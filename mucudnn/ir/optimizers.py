"""Optimizers, learning-rate schedules and loss scales as data.

The conventions are PyTorch's. Weight decay applies to weights only, that is to
parameters with more than one axis, not to biases and scales of normalizations (He et
al. 2019, `Bag of Tricks`, section 3.1).
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Protocol

from mucudnn.arguments import (
    check_bool,
    check_choice,
    check_integer,
    check_integers,
    check_number,
    check_type,
)
from mucudnn.ir.sizes import parse_integer

_SHARES = ("momentum", "beta1", "beta2", "alpha")


def _check(optimizer: Any) -> None:
    for field in fields(optimizer):
        value = getattr(optimizer, field.name)
        if field.type is bool:
            check_bool(field.name, value)
        else:
            check_number(field.name, value, 0, 1 if field.name in _SHARES else math.inf)


@dataclass(frozen=True, slots=True)
class Sgd:
    """Stochastic gradient descent: w -= lr * g."""

    learning_rate: float = 0.1
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class Momentum:
    """Gradient descent with momentum: m = mu * m + g; w -= lr * m.

    Nesterov's form steps along g + mu * m instead (Sutskever et al. 2013).
    """

    learning_rate: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class Adam:
    """Adaptive moment estimation (Kingma & Ba 2015).

    Decoupled weight decay makes it AdamW (Loshchilov & Hutter 2019).
    """

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class AdaGrad:
    """Gradient steps divided by the root of the sum of squares (Duchi et al. 2011)."""

    learning_rate: float = 1e-2
    eps: float = 1e-10
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class RmsProp:
    """Gradient steps divided by the root of a running mean of squares (Hinton 2012)."""

    learning_rate: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self)


Optimizer = Sgd | Momentum | Adam | AdaGrad | RmsProp

OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        "sgd": Sgd(),
        "momentum": Momentum(),
        "nesterov": Momentum(nesterov=True),
        "adam": Adam(),
        "adamw": Adam(weight_decay=1e-2, decoupled=True),
        "adagrad": AdaGrad(),
        "rmsprop": RmsProp(),
    }
)
"""Optimizers by name, with their default hyperparameters."""


def parse_optimizer(
    word: str, *, learning_rate: float | None = None, weight_decay: float | None = None
) -> Optimizer:
    """Return the optimizer of a name, with defaults for hyperparameters not given.

    Raises:
        ValueError: The name is unknown, or a number is negative.
    """
    chosen = OPTIMIZERS[check_choice("optimizer", word, sorted(OPTIMIZERS))]
    if learning_rate is not None:
        chosen = replace(chosen, learning_rate=learning_rate)
    if weight_decay is not None:
        chosen = replace(chosen, weight_decay=weight_decay)
    return chosen


def optimizer_of(choice: Any) -> Optimizer:
    """Return an optimizer from an instance, its name, or its class or factory."""
    if isinstance(choice, str):
        return parse_optimizer(choice)
    # A class or a factory makes its default; an instance is taken as configured.
    made = choice() if callable(choice) else choice
    if not isinstance(made, Optimizer):
        valid = ", ".join(sorted(OPTIMIZERS))
        kinds = ", ".join(kind.__name__ for kind in Optimizer.__args__)
        raise TypeError(
            f"optimizer is {made!r}; choose one of: {valid}, or pass one of "
            f"mucudnn.optim: {kinds}"
        )
    return made


# Describe learning rates as functions of the step.
#
# Every schedule may begin with a linear warm-up: step s of `warmup_steps` runs at (s +
# 1) / warmup_steps of the scheduled rate (Goyal et al. 2017, section 2.2).


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
        _check_rate(self.base, self.warmup_steps)

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
        _check_rate(self.base, self.warmup_steps)
        check_number("gamma", self.gamma, 0)
        milestones = check_integers("milestones", self.milestones, least=0)
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
        _check_rate(self.base, self.warmup_steps)
        check_number("final", self.final, 0)

    def at(self, step: int, total_steps: int) -> float:
        """Return the rate of step `step`, counted from 0, of `total_steps`."""
        if step < self.warmup_steps:
            return self.base * _warmup_factor(step, self.warmup_steps)
        # `final` is reached one step after the last, so that the last step still
        # learns.
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
    _check_rate(base, warmup_steps)
    check_integer("milestone_unit", milestone_unit, least=1)
    check_type("a learning-rate schedule", text, str, "a string such as 'cosine'")
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
        f"unknown learning-rate schedule {text!r}; choose constant, cosine, or step: "
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
    """
    if choice is None:
        choice = base
    if isinstance(choice, str):
        choice = parse_learning_rate(choice, base)
    if isinstance(choice, CosineRate):
        raise ValueError(  # noqa: TRY004
            f"{choice!r} depends on the total number of steps; pass a function of the "
            "step: lambda step: rate.at(step, total_steps)"
        )
    if isinstance(choice, ConstantRate | StepRate):
        schedule = choice
        return lambda step: schedule.at(step, 0)
    if callable(choice):
        return lambda step: check_number(f"learning_rate({step})", choice(step), 0)
    try:
        rate = check_number("learning_rate", choice, 0)
    except TypeError:
        raise TypeError(
            "learning_rate must be a number, a function from a step to one, or a "
            f"schedule such as 'step:300,600', got {choice!r}"
        ) from None
    return lambda step: rate


def _check_rate(base: float, warmup_steps: int) -> None:
    check_number("the learning rate", base, 0)
    check_integer("warmup_steps", warmup_steps, least=0)


def _warmup_factor(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


# Describe loss scaling: a fixed factor, or one that adapts to overflows.
#
# Small gradients underflow in a narrow type, large ones overflow. The loss is
# multiplied by a factor before its gradients are computed, and the updates divide by
# it. A dynamic factor stays as large as possible: it is halved when a gradient
# overflows, that step changes no weight, and it is doubled after many steps without an
# overflow (Micikevicius et al. 2018, section 3.2; the defaults are those of PyTorch's
# GradScaler).


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
        check_number("the loss scale's initial value", self.initial, 0, above=True)
        check_number("the loss scale's growth", self.growth, 1)
        check_number("the loss scale's backoff", self.backoff, 0, above=True)
        if self.backoff >= 1:
            raise ValueError(
                f"the loss scale's backoff must be below 1, got {self.backoff}"
            )
        check_integer("the loss scale's interval", self.interval, least=1)

    def range_in(self, dtype: str) -> tuple[float, float]:
        """Return the least and the largest scale that a type can represent."""
        least, most = _LEAST, _MOST.get(dtype, 2.0**127)
        if not least <= self.initial <= most:
            raise ValueError(
                f"the loss is {dtype}: its scale must start from {least:g} to "
                f"{most:g}, not from {self.initial:g}"
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
    return check_number("the loss scale", choice, 0, above=True, finite=False)
