"""The least budget that works, found by asking again.

What refuses a budget says how much it lacks, so that most often the second question is
the last one. A policy that looks at the budget may want more under a larger one, and a
function of the user's may say nothing at all: then budgets grow until one works, and
the step between it and the last one that did not is halved. So what is found works,
and a byte less does not.
"""

from collections.abc import Callable
from copy import copy

from mucudnn.errors import PlanningError

__all__ = ["least_budget_above"]

_MOST = 1 << 62
"""Bytes at which nothing is short of memory any more."""

_PATIENCE = 8
"""Questions that follow what refusals say, before budgets grow faster."""


def least_budget_above(
    refused: int, error: PlanningError, attempt: Callable[[int], object]
) -> tuple[int, PlanningError] | None:
    """The least budget that works above one that does not.

    Args:
        refused: A budget that does not work.
        error: What was said then.
        attempt: Raises `PlanningError` where a budget does not work.

    Returns:
        The budget, and what refused less: of two answers the last one. None if none
        works, however large.
    """
    low, stride = refused, 1
    for asked in range(_MOST.bit_length() + _PATIENCE):
        high = error.least_bytes or 0
        if high <= low or asked >= _PATIENCE:
            high = max(high, min(low + stride, _MOST))
            stride *= 4
        refusal = _refusal(attempt, high)
        if refusal is None:
            return _between(low, high, error, attempt)
        if high >= _MOST:
            return None
        low, error = high, refusal
    return None


def _between(
    low: int, high: int, error: PlanningError, attempt: Callable[[int], object]
) -> tuple[int, PlanningError]:
    """The least budget by bisection, the first guess that nothing less works."""
    middle = high - 1
    while high - low > 1:
        refusal = _refusal(attempt, middle)
        if refusal is None:
            high = middle
        else:
            low, error = middle, refusal
        middle = (low + high) // 2
    return high, error


def _refusal(attempt: Callable[[int], object], budget: int) -> PlanningError | None:
    try:
        attempt(budget)
    except PlanningError as error:
        return copy(error)  # without a traceback, which would hold callers' locals
    return None
