"""Run the graphs of a trainer in turn in one arena: steps, results, times.

A training step and an evaluation never run at the same time, so their tensors share
memory. Before another graph gets the arena, the state in it is copied out. A step is a
batch, in one part or several.
"""

import math
import reprlib
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from mucudnn.backends import Device
from mucudnn.backends.base import Backend
from mucudnn.backends.device import Event, StepIO
from mucudnn.ir.graph import Graph
from mucudnn.ir.tensor import Role
from mucudnn.models import IMAGE, LABEL, class_count
from mucudnn.passes.graph.training_step import StepGraphs, answers_of
from mucudnn.passes.graph.updates import LEARNING_RATE, STEP
from mucudnn.passes.placement.layout import PlacedStep
from mucudnn.passes.planning.cutting import trains
from mucudnn.runtime.executor import Executor, arenas, shared_bytes
from mucudnn.runtime.executor.tasks import HookFactory
from mucudnn.runtime.executor.tiers import OpenTiers
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.measured_choices import step_io_of
from mucudnn.runtime.training.parameters import StateStore


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss and accuracy of a network on some images.

    Attributes:
        loss: Mean over the labels.
        correct: Number of correct answers.
        labels: Number of labels: one per image, or one per pixel.
    """

    loss: float
    correct: int
    labels: int

    @property
    def accuracy(self) -> float:
        """Share of correct answers."""
        return self.correct / max(1, self.labels)


class Epochs(Protocol):
    """Labelled images in batches, such as a `mucudnn.data.Loader`."""

    def epoch(self, epoch: int, start: int = 0) -> Iterable[tuple[Any, Any]]:
        """Return the (images, labels) batches of one epoch from `start` on."""


class Evaluator:
    """Runs a network's graph for evaluation.

    A smaller last batch is padded with copies of its first image, which is valid
    because images do not interact in evaluation. The copies' part of loss and accuracy
    is computed from a batch of nothing else and subtracted.

    Args:
        graph: Graph with inputs `image` and `label`; its outputs are the loss, the
            number of correct answers, and the answers.
    """

    def __init__(self, graph: Graph, take: Callable[[], Executor]) -> None:
        self._graph = graph
        self._take = take
        self._answers = answers_of(graph)
        self._batch, *self._image = graph.tensors[IMAGE].shape
        self._classes = class_count(graph)
        self._zeros = {
            spec.name: np.zeros(spec.shape, spec.dtype)
            for spec in graph.with_role(Role.INPUT)
            if spec.name != IMAGE
        }

    def evaluate(self, batches: Epochs) -> Evaluation:
        """Return loss and accuracy on the images of one epoch."""
        check_batches("batches", batches)
        loss, correct, labels = 0.0, 0, 0
        for images, wanted in map(image_and_label, batches.epoch(0)):
            found = self._evaluate(as_images(images), as_labels(wanted, self._classes))
            loss += found.loss * found.labels
            correct += found.correct
            labels += found.labels
        if labels == 0:
            raise ValueError("there are no images to evaluate on")
        return Evaluation(loss / labels, correct, labels)

    def predict(self, images: Any) -> Any:
        """Return the network's answers to images; see `Trainer.predict`."""
        if self._answers is None:
            raise ValueError(
                "this network compares no tensor with its labels, so its predictions "
                "are unknown"
            )
        images = as_images(images)
        if list(images.shape[1:]) != self._image:
            raise ValueError(
                f"the network takes images of shape {('n', *self._image)}, got "
                f"{images.shape}"
            )
        spec = self._graph.tensors[self._answers]
        found = np.empty((len(images), *spec.shape[1:]), spec.dtype)
        for begin in range(0, len(images), self._batch):
            rows = images[begin : begin + self._batch]
            results = self._run({IMAGE: rows[self._padded_indices(len(rows))]})
            found[begin : begin + len(rows)] = results[self._answers][: len(rows)]
        return found

    def _evaluate(self, images: Any, labels: Any) -> Evaluation:
        size, full = len(images), self._batch
        rest = self._graph.tensors[LABEL].shape[1:]
        if list(images.shape[1:]) != self._image or labels.shape != (size, *rest):
            raise ValueError(
                f"evaluation takes images of shape {('n', *self._image)} and labels of "
                f"shape {('n', *rest)}, got {images.shape} and {labels.shape}"
            )
        if size >= full:
            return self._figures(images, labels)
        # Loss and accuracy of a batch of copies alone are subtracted from those of the
        # padded batch.
        filled, first = self._padded_indices(size), np.zeros(full, int)
        padded = self._figures(images[filled], labels[filled])
        alone = self._figures(images[first], labels[first])
        copies = full - size
        return Evaluation(
            (padded.loss * full - alone.loss * copies) / size,
            padded.correct - alone.correct * copies // full,
            labels.size,
        )

    def _padded_indices(self, size: int) -> Any:
        """Return indices that pad `size` images to a batch with the first one."""
        places = np.arange(self._batch)
        return np.where(places < size, places, 0)

    def _figures(self, images: Any, labels: Any) -> Evaluation:
        found = self._run({IMAGE: images, LABEL: labels})
        return Evaluation(*read(self._graph, found), labels.size)

    def _run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        feeds = {name: cast(self._graph, name, inputs[name]) for name in inputs}
        return self._take().run(self._zeros | feeds)


def read(graph: Graph, found: Mapping[str, Any]) -> tuple[float, int]:
    """Return loss and correct answers among the outputs; 0 if not counted."""
    loss, *others = graph.outputs
    counts = [name for name in others if graph.tensors[name].shape == ()]
    return float(found[loss]), int(found[counts[0]]) if counts else 0


def cast(graph: Graph, name: str, values: Any) -> Any:
    """Return an input's values in its data type."""
    return np.asarray(values).astype(graph.tensors[name].dtype, copy=False)


def as_images(images: Any) -> Any:
    """Return an array of numbers, from an array or nested lists."""
    found = _array("images", images)
    if found.dtype.kind not in "buif":
        raise TypeError(f"images must be numbers, got {found.dtype} {found.shape}")
    return found


def as_labels(labels: Any, classes: int | None) -> Any:
    """Return an array of classes, from an array or a list."""
    found = _array("labels", labels)
    if found.dtype.kind == "f" and (found == np.floor(found)).all():
        found = found.astype(np.int64)
    if found.dtype.kind not in "iu":
        raise TypeError(
            f"labels must be integers, one per image, got {found.dtype} {found.shape}"
        )
    if classes is not None and found.size:
        low, high = int(found.min()), int(found.max())
        if low < 0 or high >= classes:
            raise ValueError(
                f"labels must be from 0 to {classes - 1}, as the network has "
                f"{classes} classes; they range from {low} to {high}"
            )
    return found


def check_batches(name: str, batches: object) -> None:
    """Raise `TypeError` unless `batches` has epochs."""
    if not callable(getattr(batches, "epoch", None)):
        raise TypeError(
            f"{name} must provide epochs of (images, labels), as mucudnn.data.Loader "
            f"does, got {reprlib.repr(batches)}; create one from arrays with "
            "Loader(ArrayDataset(images, labels), batch)"
        )


def image_and_label(batch: Any) -> tuple[Any, Any]:
    """Split a batch in images and labels; `TypeError` if it is no pair."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        parts = len(batch) if isinstance(batch, tuple | list) else type(batch).__name__
        raise TypeError(f"a batch must be a pair (images, labels), got {parts}")
    return batch[0], batch[1]


def _array(name: str, values: Any) -> Any:
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as e:
        raise TypeError(f"{name} must be an array or even lists of numbers: {e}") from e


_PART = 40
"""Bits of the step number; parts but the last count above, for different masks."""


class SharedArena:
    """Executors of placed graphs over one state and one arena.

    Args:
        tiers: Offload targets that the graphs use in turn; without planned tiers each
            has host memory of its own.
        replay: Whether launches are replayed as graphs.
        around: Additional calls around the nodes of training graphs.
        step_io: Transfers inputs and results of steps; closed with the arena.
    """

    def __init__(
        self,
        backend: Backend,
        placed: Sequence[PlacedStep],
        state: StateStore,
        tiers: OpenTiers,
        replay: bool = False,
        around: HookFactory | None = None,
        step_io: StepIO | None = None,
    ) -> None:
        self._tiers, self._step_io = tiers, step_io
        layouts = [p.layout for p in placed]
        self.nbytes = shared_bytes(layouts)
        self._executors = [
            Executor(
                backend,
                p.schedule,
                p.layout,
                p.plans,
                state,
                arena,
                host=tiers.of(p),
                host_buffers=state.host_buffers,
                replay=replay,
                step_io=step_io,
                around=around if trains(p.schedule.graph) else None,
            )
            for p, arena in zip(placed, arenas(backend, layouts), strict=True)
        ]
        self._current: Executor | None = None

    def take(self, index: int) -> Executor:
        """Return the executor of a graph, ready to run; `ValueError` if closed."""
        if not self._executors:
            raise ValueError(
                "this trainer is closed and its arena freed; create another one, and "
                "transfer the weights with save_weights and load_weights"
            )
        executor = self._executors[index]
        # Another graph overwrites the arena: bring the state in it to the host first.
        if self._current is not executor:
            self.park()
        self._current = executor
        return executor

    def park(self) -> None:
        """Copy the state out of the arena, so that it can be read."""
        if self._current is not None:
            self._current.park()
        self._current = None

    def close(self) -> None:
        """Free the arena and its host memory, and stop copy engines."""
        self.park()
        for executor in self._executors:
            executor.close()
        self._executors = []
        self._tiers.close()
        if self._step_io is not None:
            self._step_io.close()


class Stepper:
    """Takes the steps of a trainer."""

    def __init__(self, graphs: StepGraphs, arena: SharedArena) -> None:
        self._graph = graphs.steps[-1]
        self._arena = arena
        self._last = len(graphs.steps) - 1
        self._parts = graphs.parts
        n, *image = self._graph.tensors[IMAGE].shape
        _, *rest = self._graph.tensors[LABEL].shape
        self.batch: int = n * graphs.parts
        self._image_shape = (self.batch, *image)
        self._label_shape = (self.batch, *rest)
        self._classes = class_count(self._graph)

    def step(self, images: Any, labels: Any, rate: float, number: int) -> "StepResult":
        """Take step `number`; see `Trainer.step`."""
        launched = [
            self._arena.take(index).launch(feeds)
            for index, feeds in self._feeds(images, labels, rate, number)
        ]

        def found() -> tuple[float, int]:
            loss, correct = 0.0, 0
            for results in launched:
                part = read(self._graph, results.read())
                loss += part[0] / self._parts
                correct += part[1]
            return loss, correct

        return StepResult(
            found,
            lambda: all(results.ready for results in launched),
            labels=math.prod(self._label_shape),
            images=self.batch,
            learning_rate=rate,
        )

    def profile(
        self, images: Any, labels: Any, rate: float, number: int
    ) -> dict[str, float]:
        """Take step `number`; return the ms of every node of its last part."""
        nodes: dict[str, float] = {}
        for index, feeds in self._feeds(images, labels, rate, number):
            _, nodes = self._arena.take(index).run_timed(feeds)
        return nodes

    def _feeds(
        self, images: Any, labels: Any, rate: float, number: int
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the graphs to run with their inputs."""
        images, labels = as_images(images), as_labels(labels, self._classes)
        if images.shape != self._image_shape or labels.shape != self._label_shape:
            raise ValueError(
                f"a step takes images of shape {self._image_shape} and labels of shape "
                f"{self._label_shape}, got {images.shape} and {labels.shape}"
            )
        dtype = self._graph.tensors[LEARNING_RATE].dtype
        size = self.batch // self._parts
        for part in range(self._parts):
            last = part == self._parts - 1
            rows = slice(part * size, (part + 1) * size)
            # Parts draw different masks: all but the last count steps far above.
            feeds = {
                IMAGE: cast(self._graph, IMAGE, images[rows]),
                LABEL: cast(self._graph, LABEL, labels[rows]),
                LEARNING_RATE: np.array(rate, dtype),
                STEP: np.array(number + (0 if last else part + 1 << _PART)),
            }
            yield (self._last if last else 0), feeds


def allocate_step_memory(
    backend: Backend,
    graphs: StepGraphs,
    placed: Sequence[PlacedStep],
    budget: MemoryBudget | None,
    seed: int,
    replay: bool,
    around: HookFactory | None,
) -> tuple[StateStore, SharedArena, int]:
    """Return state, arena, and the bytes of both and of input buffers.

    The last training step decides about offloading. `seed` is that of the weights.
    """
    decided = placed[len(graphs.steps) - 1]
    tiers = OpenTiers(backend.device, budget.tiers if budget else (), placed)
    hosted, there = decided.schedule.hosted, tiers.of(decided)
    state = StateStore(
        backend.device, *graphs.steps, seed=seed, hosted=hosted, tiers=there
    )
    held = shared_bytes([p.layout for p in placed]) + state.nbytes
    inputs = sum(s.nbytes for g in graphs.steps for s in g.with_role(Role.INPUT))
    step_io, staged = step_io_of(backend, budget, held, inputs)
    arena = SharedArena(backend, placed, state, tiers, replay, around, step_io)
    return state, arena, held + staged


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StepResult:
    """Loss and correct answers of one step, computed before the weights changed.

    Reading either waits for the step to finish; meanwhile the next can be launched.

    Attributes:
        labels: Number of labels: one per image, or one per pixel.
        images: Number of images.
        learning_rate: Learning rate of the step.
    """

    _found: Callable[[], tuple[float, int]]
    _ready: Callable[[], bool]
    _: KW_ONLY
    labels: int
    images: int
    learning_rate: float

    @property
    def loss(self) -> float:
        """Mean loss over the labels."""
        return self._found()[0]

    @property
    def correct(self) -> int:
        """Number of correct answers."""
        return self._found()[1]

    @property
    def ready(self) -> bool:
        """True if the result can be read without waiting."""
        return self._ready()

    def _values(self) -> tuple[Any, ...]:
        return self.loss, self.correct, self.labels, self.images, self.learning_rate

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepResult):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __reduce__(self) -> Any:
        return known_result, self._values()

    def __repr__(self) -> str:
        names = ("loss", "correct", "labels", "images", "learning_rate")
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"StepResult({shown})"


def known_result(
    loss: float, correct: int, labels: int, images: int, learning_rate: float
) -> StepResult:
    """Return the result of a finished step."""
    return StepResult(
        lambda: (loss, correct),
        lambda: True,
        labels=labels,
        images=images,
        learning_rate=learning_rate,
    )


T = TypeVar("T")


def warm_median_ms(times_ms: Iterable[float]) -> float:
    """Return the median time, without the first step if there are others; or 0."""
    times = [*times_ms]
    return statistics.median(times[1:] or times or [0.0])


class StepTimes:
    """Times steps, and keeps the 101 most recent ones."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marks: deque[tuple[Event, Event]] = deque(maxlen=101)

    @property
    def median_ms(self) -> float:
        """Median of recent steps without the first; waits for the last of them."""
        return warm_median_ms(map(self._ms, self._marks))

    @property
    def last_ms(self) -> float:
        """Time of the last step; waits for the step."""
        return self._ms(self._marks[-1])

    def timed(self, take: Callable[[], T]) -> tuple[T, float]:
        """Take a step; return its result and its ms."""
        start = self._device.record()
        found = take()
        return found, self._device.elapsed_ms(start, self._device.record())

    def recorded(self, take: Callable[[], T]) -> T:
        """Launch a step and keep its time; does not wait for the step."""
        start = self._device.record()
        found = take()
        self._marks.append((start, self._device.record()))
        return found

    def _ms(self, marks: tuple[Event, Event]) -> float:
        return self._device.elapsed_ms(*marks)
