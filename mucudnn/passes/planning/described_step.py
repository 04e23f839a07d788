"""A training step of another framework, described and costed for memory studies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mucudnn.ir.graph import Graph
from mucudnn.passes.planning.request import StepRequest

__all__ = ["DescribedStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedStep:
    """A training step of another framework, as planning requests and facts.

    Attributes:
        title: Name of the model.
        batch: Samples in a mini-batch.
        image: Shape of a sample.
        parameters: Number of elements of all parameters.
        optimizer: Name of the optimizer.
        device: Device of the costs: `cpu`, or a name in `DEVICES`.
        figures: Sources of the costs, in words.
        request: Function from a batch to the planning request, without a budget.
        order: Order of the nodes, in words.
    """

    title: str
    batch: int
    image: tuple[int, ...]
    parameters: int
    optimizer: str
    device: str
    figures: Mapping[str, str]
    request: Callable[[int], StepRequest]
    order: str = "as captured"

    def graph(self, batch: int | None = None) -> Graph:
        """Return the step's graph, for another batch if given."""
        return self.request(batch or self.batch).graph
