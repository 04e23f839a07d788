"""Validate a trainer's arguments before minutes are spent on measuring."""

from collections.abc import Mapping

from mucudnn.arguments import a_function, an_integer, of_type, one_of
from mucudnn.ir.placement import PLACEMENTS
from mucudnn.passes.graph.precision.mixed_precision import LOSS_SCALES
from mucudnn.passes.ordering import ORDERS, Order
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["check_arguments"]


def check_arguments(
    tuner: object,
    order: str | Order,
    seed: int,
    plans: object,
    progress: object,
    precision: str | None,
    placement: str,
) -> None:
    """Raise `TypeError` or `ValueError` for invalid arguments of `Trainer`."""
    of_type("tuner", tuner, Tuner, "a mucudnn.Tuner, such as Tuner()")
    ORDERS.resolve(order)
    an_integer("seed", seed, least=0)
    if precision is not None:
        one_of("precision", precision, LOSS_SCALES)
    one_of("placement", placement, PLACEMENTS)
    if plans is not None:
        of_type("plans", plans, Mapping, "a mapping from problems to plans")
    if progress is not None:
        a_function("progress", progress, "a function of (name, done, total)")
