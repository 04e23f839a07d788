"""A trainer as one of several: its gradients and results are those of all of them."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from mucudnn.arguments import one_of
from mucudnn.ir.graph import PERSISTENT, Graph, Role
from mucudnn.ir.traits import Rows
from mucudnn.models import IMAGE
from mucudnn.passes.graph.batch_part import drawing_rows, in_pieces
from mucudnn.passes.graph.optimizer_updates import updates_last
from mucudnn.passes.ordering import Order, ordered
from mucudnn.runtime.distributed.collectives import (
    Collectives,
    RanksDifferError,
    check_alike,
    digest_of,
    text_of,
)
from mucudnn.runtime.distributed.gradients import summed_gradients
from mucudnn.runtime.distributed.statistics import joint_statistics, meetings_of
from mucudnn.runtime.distributed.waiting import TimedCollectives
from mucudnn.runtime.executor.tasks import Around, Surrounding, WhileRunning
from mucudnn.runtime.training.parameters import StateStore
from mucudnn.runtime.training.step.result import StepResult, known_result
from mucudnn.runtime.training.step.times import StepTimes, Times
from mucudnn.runtime.training.training_graphs import Divided
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["PER_RANK", "SYNCHRONISED", "Ranks", "check_together"]

_HOST, _BUILDER = "cpu", "builder"

T = TypeVar("T")

_REMEMBERED = 21
"""Steps, so that a rank that becomes slow is soon seen."""

PER_RANK, SYNCHRONISED = "per_rank", "synchronised"
"""Whose statistics normalise a batch: those of a rank's rows, or of all rows."""


class Ranks:
    """The processes of a training; one alone has nothing to do with others.

    Args:
        together: What they do together; None if there is one.
        graph: Of this one's network.
        batch_norm: `PER_RANK` or `SYNCHRONISED`.
        settings: What else all of them must have alike, beside the network.

    Attributes:
        around: What is called around the nodes of a step.

    Raises:
        ValueError: `batch_norm` is something else, or the ranks differ in something.
    """

    def __init__(
        self,
        together: Collectives | None,
        graph: Graph,
        batch_norm: str = PER_RANK,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        one_of("batch_norm", batch_norm, (PER_RANK, SYNCHRONISED))
        self._together = None if together is None else TimedCollectives(together)
        self._times: Times[float] = Times(_REMEMBERED)
        self._joint = batch_norm == SYNCHRONISED
        self._begun = False
        self.around: Surrounding | None = None
        if together is not None:
            self._weights = [spec.name for spec in graph.with_role(Role.PARAMETER)]
            batch = graph.tensors[IMAGE].shape[0]
            sizes = together.all_gather(batch)
            self.check_alike({**(settings or {}), **_network(graph, sizes)})
            start = sum(sizes[: together.rank])
            self._rows = Rows(start, start + batch, sum(sizes))
            self.around = self._surrounding

    def check_alike(self, settings: Mapping[str, object]) -> None:
        """Compare settings with those of the other ranks.

        Raises:
            RanksDifferError: They differ.
        """
        if self._together is not None:
            check_alike(self._together, settings)

    def settled(self, tuner: Tuner, plan: Callable[[], T]) -> T:
        """Plan a step by what the ranks' caches keep, not by what this one measured.

        Ranks that share a cache measure the same at once, and the cache keeps the
        rows of whoever was last. A later training plans by those; so that this one has
        the same plan, and the same bits, all plan anew until none has measured.

        Args:
            tuner: Whose measurements are planned by.
            plan: Makes the plan.
        """
        while True:
            cache = tuner.cache
            before = cache.writes
            found = plan()
            if self._together is None or not self.anywhere(cache.writes > before):
                return found
            tuner.forget()

    def part(self, divided: Divided) -> Divided:
        """What cuts a training graph of this one's rows of the batch.

        What is cut is in pieces already; normalisations that are not fall into theirs
        behind, so that planners see them as they are.
        """
        if self._together is None:
            return divided

        def cut(graph: Graph) -> Graph:
            found = divided(drawing_rows(graph, self._rows))
            return in_pieces(found) if self._joint else found

        return cut

    def order(self, order: str | Order) -> str | Order:
        """An order of nodes, with updates, which wait for sums, behind all others."""
        if self._together is None or order == _BUILDER:
            return order

        def last(graph: Graph, workspaces: Mapping[str, int] | None = None) -> Graph:
            return updates_last(ordered(order, graph, workspaces or {}))

        return last

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
        return self._times.median(float)

    def result(self, own: StepResult, times: StepTimes) -> StepResult:
        """Of the whole mini-batch: the mean over all labels.

        Args:
            own: Of this one's part.
            times: Has timed the step, waiting for others included.
        """
        if self._together is None:
            return own
        self._times.add(max(0.0, times.last_ms - self._together.waited_ms()))
        found = self._together.all_gather(own)
        if any(one.learning_rate != own.learning_rate for one in found):
            rates = ", ".join(f"{one.learning_rate:g}" for one in found)
            raise RanksDifferError(
                f"the learning rates of a step differ between ranks: {rates}; their "
                "weights differ by now"
            )
        labels = sum(one.labels for one in found)
        return known_result(
            sum(one.loss * one.labels for one in found) / labels,
            sum(one.correct for one in found),
            labels,
            sum(one.images for one in found),
            own.learning_rate,
        )

    def begin(self, state: Callable[[], StateStore], step: int, rate: float) -> None:
        """Begin a step: what was waited before is not of it.

        Before the first one the ranks compare what they begin with, as weights may be
        of other seeds, files or checkpoints.

        Raises:
            RanksDifferError: They differ.
        """
        if self._together is None:
            return
        if not self._begun:
            store = state()
            weights = digest_of(store.save([name])[name] for name in self._weights)
            self.check_alike({"step": step, "learning_rate": rate, "weights": weights})
            self._begun = True
        self._together.waited_ms()

    def _surrounding(self, graph: Graph, array: WhileRunning) -> Around:
        """Sums over all ranks; all begin them in one order.

        Raises:
            ValueError: The ranks run their nodes in orders that cannot meet.
        """
        assert self._together is not None, "one process alone sums nothing"
        share = self._rows.count / self._rows.total
        meetings = meetings_of(graph) if self._joint else ()
        sums = summed_gradients(
            graph,
            array,
            self._together,
            share,
            meetings=[meeting.position for meeting in meetings],
        )
        if not self._joint:
            return sums
        return joint_statistics(graph, array, self._together, share).then(sums)


def _network(graph: Graph, batches: Sequence[int]) -> dict[str, object]:
    """What a network is: its nodes, its weights, and how these begin.

    Batches may differ, so a number that is the batch of some rank does not count.
    """
    own = re.compile(rf"\b({'|'.join(map(str, {*batches, sum(batches)}))})\b")
    found: dict[str, object] = {"outputs": graph.outputs}
    for node in graph.nodes:
        attrs = {name: text_of(value) for name, value in node.attrs.items()}
        words = f"{node.op} of {', '.join(node.inputs)} with {attrs}"
        found[f"node {node.name}"] = own.sub("N", words)
    for spec in graph.with_role(*PERSISTENT):
        how = graph.initializers.get(spec.name)
        found[f"tensor {spec.name}"] = f"{spec.dtype} {spec.shape} {how}"
    return found


def check_together(tuner: Tuner) -> None:
    """Refuse what several processes cannot train with.

    Raises:
        ValueError: Gradients are not where they can be summed.
    """
    if tuner.backend.name != _HOST:
        raise ValueError(
            f"several processes train on the backend {_HOST!r}, whose gradients are in "
            f"host memory; this one is {tuner.backend.name!r}"
        )
