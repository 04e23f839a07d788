"""Optimizers and learning rates of a `Trainer`.

Examples:
    >>> from mucudnn import optim
    >>> optim.Adam(1e-3, weight_decay=1e-2, decoupled=True).learning_rate
    0.001
    >>> rate = optim.CosineRate(0.1, warmup_steps=100)
    >>> [round(rate.at(step, 1000), 3) for step in (0, 99, 550, 1000)]
    [0.001, 0.1, 0.05, 0.0]
    >>> optim.parse_learning_rate("step:30,60", 0.1)
    StepRate(base=0.1, milestones=(30, 60), gamma=0.1, warmup_steps=0)

A trainer takes an optimizer or its name, and a learning rate as a number, a text, a
schedule, or a function of the step:

    Trainer(
        network,
        tuner=Tuner(),
        optimizer=optim.Momentum(nesterov=True),
        learning_rate=lambda step: rate.at(step, 1000),
    )
"""

from mucudnn.ir.optimizers import (
    OPTIMIZERS,
    AdaGrad,
    Adam,
    ConstantRate,
    CosineRate,
    DynamicLossScale,
    LearningRate,
    Momentum,
    Optimizer,
    RmsProp,
    Sgd,
    StepRate,
    parse_learning_rate,
    parse_optimizer,
)

__all__ = [
    "OPTIMIZERS",
    "AdaGrad",
    "Adam",
    "ConstantRate",
    "CosineRate",
    "DynamicLossScale",
    "LearningRate",
    "Momentum",
    "Optimizer",
    "RmsProp",
    "Sgd",
    "StepRate",
    "parse_learning_rate",
    "parse_optimizer",
]
