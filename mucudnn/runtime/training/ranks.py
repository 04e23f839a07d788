"""Data-parallel training: one trainer per rank, gradients summed over all ranks."""

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from mucudnn.arguments import check_choice
from mucudnn.errors import OutOfMemoryError, PlanningError
from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.tensor import Role
from mucudnn.ir.traits import Rows
from mucudnn.models import IMAGE
from mucudnn.passes.graph.training_step import Complete, decompose, draw_rows
from mucudnn.passes.graph.updates import updates_last
from mucudnn.passes.ordering import Order, ordered
from mucudnn.passes.planning.plan_step import fastest_form
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.distributed.collectives import (
    Collectives,
    RanksDifferError,
    TimedCollectives,
    check_alike,
    digest_of,
    text_of,
)
from mucudnn.runtime.distributed.sum_gradients import (
    joint_statistics,
    meetings_of,
    summed_gradients,
)
from mucudnn.runtime.executor.tasks import HookFactory, NodeHooks, TensorLookup
from mucudnn.runtime.training.measured_choices import FusionRace
from mucudnn.runtime.training.parameters import StateStore
from mucudnn.runtime.training.stepping import (
    StepResult,
    StepTimes,
    known_result,
    warm_median_ms,
)
from mucudnn.runtime.tuning.tuner import Tuner

_HOST, _BUILDER = "cpu", "builder"

T = TypeVar("T")

Split = Callable[[Graph, Complete], Graph]

_REMEMBERED = 21
"""Number of recent steps, few enough that a rank that becomes slow is soon seen."""

PER_RANK, SYNCHRONISED = "per_rank", "synchronised"
"""Batch statistics of each rank's own rows, or of all rows of the mini-batch."""


class Ranks:
    """The ranks of a training, seen from one rank; a no-op for a single process.

    Args:
        together: Collective operations of the ranks; None if there is one process.
        graph: Forward graph of this rank.
        batch_norm: `PER_RANK` or `SYNCHRONISED`.
        settings: Further settings that must be the same on all ranks.

    Attributes:
        around: Calls around the nodes of a step, if any.

    Raises:
        ValueError: `batch_norm` is unknown, or the ranks differ in a setting.
    """

    def __init__(
        self,
        together: Collectives | None,
        graph: Graph,
        batch_norm: str = PER_RANK,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        check_choice("batch_norm", batch_norm, (PER_RANK, SYNCHRONISED))
        self._together = None if together is None else TimedCollectives(together)
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._synchronised = batch_norm == SYNCHRONISED
        self._begun = False
        self.around: HookFactory | None = None
        if together is not None:
            self._weights = [spec.name for spec in graph.with_role(Role.PARAMETER)]
            batch = graph.tensors[IMAGE].shape[0]
            sizes = together.all_gather(batch)
            self.check_alike({**(settings or {}), **_network(graph, sizes)})
            start = sum(sizes[: together.rank])
            self._rows = Rows(start, start + batch, sum(sizes))
            self.around = self._sum_hooks

    def check_alike(self, settings: Mapping[str, object]) -> None:
        """Raise `RanksDifferError` where settings differ between ranks."""
        if self._together is not None:
            check_alike(self._together, settings)

    def plan_until_cached(self, tuner: Tuner, plan: Callable[[], T]) -> T:
        """Plan a step by measurements in the ranks' caches, until no rank measures."""
        # Ranks that share a cache measure the same kernels at once, and the cache keeps
        # the rows of the last one. A later training plans by those rows. To have the
        # same plan and the same bits here, all ranks plan again until none of them has
        # measured.
        while True:
            cache = tuner.cache
            before = cache.writes
            found = plan()
            if self._together is None or not self.any_rank(cache.writes > before):
                return found
            tuner.forget()

    def fastest_form(
        self,
        forms: Sequence[Callable[[], T]],
        plan_of: Callable[[T], StepPlan],
        race: FusionRace,
        *,
        compare: bool,
    ) -> T:
        """Plan a step in one or several forms; choose the same one on all ranks.

        A form that any rank has too little memory for is chosen by none. If no form
        fits, the error has the least sufficient budget. Forms that every rank has
        compared before are not compared again: the one that was faster is preferred.
        A rank that does not `compare` takes the form that is fastest on the others. See
        `passes.planning.plan_step.fastest_form` for `plan_of` and `compare`.
        """
        compared = [[*race.known().values()]]
        if self._together is not None:
            compared = self._together.all_gather(*compared)
        decided = len(forms) > 1 and all(compared)
        if decided:
            ranks = [times for [times] in compared]
            # A step takes as long as on its slowest rank.
            if max(one[1] for one in ranks) < max(one[0] for one in ranks):
                forms = forms[::-1]
        times: list[float] = []

        def slowest(step_ms: float, slow: bool) -> tuple[float, bool]:
            if not compare and math.isfinite(step_ms):
                step_ms = 0.0  # the other ranks decide
            if self._together is not None:
                found = self._together.all_gather((step_ms, slow))
                step_ms, slow = max(ms for ms, _ in found), any(s for _, s in found)
            times.append(step_ms)
            return step_ms, slow

        refused: list[PlanningError | OutOfMemoryError] = []

        def results() -> Iterator[T | None]:
            for form in forms:
                try:
                    yield form()
                except (PlanningError, OutOfMemoryError) as e:
                    refused.append(e)
                    yield None

        found = fastest_form(
            results(),
            lambda result: None if result is None else plan_of(result),
            compare=compare and not decided,
            agree=slowest,
        )
        if found is None:
            raise min(reversed(refused), key=_sufficient_bytes)
        if not decided and len(times) > 1 and all(map(math.isfinite, times)):
            race.put((times[0], times[1]))
        return found

    def part(self, split: Split) -> Split:
        """Return a function that splits a training graph of this rank's rows."""
        if self._together is None:
            return split

        def cut(graph: Graph, complete: Complete) -> Graph:
            # Splitting decomposes the normalizations that it cuts; decompose all others
            # afterwards, so that planners see them whole.
            found = split(draw_rows(graph, self._rows), complete)
            return decompose(found) if self._synchronised else found

        return cut

    def order(self, order: str | Order) -> str | Order:
        """Return an order of nodes with the updates, which wait for sums, last."""
        if self._together is None or order == _BUILDER:
            return order

        def last(graph: Graph, workspaces: Mapping[str, int] | None = None) -> Graph:
            return updates_last(ordered(order, graph, workspaces or {}))

        return last

    def any_rank(self, happened: bool) -> bool:
        """Return whether a condition holds on any rank."""
        if self._together is None:
            return happened
        return any(self._together.all_gather(happened))

    @property
    def compute_ms(self) -> float:
        """Median step time without waiting for other ranks, in ms; 0 without steps.

        The first step warms up and counts only while it is the only one.
        """
        return warm_median_ms(self._times)

    def result(self, own: StepResult, times: StepTimes) -> StepResult:
        """Return the result over the whole mini-batch: the mean over all labels.

        `own` is that of this rank's part; `times` includes waiting for other ranks.
        """
        if self._together is None:
            return own
        # Waiting for slower ranks is not this rank's own time.
        self._times.append(max(0.0, times.last_ms - self._together.waited_ms()))
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
        """Begin a step: reset the waiting time."""
        if self._together is None:
            return
        # Before the first step, compare step number, learning rate and weights, which
        # may come from different seeds, files or checkpoints.
        if not self._begun:
            store = state()
            weights = digest_of(store.save([name])[name] for name in self._weights)
            self.check_alike({"step": step, "learning_rate": rate, "weights": weights})
            self._begun = True
        self._together.waited_ms()

    def _sum_hooks(self, graph: Graph, array: TensorLookup) -> NodeHooks:
        """Return the calls around nodes that sum over all ranks, in one order."""
        assert self._together is not None, "one process alone sums nothing"
        share = self._rows.count / self._rows.total
        meetings = meetings_of(graph) if self._synchronised else ()
        sums = summed_gradients(
            graph,
            array,
            self._together,
            share,
            meetings=[meeting.position for meeting in meetings],
        )
        if not self._synchronised:
            return sums
        return joint_statistics(graph, array, self._together, share).then(sums)


def _sufficient_bytes(error: PlanningError | OutOfMemoryError) -> float:
    least = error.least_bytes if isinstance(error, PlanningError) else None
    return math.inf if least is None else least


def _network(graph: Graph, batches: Sequence[int]) -> dict[str, object]:
    """Describe a network: its nodes, its weights, and their initial values."""
    own = re.compile(rf"\b({'|'.join(map(str, {*batches, sum(batches)}))})\b")
    # Batch sizes may differ between ranks: mask numbers that equal one of them.
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
    """Raise `ValueError` unless gradients are in host memory, where they are summed."""
    if tuner.backend.name != _HOST:
        raise ValueError(
            f"several processes train on the backend {_HOST!r} only, whose gradients "
            f"are in host memory; this one is {tuner.backend.name!r}"
        )
