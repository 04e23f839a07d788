"""The steps that splitting is estimated on."""

from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.planning.cutting import SplitStep
from mucudnn.passes.planning.request import StepRequest

__all__ = ["GIB", "step"]

GIB = 1 << 30


def step(model: str, batch: int, budget: float, device: str) -> SplitStep:
    """A step with momentum under a budget, estimated for a device."""
    return SplitStep(
        training_graph(get_model(model)(batch)),
        lambda graph: with_updates(graph, Momentum()),
        lambda graph: estimate(graph, device),
        lambda graph, profile: StepRequest(graph, profile, budget=budget),
    )
