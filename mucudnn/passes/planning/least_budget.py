"""Search for the minimum feasible budget by repeated planning.

A refusal reports how many bytes are missing, so the second attempt mostly succeeds. A
policy that depends on the budget may need more under a larger one, and a user's policy
may report nothing: then budgets grow until one works, and the range below is bisected.
The result works, and one byte less does not.
"""

from collections.abc import Callable
from copy import copy

from mucudnn.errors import PlanningError

__all__ = ["least_budget_above"]

_MOST = 1 << 62
"""Budget in bytes that counts as unlimited."""

_PATIENCE = 8
"""Attempts that follow the refusals' reports before budgets grow faster."""


def least_budget_above(
    refused: int, error: PlanningError, attempt: Callable[[int], object]
) -> tuple[int, PlanningError] | None:
    """Return the least budget that works above one that does not.

    Returns:
        The budget, and the last refusal of a smaller one; None if none works.
    """
    low, stride = refused, 1
    for asked in range(_MOST.bit_length() + _PATIENCE):
        high = error.least_bytes or 0
        if high <= low or asked >= _PATIENCE:
            high = max(high, min(low + stride, _MOST))
            stride *= 4
        refusal = _refusal(attempt, high)
        if refusal is None:
            return _bisect(low, high, error, attempt)
        if high >= _MOST:
            return None
        low, error = high, refusal
    return None


def _bisect(
    low: int, high: int, error: PlanningError, attempt: Callable[[int], object]
) -> tuple[int, PlanningError]:
    """Bisect for the least budget; the first guess is that nothing less works."""
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
