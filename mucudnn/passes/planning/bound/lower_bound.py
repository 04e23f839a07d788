"""Lower bound of the step time within a budget, over all residencies and schedulers.

The bound is the optimum of a linear program over windows of consecutive nodes. For
every storage and every gap between two uses, variables are the fraction that is
resident in each window, the fractions copied out and in, and the fraction recomputed:

    minimise    sum of the windows' times
    subject to  a window's time >= its nodes and recomputation,
                                   bytes out / B_out,  bytes in / B_in
                at every node: operands + resident fractions + workspace <= budget
                an absent fraction was copied out before, or is recomputed
                a restored fraction was copied in or recomputed since
                recomputation has its saved inputs resident

Every plan gives a feasible solution that takes no longer: let a fraction be the part of
a storage that is on the device at the worst moment of a window. A plan copies, frees
and allocates whole storages, so the fractions never exceed what the plan holds. The
optimum is therefore no more than the time of any plan. Neglected effects (small
tensors, memory of intermediate recomputation, waiting within a window) only lower the
bound. Steps whose copies overlap with neighbouring steps are considered in their steady
state.
"""

import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from mucudnn.passes.cbc import solver_errors
from mucudnn.passes.planning.bound.relaxation import Relaxation, fastest_ms
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.residency import Residency

__all__ = ["MOST_ABSENCES", "LowerBound", "lower_bound"]

MOST_ABSENCES = 700
"""Absences up to which the program is solved; larger graphs get their compute time."""

_SLACK = 1e-6
"""Relative error allowed for the solver."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Lower bound of the step time within a budget.

    Attributes:
        step_ms: The bound; infinity if no plan fits.
        residency: The solution rounded to residencies, to start a search from.
        reason: Why the bound is only the compute time, if the program was not solved.
    """

    step_ms: float
    residency: Mapping[str, Residency] = field(default_factory=dict)
    reason: str = ""


def lower_bound(request: StepRequest) -> LowerBound:
    """Return the lower bound of a request, over all policies and schedulers."""
    compute = sum(fastest_ms(request).values())
    if math.isinf(request.budget):
        return LowerBound(compute)
    relaxation = Relaxation(request)
    gaps = len(relaxation.absences)
    if gaps > MOST_ABSENCES:
        return LowerBound(compute, reason=f"{gaps} gaps are more than {MOST_ABSENCES}")
    try:
        with warnings.catch_warnings():
            # PuLP 3.3 announces 4.0, which pyproject.toml excludes.
            warnings.simplefilter("ignore", DeprecationWarning)
            found = relaxation.solve()
    except solver_errors() as error:
        _log.warning("the solver cannot be run: %s", error)
        return LowerBound(compute, reason="the solver cannot be run")
    if found is None:
        return LowerBound(compute, reason="the solver found no optimum")
    step_ms, residency = found
    return LowerBound(max(compute, step_ms * (1 - _SLACK)), residency)
