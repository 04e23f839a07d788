"""A trainer as one of several: its gradients and results are those of all of them."""

import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

from mucudnn.arguments import one_of
from mucudnn.ir.graph import Graph
from mucudnn.ir.traits import Rows
from mucudnn.models import IMAGE
from mucudnn.passes.graph.batch_part import part_of_batch
from mucudnn.passes.planning.cutting import WHOLE
from mucudnn.runtime.distributed.collectives import Collectives
from mucudnn.runtime.distributed.gradients import summed_gradients
from mucudnn.runtime.distributed.statistics import joint_statistics
from mucudnn.runtime.distributed.waiting import TimedCollectives
from mucudnn.runtime.executor.tasks import Around, Surrounding
from mucudnn.runtime.training.step_result import StepResult, known_result
from mucudnn.runtime.training.step_times import StepTimes
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["PER_RANK", "SYNCHRONISED", "Ranks", "check_together"]

_HOST = "cpu"

_REMEMBERED = 21

PER_RANK, SYNCHRONISED = "per_rank", "synchronised"
"""Whose statistics normalise a batch: those of a rank's rows, or of all rows."""


class Ranks:
    """The processes of a training; one alone has nothing to do with others.

    Args:
        together: What they do together; None if there is one.
        graph: Of this one's network.
        batch_norm: `PER_RANK` or `SYNCHRONISED`.

    Attributes:
        around: What is called around the nodes of a step.

    Raises:
        ValueError: `batch_norm` is something else.
    """

    def __init__(
        self, together: Collectives | None, graph: Graph, batch_norm: str = PER_RANK
    ) -> None:
        one_of("batch_norm", batch_norm, (PER_RANK, SYNCHRONISED))
        self._together = None if together is None else TimedCollectives(together)
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._joint = batch_norm == SYNCHRONISED
        self.around: Surrounding | None = None
        if together is not None:
            batch = graph.tensors[IMAGE].shape[0]
            sizes = together.all_gather(batch)
            start = sum(sizes[: together.rank])
            self._rows = Rows(start, start + batch, sum(sizes))
            self.around = self._surrounding

    def part(self, graph: Graph) -> Graph:
        """A training graph without updates as that of this one's rows of the batch."""
        if self._together is None:
            return graph
        return part_of_batch(graph, self._rows, in_pieces=self._joint)

    def anywhere(self, happened: bool) -> bool:
        """Whether it happened in any of them."""
        if self._together is None:
            return happened
        return any(self._together.all_gather(happened))

    @property
    def own_ms(self) -> float:
        """Median time of its last steps without what it waited; 0 before any, or alone.

        The first step warms up and counts only while it is the only one.
        """
        times = list(self._times)
        return statistics.median(times[1:] or times or [0.0])

    def result(self, own: StepResult, times: StepTimes) -> StepResult:
        """Of the whole mini-batch: the mean over all labels.

        Args:
            own: Of this one's part.
            times: Has timed the step, waiting for others included.
        """
        if self._together is None:
            return own
        self._times.append(max(0.0, times.last_ms - self._together.waited_ms()))
        found = self._together.all_gather(own)
        labels = sum(one.labels for one in found)
        return known_result(
            sum(one.loss * one.labels for one in found) / labels,
            sum(one.correct for one in found),
            labels,
            sum(one.images for one in found),
            own.learning_rate,
        )

    def begin(self) -> None:
        """A step begins: what was waited before is not of it."""
        if self._together is not None:
            self._together.waited_ms()

    def _surrounding(self, graph: Graph, array: Callable[[str], Any]) -> Around:
        """Sums over all ranks; all begin them in one order.

        Raises:
            ValueError: The ranks run their nodes in different orders.
        """
        assert self._together is not None, "one process alone sums nothing"
        share = self._rows.count / self._rows.total
        orders = self._together.all_gather([node.name for node in graph.nodes])
        if any(order != orders[0] for order in orders):
            raise ValueError(
                "the ranks run their steps in different orders, so that their sums "
                "would not meet; order='builder' is the same on all"
            )
        sums = summed_gradients(graph, array, self._together, share)
        if not self._joint:
            return sums
        return joint_statistics(graph, array, self._together, share).then(sums)


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
