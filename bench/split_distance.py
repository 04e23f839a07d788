"""How far gradients of a step in parts are from the unsplit one's, and from exact ones.

In float32 two steps that add up in another order, or whose convolutions were measured
to be best by another algorithm, differ in the last bits; a value ahead of a ReLU that
rounding moves over zero, or a window whose two largest values change places, then
lets a whole gradient through or not. One such value is enough for 1e-4 of a filter's
gradient. So the two are held against the same step in float64 as well: parts are as
exact as the whole if both are as far from it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.split_running import OPTIMIZER, steps_of
from mucudnn.ir.graph import Graph
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["distances", "exact_step", "gradient_distance"]

_VANISHING = 1e-3
"""Of the longest gradient: what is shorter should be zero."""


def gradient_distance(
    wanted: Mapping[str, Any], found: Mapping[str, Any]
) -> dict[str, Any]:
    """How far gradients of two first steps are apart, relative to the first ones.

    One that is all but zero, such as that of a bias ahead of batch norm, is nothing but
    rounding: it is held against a thousandth of the longest.

    Returns:
        Of all parameters together, the median and the largest of single ones, and whose
        that is.
    """
    pairs = {
        name: (gradient.astype("f8"), found["gradients"][name].astype("f8"))
        for name, gradient in wanted["gradients"].items()
    }
    apart = np.array([np.linalg.norm(other - one) for one, other in pairs.values()])
    lengths = np.array([np.linalg.norm(one) for one, _ in pairs.values()])
    each = apart / np.maximum(lengths, _VANISHING * lengths.max())
    worst = int(np.argmax(each))
    return {
        "all": float(np.linalg.norm(apart) / np.linalg.norm(lengths)),
        "median": float(np.median(each)),
        "largest": float(each[worst]),
        "largest_of": list(pairs)[worst].removesuffix(":momentum"),
    }


def distances(
    whole: Mapping[str, Any], parts: Mapping[str, Any], exact: Mapping[str, Any] | None
) -> dict[str, Any]:
    """How far two first steps are apart, and each from one in float64 if there is one.

    Ready for JSON.
    """
    apart: dict[str, Any] = {"gradient_distance": gradient_distance(whole, parts)}
    if exact is None:
        return apart
    both = {"unsplit": whole, "in_parts": parts}
    from_exact = {name: gradient_distance(exact, row) for name, row in both.items()}
    return apart | {"exact_loss": exact["loss"], "distance_from_float64": from_exact}


def exact_step(
    network: Graph | None,
    start: Mapping[str, Any],
    tuner: Tuner,
    tell: Callable[[str], None],
) -> dict[str, Any] | None:
    """The first step of a network in float64, from the weights of one in float32.

    None without such a network.
    """
    if network is None:
        return None
    with Trainer(network, tuner=tuner, optimizer=OPTIMIZER) as trainer:
        state = trainer.state
        state.load({name: start[name].astype(state[name].dtype) for name in start})
        (row,) = steps_of(trainer, network, 1, tell)
        return row
