"""Evaluate and run a network on any number of images.

Inputs of evaluation and training are validated here before anything runs.
"""

import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mucudnn.ir.graph import Graph
from mucudnn.ir.tensor import Role
from mucudnn.models import IMAGE, LABEL, class_count
from mucudnn.passes.graph.training_step import answers_of
from mucudnn.runtime.executor import Executor


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
            found = self._evaluate_batch(
                as_images(images), as_labels(wanted, self._classes)
            )
            loss += found.loss * found.labels
            correct += found.correct
            labels += found.labels
        if labels == 0:
            raise ValueError("there is no image to evaluate on")
        return Evaluation(loss / labels, correct, labels)

    def predict(self, images: Any) -> Any:
        """Return the network's answers to images; see `Trainer.predict`."""
        if self._answers is None:
            raise ValueError(
                "this network compares nothing with its labels, so it is not known "
                "which of its tensors are answers"
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

    def _evaluate_batch(self, images: Any, labels: Any) -> Evaluation:
        size, full = len(images), self._batch
        rest = self._graph.tensors[LABEL].shape[1:]
        if list(images.shape[1:]) != self._image or labels.shape != (size, *rest):
            raise ValueError(
                f"evaluation takes images of shape {('n', *self._image)} and labels of "
                f"shape {('n', *rest)}, got {images.shape} and {labels.shape}"
            )
        if size >= full:
            return self._figures(images, labels)
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
            f"labels must be whole numbers, one an image, got {found.dtype} "
            f"{found.shape}"
        )
    if classes is not None and found.size:
        low, high = int(found.min()), int(found.max())
        if low < 0 or high >= classes:
            raise ValueError(
                f"labels must be from 0 to {classes - 1}, the network has {classes} "
                f"classes; they reach from {low} to {high}"
            )
    return found


def check_batches(name: str, batches: object) -> None:
    """Raise `TypeError` unless `batches` has epochs."""
    if not callable(getattr(batches, "epoch", None)):
        raise TypeError(
            f"{name} must have epochs of (images, labels), as a mucudnn.data.Loader "
            f"has, got {reprlib.repr(batches)}; Loader(ArrayDataset(images, labels), "
            "batch) makes one of arrays"
        )


def image_and_label(batch: Any) -> tuple[Any, Any]:
    """Split a batch in images and labels; `TypeError` if it is no pair."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        parts = len(batch) if isinstance(batch, tuple | list) else type(batch).__name__
        raise TypeError(f"a batch is a pair (images, labels), got {parts}")
    return batch[0], batch[1]


def _array(name: str, values: Any) -> Any:
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as e:
        raise TypeError(f"{name} must be an array or even lists of numbers: {e}") from e
