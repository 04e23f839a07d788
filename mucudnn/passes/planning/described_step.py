"""A training step that is described and costed elsewhere, to be studied as ours are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mucudnn.ir.graph import Graph
from mucudnn.passes.planning.request import StepRequest

__all__ = ["DescribedStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedStep:
    """A step of another framework's: as planners are asked for it, and its facts.

    Attributes:
        title: What the model is called.
        batch: Samples in a mini-batch.
        image: Shape of a sample.
        parameters: Elements of all parameters.
        optimizer: What it is called.
        device: Whose costs it has: `cpu`, or a name in `DEVICES`.
        figures: What costs are based on, in words.
        request: Batch -> the step as a planner is asked for it, without a budget.
        order: In which order nodes run, in words.
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
        """The step's graph, of another batch if one is given."""
        return self.request(batch or self.batch).graph
