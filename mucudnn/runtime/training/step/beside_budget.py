"""What makes steps faster and takes memory: copies of weights, places for inputs.

Without a budget there always is room. Within one, tensors have what they need first.
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

__all__ = ["keeps_copies", "transit_of"]


def keeps_copies(
    tuner: Tuner,
    budget: MemoryBudget | None,
    order: str | Order,
    plans: Plans | None,
    step: Graph,
) -> bool:
    """Whether a step that keeps copies of parameters fits with all it has.

    Where tensors have to leave, copies are not worth the room: a parameter that is
    there is cast or turned sooner than its copy is fetched.

    Raises:
        PlanningError: A convolution has no plan within the tuner's limit.
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
    """What takes inputs and results of steps, if anything, and its bytes of the device.

    Args:
        backend: Computes.
        budget: Of its memory.
        held: Bytes of the arena and of the state.
        inputs: Bytes of the inputs of all graphs of a step.
    """
    if backend.transit is None:
        return None, 0
    staged = budget is None or held + inputs <= budget.nbytes
    return backend.transit(staged), inputs if staged else 0
