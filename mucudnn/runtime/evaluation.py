"""How good a network is on a set of images, of any number."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mucudnn.ir.graph import Graph, Role
from mucudnn.runtime.executor import Executor

__all__ = ["IMAGE", "LABEL", "Evaluation", "Evaluator", "cast", "read"]

IMAGE, LABEL = "image", "label"
"""Inputs of every network that is trained or evaluated here."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How good the weights are on some images.

    Attributes:
        loss: Mean over the labels.
        correct: Right answers.
        labels: How many labels there are: one an image, or one a pixel.
    """

    loss: float
    correct: int
    labels: int

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.correct / max(1, self.labels)


class Epochs(Protocol):
    """What can be evaluated on, such as a `mucudnn.data.Loader`."""

    def epoch(self, epoch: int, start: int = 0) -> Iterable[tuple[Any, Any]]:
        """The (images, labels) of one epoch."""
        ...


class Evaluator:
    """Runs a network's graph for evaluation.

    A last batch that is smaller is filled up with copies of its first image. What
    those contribute is known from a batch of nothing else: in evaluation an image
    knows nothing of its neighbours.

    Args:
        graph: With the inputs `image` and `label`; its outputs are the loss and how
            many answers are right.
        executor: Runs it.
    """

    def __init__(self, graph: Graph, executor: Executor) -> None:
        self._graph = graph
        self._executor = executor
        self._batch = graph.tensors[IMAGE].shape[0]
        self._others = {
            spec.name: np.zeros(spec.shape, spec.dtype)
            for spec in graph.with_role(Role.INPUT)
            if spec.name not in (IMAGE, LABEL)
        }

    def evaluate(self, batches: Epochs) -> Evaluation:
        """Loss and accuracy on the images of one epoch.

        Raises:
            ValueError: Images have another shape, or there are none.
        """
        loss, correct, labels = 0.0, 0, 0
        for images, wanted in batches.epoch(0):
            found = self._on(images, wanted)
            loss += found.loss * found.labels
            correct += found.correct
            labels += found.labels
        if labels == 0:
            raise ValueError("there is no image to evaluate on")
        return Evaluation(loss / labels, correct, labels)

    def _on(self, images: Any, labels: Any) -> Evaluation:
        size, full = len(images), self._batch
        if size >= full:
            return self._run(images, labels)
        first = np.zeros(full, int)
        filled = np.concatenate([np.arange(size), first[size:]])
        padded = self._run(images[filled], labels[filled])
        alone = self._run(images[first], labels[first])
        copies = full - size
        return Evaluation(
            (padded.loss * full - alone.loss * copies) / size,
            padded.correct - alone.correct * copies // full,
            labels.size,
        )

    def _run(self, images: Any, labels: Any) -> Evaluation:
        feeds = {
            IMAGE: cast(self._graph, IMAGE, images),
            LABEL: cast(self._graph, LABEL, labels),
        }
        found = self._executor.run(feeds | self._others)
        return Evaluation(*read(self._graph, found), labels.size)


def cast(graph: Graph, name: str, values: Any) -> Any:
    """An input's values in its data type."""
    return np.asarray(values).astype(graph.tensors[name].dtype, copy=False)


def read(graph: Graph, found: Mapping[str, Any]) -> tuple[float, int]:
    """Loss and right answers among the outputs of a run; 0 where none are counted."""
    loss, *counts = graph.outputs
    return float(found[loss]), int(found[counts[0]]) if counts else 0
