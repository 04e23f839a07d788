"""A training step: a batch, in one part or several, fed to the graphs of the step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mucudnn.models import IMAGE, LABEL, class_count
from mucudnn.passes.graph.optimizer_updates import LEARNING_RATE, STEP
from mucudnn.runtime.training.evaluation import read
from mucudnn.runtime.training.feeds import as_images, as_labels, cast
from mucudnn.runtime.training.shared_arena import SharedArena
from mucudnn.runtime.training.training_graphs import TrainingGraphs

__all__ = ["StepResult", "Stepper"]

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


class Stepper:
    """Takes the steps of a trainer.

    Args:
        graphs: Of the network.
        arena: Runs them.
    """

    def __init__(self, graphs: TrainingGraphs, arena: SharedArena) -> None:
        self._graph = graphs.steps[-1]
        self._arena = arena
        self._micro, self._last = 0, len(graphs.steps) - 1
        self._parts = graphs.parts
        n, *image = self._graph.tensors[IMAGE].shape
        _, *rest = self._graph.tensors[LABEL].shape
        self.batch: int = n * graphs.parts
        self._image_shape = (self.batch, *image)
        self._label_shape = (self.batch, *rest)
        self._classes = class_count(self._graph)

    def step(self, images: Any, labels: Any, rate: float, number: int) -> StepResult:
        """Take step `number`; see `Trainer.step`."""
        loss, correct = 0.0, 0
        for index, feeds in self._feeds(images, labels, rate, number):
            part = read(self._graph, self._arena.take(index).run(feeds))
            loss += part[0] / self._parts
            correct += part[1]
        return StepResult(loss, correct, math.prod(self._label_shape), self.batch, rate)

    def profile(
        self, images: Any, labels: Any, rate: float, number: int
    ) -> dict[str, float]:
        """Take step `number`; returns the ms of every node of its last part."""
        nodes: dict[str, float] = {}
        for index, feeds in self._feeds(images, labels, rate, number):
            _, nodes = self._arena.take(index).run_timed(feeds)
        return nodes

    def _feeds(
        self, images: Any, labels: Any, rate: float, number: int
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Which graph to run next, and on what."""
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
            feeds = {
                IMAGE: cast(self._graph, IMAGE, images[rows]),
                LABEL: cast(self._graph, LABEL, labels[rows]),
                LEARNING_RATE: np.array(rate, dtype),
                STEP: np.array(number + (0 if last else part + 1 << _PART)),
            }
            yield (self._last if last else self._micro), feeds
