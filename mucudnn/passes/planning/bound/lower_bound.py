"""A time that no plan within a budget can beat, whatever is kept, moved or run again.

A linear programme over windows of consecutive nodes. Of every storage, in every gap
between two uses, it says which fraction is there in each window, how much is copied out
and in, and how much is computed again:

    minimise    sum of the windows' times
    subject to  a window's time >= its nodes and what is computed again in it,
                                   bytes out / B_out,  bytes in / B_in
                at every node: its operands + what is there + its workspace <= budget
                what is away was copied out before, or is computed again
                what is back was copied in or computed again since it was away
                what is computed again has its saved inputs there

Every plan gives a solution that takes no longer: let a fraction be what of the
storage's values is on the device at the worst moment of a window. A plan copies whole
storages, and frees and allocates all of their bytes at once; the fractions are never
more than that. So the programme's optimum is no more than any plan's time, of whichever
residencies and scheduler. What it leaves out (tensors that are small, memory of what is
computed again on the way, waiting within a window) makes it smaller still. Steps that
reach into one another are meant in their steady state.
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
"""Of graphs for which the programme is solved; others have their compute time."""

_SLACK = 1e-6
"""By which share the solver may be wrong."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LowerBound:
    """What a step takes at the least within a budget.

    Attributes:
        step_ms: No plan is faster; infinity if none fits.
        residency: What the solution is nearest to, as a start of a search.
        reason: Why it is the time of compute alone, where the programme was not solved.
    """

    step_ms: float
    residency: Mapping[str, Residency] = field(default_factory=dict)
    reason: str = ""


def lower_bound(request: StepRequest) -> LowerBound:
    """What no plan of a request beats, of any policy and scheduler."""
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
