"""Training steps: everything a step needs derived from a forward graph, and run.

The forward graph gets its gradients, its updates and results in place; convolutions are
planned under the tuner's workspace limit; all that does not outlive a step lies in one
arena, which evaluation uses in turn.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from mucudnn.arguments import a_function, a_number, an_integer, of_type, one_of
from mucudnn.ir.graph import PERSISTENT, Graph, Role
from mucudnn.ir.learning_rate import LearningRate, rate_of
from mucudnn.ir.optimizers import Optimizer, optimizer_of
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.gradient_accumulation import accumulating
from mucudnn.passes.graph.mixed_precision import LOSS_SCALES, lowered
from mucudnn.passes.graph.optimizer_updates import (
    LEARNING_RATE,
    STEP,
    When,
    with_updates,
)
from mucudnn.passes.ordering.orders import ORDERS, Order
from mucudnn.passes.planning.place_step import PlacedStep
from mucudnn.runtime.executor import Executor
from mucudnn.runtime.training.budget import MemoryBudget, tiers_for
from mucudnn.runtime.training.evaluation import (
    IMAGE,
    LABEL,
    Epochs,
    Evaluation,
    Evaluator,
    as_images,
    as_labels,
    cast,
    class_count,
    read,
)
from mucudnn.runtime.training.parameters import StateStore
from mucudnn.runtime.training.placed_steps import place_steps
from mucudnn.runtime.training.step_graphs import Plans, plan_convolutions
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["StepResult", "Trainer", "step_graphs"]

_REMEMBERED = 101

_PART = 40
"""Bits of the step's number: parts before the last count above, for other masks."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step found out about its batch, before it changed the weights.

    Attributes:
        loss: Mean over the labels.
        correct: Right answers.
        labels: How many labels there are: one an image, or one a pixel.
        images: How many images.
        learning_rate: What the step was taken with.
    """

    loss: float
    correct: int
    labels: int
    images: int
    learning_rate: float


class Trainer:
    """A network, its weights and its optimizer.

    Args:
        training: Forward graph for training; inputs `image` and `label`, outputs the
            loss and how many answers are right.
        evaluation: The same network for evaluation, with the same names; None where
            nothing is evaluated.
        tuner: Plans the convolutions; its backend computes.
        optimizer: How gradients change parameters; a name works, or its class.
        learning_rate: Step -> learning rate; a number, or a schedule that does not
            depend on the end of the training. The optimizer's own if not given.
        order: In which order the step runs; a name in `ORDERS`, or a function.
        update_when: Whether a parameter is updated as soon as its gradient is known
            ("early", which frees the gradient) or at the end ("late").
        gradient_accumulation: How many batches of the graph make one step.
        seed: Of the weights.
        plans: Convolution plans made before; what is missing is planned.
        precision: Narrow type (`float16`, `bfloat16`) that convolutions and matrix
            products compute in, where the backend can; the network's own if None.
        loss_scale: What the loss is multiplied by before its gradients are computed;
            the narrow type's usual scale if None.
        budget: Device memory that training and evaluation may take, or just its size
            ("1.5GiB"); without one everything stays on the device.
        progress: Called while a step is measured for its budget, with a node's name,
            how many are done, and of how many.

    Attributes:
        backend: Where it computes.
        batch: Images in a step.
        graph: Of the (last part of the) step, with updates.
        plans: Of all convolutions.
        state: Parameters, running statistics and optimizer state; brought home first
            from wherever they are.
        steps: Steps taken so far.
        peak_bytes: Device memory: the arena and the state.
        placed: How the step keeps its budget; None without one.

    Raises:
        ValueError: The graphs do not belong together, or a name is unknown.
        PlanningError: A convolution has no plan within the limit.
        OutOfMemoryError: There is no room.
    """

    def __init__(
        self,
        training: Graph,
        evaluation: Graph | None = None,
        *,
        tuner: Tuner,
        optimizer: Optimizer | str | Callable[[], Optimizer],
        learning_rate: Callable[[int], float]
        | LearningRate
        | float
        | str
        | None = None,
        order: str | Order = "builder",
        update_when: When = "early",
        gradient_accumulation: int = 1,
        seed: int = 0,
        plans: Plans | None = None,
        precision: str | None = None,
        loss_scale: float | None = None,
        budget: MemoryBudget | int | str | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        _check_inputs(training)
        of_type("tuner", tuner, Tuner, "a mucudnn.Tuner, such as Tuner()")
        ORDERS.resolve(order)
        an_integer("seed", seed, least=0)
        one_of("update_when", update_when, ("early", "late"))
        if plans is not None:
            of_type("plans", plans, Mapping, "a mapping from problems to plans")
        if progress is not None:
            a_function("progress", progress, "a function of (name, done, total)")
        optimizer = optimizer_of(optimizer)
        self._rate = rate_of(learning_rate, optimizer.learning_rate)
        budget = None if budget is None else MemoryBudget.of(budget)
        if evaluation is not None:
            _check_inputs(evaluation)
        if precision is not None:
            one_of("precision", precision, LOSS_SCALES)
        if precision is not None:
            training = lowered(training, precision)
            evaluation = None if evaluation is None else lowered(evaluation, precision)
        if loss_scale is None:
            loss_scale = 1.0 if precision is None else LOSS_SCALES[precision]
        steps = step_graphs(
            training,
            optimizer,
            when=update_when,
            parts=gradient_accumulation,
            loss_scale=loss_scale,
        )
        others = () if evaluation is None else (evaluation,)
        for graph in others:
            _check_same_network(graph, steps[0])
        self.backend = tuner.backend
        self.batch = training.tensors[IMAGE].shape[0] * gradient_accumulation
        self.graph = steps[-1]
        self.plans: Plans = plans or {}
        if budget is None or budget.convolutions == "fixed":
            self.plans = plan_convolutions(tuner, (*steps, *others), plans)
        last = len(steps) - 1
        prepared = place_steps(
            tuner,
            (*steps, *others),
            budget,
            first=last,
            order=order,
            plans=self.plans,
            progress=progress,
        )
        self.placed = None if budget is None else prepared[last]
        self._state = StateStore(
            self.backend.device,
            *steps,
            seed=seed,
            hosted=prepared[last].schedule.hosted,
            disk=None if budget is None else budget.disk,
        )
        self.steps = 0
        self._parts = gradient_accumulation
        self._label_shape = (self.batch, *training.tensors[LABEL].shape[1:])
        self._classes = class_count(training)
        self._dtype = training.tensors[training.outputs[0]].dtype
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        bound = self._bound(prepared, budget)
        self._last = bound[last]
        self._micro = bound[0]
        self._evaluator = Evaluator(others[0], bound[-1]) if others else None
        self._executors = bound
        self._current: Executor | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Trainer cannot be copied or pickled, as it holds device memory; make "
            "another with the same arguments and hand over the weights by "
            "`other.state.load(trainer.state.save())`, or by a checkpoint of `fit`"
        )

    @property
    def state(self) -> StateStore:
        """Parameters, running statistics and optimizer state."""
        self._use(None)
        return self._state

    @property
    def step_ms(self) -> float:
        """Median time of the last steps, feeding and fetching included; 0 before any.

        The first step warms up and counts only while it is the only one.
        """
        times = list(self._times)
        return statistics.median(times[1:] or times or [0.0])

    def step(self, images: Any, labels: Any) -> StepResult:
        """Train on one batch.

        Args:
            images: `batch` of them, (N, C, *spatial): an array, or lists of numbers.
            labels: Their classes, whole numbers from 0.

        Raises:
            ValueError: They have another shape, or a label is no class.
            TypeError: They are no numbers.
            BackendError: A kernel failed; the weights may be half updated.
        """
        device = self.backend.device
        rate = float(self._rate(self.steps))
        loss, correct = 0.0, 0
        start = device.record()
        for executor, feeds in self._runs(images, labels, rate):
            self._use(executor)
            part = read(self.graph, executor.run(feeds))
            loss += part[0] / self._parts
            correct += part[1]
        self._times.append(device.elapsed_ms(start, device.record()))
        self.steps += 1
        return StepResult(loss, correct, math.prod(self._label_shape), self.batch, rate)

    def profile(self, images: Any, labels: Any) -> tuple[dict[str, float], float]:
        """Train on one batch and time it.

        Returns:
            Node -> ms, of the last part if there are several, and the ms of all of it.
        """
        device = self.backend.device
        rate = float(self._rate(self.steps))
        start = device.record()
        for executor, feeds in self._runs(images, labels, rate):
            self._use(executor)
            _, nodes = executor.run_timed(feeds)
        whole = device.elapsed_ms(start, device.record())
        self.steps += 1
        return nodes, whole

    def evaluate(self, batches: Epochs) -> Evaluation:
        """Loss and accuracy on the images of one epoch, all of them.

        Raises:
            ValueError: There is no graph for evaluation, or images do not fit it.
        """
        if self._evaluator is None:
            raise ValueError("this trainer was given no graph for evaluation")
        self._use(self._executors[-1])
        return self._evaluator.evaluate(batches)

    def _use(self, executor: Executor | None) -> None:
        """Before an executor runs, or the state is read: others bring it home."""
        if self._current is not None and self._current is not executor:
            self._current.park()
        self._current = executor

    def _runs(
        self, images: Any, labels: Any, rate: float
    ) -> Iterator[tuple[Executor, dict[str, Any]]]:
        """What to run for a step, and on what."""
        shape = self.graph.tensors[IMAGE].shape
        wanted = (self.batch, *shape[1:])
        images, labels = as_images(images), as_labels(labels, self._classes)
        if images.shape != wanted or labels.shape != self._label_shape:
            raise ValueError(
                f"a step takes images of shape {wanted} and labels of shape "
                f"{self._label_shape}, got {images.shape} and {labels.shape}"
            )
        for part in range(self._parts):
            last = part == self._parts - 1
            rows = slice(part * shape[0], (part + 1) * shape[0])
            feeds = {
                IMAGE: cast(self.graph, IMAGE, images[rows]),
                LABEL: cast(self.graph, LABEL, labels[rows]),
                LEARNING_RATE: np.array(rate, self._dtype),
                STEP: np.array(self.steps + (0 if last else part + 1 << _PART)),
            }
            yield (self._last if last else self._micro), feeds

    def close(self) -> None:
        """End what copies, and give back what was copied to. The state stays."""
        self._use(None)
        for executor in self._executors:
            executor.close()
        for tiers in self._tiers:
            tiers.close()

    def _bound(
        self, prepared: Sequence[PlacedStep], budget: MemoryBudget | None
    ) -> list[Executor]:
        """Executors that take turns in one arena."""
        device = self.backend.device
        hosts = [
            None if budget is None else tiers_for(device, p, budget) for p in prepared
        ]
        self._tiers = [tiers for tiers in hosts if tiers is not None]
        nbytes = max(p.layout.nbytes for p in prepared)
        arena = self.backend.device.allocate(nbytes)
        self.peak_bytes = nbytes + self._state.nbytes
        return [
            Executor(
                self.backend,
                p.schedule,
                p.layout,
                p.plans,
                self._state,
                arena,
                host=host,
                homes=self._state.homes,
            )
            for p, host in zip(prepared, hosts, strict=True)
        ]


def step_graphs(
    forward: Graph,
    optimizer: Optimizer,
    *,
    when: When = "early",
    parts: int = 1,
    loss_scale: float = 1.0,
) -> tuple[Graph, ...]:
    """The graph of a training step, with nothing in place yet.

    Args:
        forward: A network with its loss.
        optimizer: How gradients change parameters.
        when: Whether updates come "early" or "late".
        parts: How many batches of the network make one step. For several there is
            another graph, which runs for all of them but the last.
        loss_scale: Factor of the loss's gradient, taken out again by the updates.

    Raises:
        ValueError: A name is unknown, there is not one part, or the scale is not
            positive.
    """
    if an_integer("the number of parts of a step", parts) < 1:
        raise ValueError(f"a step has at least one part, got {parts}")
    if not a_number("the loss scale", loss_scale, finite=False) > 0:
        raise ValueError(f"the loss scale must be positive, got {loss_scale}")
    graph = training_graph(forward, loss_scale=loss_scale)
    back = 1 / loss_scale
    if parts == 1:
        return (with_updates(graph, optimizer, when=when, gradient_scale=back),)
    both = accumulating(graph, optimizer, parts, when=when, gradient_scale=back)
    return both.micro_step, both.last_step


def _check_inputs(graph: Graph) -> None:
    of_type(
        "a network to train",
        graph,
        Graph,
        "a Graph, such as get_model('lenet')(batch) or GraphBuilder.build() returns",
    )
    known = (IMAGE, LABEL, STEP)
    found = [spec.name for spec in graph.with_role(Role.INPUT)]
    if not {IMAGE, LABEL} <= set(found) or not set(found) <= set(known):
        raise ValueError(
            f"a network to train has the inputs {IMAGE!r} and {LABEL!r}, this one has "
            f"{', '.join(found) or 'none'}"
        )


def _check_same_network(evaluation: Graph, training: Graph) -> None:
    """All that evaluation reads is what training changes."""
    for spec in evaluation.with_role(*PERSISTENT):
        known = training.tensors.get(spec.name)
        if known is None or (known.shape, known.dtype) != (spec.shape, spec.dtype):
            raise ValueError(
                f"the graph for evaluation is of another network: {spec.name!r} "
                f"{spec.shape} is not in the one for training"
            )
