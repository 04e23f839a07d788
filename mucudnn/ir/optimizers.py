"""Describe optimizers: their names and hyperparameters.

The conventions are PyTorch's. Weight decay applies to weights only, that is to
parameters with more than one axis, not to biases and scales of normalizations (He et
al. 2019, `Bag of Tricks`, section 3.1).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from mucudnn.arguments import a_flag, a_number, one_of

__all__ = [
    "OPTIMIZERS",
    "AdaGrad",
    "Adam",
    "Momentum",
    "Optimizer",
    "RmsProp",
    "Sgd",
    "optimizer_of",
    "parse_optimizer",
]

_SHARES = ("momentum", "beta1", "beta2", "alpha")


def _check(optimizer: Any) -> None:
    for field in fields(optimizer):
        value = getattr(optimizer, field.name)
        if field.type is bool:
            a_flag(field.name, value)
        else:
            a_number(field.name, value, 0, 1 if field.name in _SHARES else math.inf)


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
    chosen = OPTIMIZERS[one_of("optimizer", word, sorted(OPTIMIZERS))]
    if learning_rate is not None:
        chosen = replace(chosen, learning_rate=learning_rate)
    if weight_decay is not None:
        chosen = replace(chosen, weight_decay=weight_decay)
    return chosen


def optimizer_of(choice: Any) -> Optimizer:
    """Return an optimizer from an instance, its name, or its class or factory."""
    if isinstance(choice, str):
        return parse_optimizer(choice)
    made = choice() if callable(choice) else choice
    if not isinstance(made, Optimizer):
        valid = ", ".join(sorted(OPTIMIZERS))
        kinds = ", ".join(kind.__name__ for kind in Optimizer.__args__)
        raise TypeError(
            f"optimizer is {made!r}; choose one of: {valid}, or pass one of "
            f"mucudnn.optim: {kinds}"
        )
    return made
