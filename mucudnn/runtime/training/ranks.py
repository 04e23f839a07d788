"""A trainer as one of several: its gradients and results are those of all of them."""

from dataclasses import replace
from functools import partial

from mucudnn.ir.graph import Graph
from mucudnn.models import IMAGE
from mucudnn.passes.planning.cutting import WHOLE
from mucudnn.runtime.distributed.collectives import Collectives
from mucudnn.runtime.distributed.gradients import summed_gradients
from mucudnn.runtime.executor.tasks import Surrounding
from mucudnn.runtime.training.stepping import StepResult
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["Ranks", "check_together"]

_HOST = "cpu"


class Ranks:
    """The processes of a training; one alone has nothing to do with others.

    Args:
        together: What they do together; None if there is one.
        graph: Of this one's step.

    Attributes:
        around: What is called around the nodes of a step.
    """

    def __init__(self, together: Collectives | None, graph: Graph) -> None:
        self._together = together
        self.around: Surrounding | None = None
        if together is not None:
            batch = graph.tensors[IMAGE].shape[0]
            share = batch / sum(together.all_gather(batch))
            self.around = partial(summed_gradients, together=together, share=share)

    def anywhere(self, happened: bool) -> bool:
        """Whether it happened in any of them."""
        if self._together is None:
            return happened
        return any(self._together.all_gather(happened))

    def result(self, own: StepResult) -> StepResult:
        """Of the whole mini-batch: the mean over all labels."""
        if self._together is None:
            return own
        found = self._together.all_gather(own)
        labels = sum(one.labels for one in found)
        return replace(
            own,
            loss=sum(one.loss * one.labels for one in found) / labels,
            correct=sum(one.correct for one in found),
            labels=labels,
            images=sum(one.images for one in found),
        )


def check_together(
    tuner: Tuner, budget: object, parts: int, split: object, loss_scale: object
) -> None:
    """Refuse what several processes cannot train with.

    Raises:
        ValueError: Gradients are not where they can be summed.
    """
    if tuner.backend.name != _HOST:
        raise ValueError(
            f"several processes train on the backend {_HOST!r}, whose gradients are in "
            f"host memory; this one is {tuner.backend.name!r}"
        )
    fixed = loss_scale is None or isinstance(loss_scale, int | float)
    if budget is not None or parts != 1 or split != WHOLE or not fixed:
        raise ValueError(
            "several processes train without budget, accumulation, split and dynamic "
            "loss scale: gradients are summed where they stay until their updates"
        )
