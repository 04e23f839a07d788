"""Optional uses of memory that make steps faster: parameter copies, input buffers.

Without a budget there is always room. Within one, the tensors of the step come first.
"""

from mucudnn.backends.base import Backend
from mucudnn.backends.transit import Transit
from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.placement import STATIC
from mucudnn.passes.liveness import rounded
from mucudnn.passes.ordering import Order
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.step.convolution_plans import Plans, plan_convolutions
from mucudnn.runtime.training.step.resident_step import resident_step
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["copies_fit", "transit_of"]


def copies_fit(
    tuner: Tuner,
    budget: MemoryBudget | None,
    order: str | Order,
    plans: Plans | None,
    step: Graph,
) -> bool:
    """Return whether a step with low-precision copies of parameters fits the budget.

    Where tensors must be offloaded, copies are not worth their memory: converting a
    resident parameter is faster than fetching its copy.
    """
    if budget is None:
        return True
    state = sum(rounded(spec.nbytes) for spec in step.with_role(*PERSISTENT))
    if state >= budget.nbytes:
        return False
    known = plan_convolutions(tuner, (step,), plans)
    placed = resident_step(tuner, step, order, known, STATIC)
    return placed.nbytes <= budget.nbytes


def transit_of(
    backend: Backend, budget: MemoryBudget | None, held: int, inputs: int
) -> tuple[Transit | None, int]:
    """Return the asynchronous input transfer, if any, and its device bytes.

    `held` is the bytes of arena and state, `inputs` those of all inputs of a step.
    """
    if backend.transit is None:
        return None, 0
    staged = budget is None or held + inputs <= budget.nbytes
    return backend.transit(staged), inputs if staged else 0
