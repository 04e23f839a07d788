"""How good a network is on a set of images, of any number."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mucudnn.ir.graph import Graph, Role
from mucudnn.runtime.executor import Executor

__all__ = [
    "IMAGE",
    "LABEL",
    "Evaluation",
    "Evaluator",
    "as_images",
    "as_labels",
    "cast",
    "check_batches",
    "class_count",
    "image_and_label",
    "read",
]

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
        self._classes = class_count(graph)
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
        check_batches("batches", batches)
        loss, correct, labels = 0.0, 0, 0
        for images, wanted in map(image_and_label, batches.epoch(0)):
            found = self._on(as_images(images), as_labels(wanted, self._classes))
            loss += found.loss * found.labels
            correct += found.correct
            labels += found.labels
        if labels == 0:
            raise ValueError("there is no image to evaluate on")
        return Evaluation(loss / labels, correct, labels)

    def _on(self, images: Any, labels: Any) -> Evaluation:
        size, full = len(images), self._batch
        shape = self._graph.tensors[IMAGE].shape
        rest = self._graph.tensors[LABEL].shape[1:]
        if images.shape[1:] != shape[1:] or labels.shape != (size, *rest):
            raise ValueError(
                f"evaluation takes images of shape {('n', *shape[1:])} and labels of "
                f"shape {('n', *rest)}, got {images.shape} and {labels.shape}"
            )
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


def as_images(images: Any) -> Any:
    """An array of numbers, from one or from nested lists.

    Raises:
        TypeError: It is something else, or the lists have several lengths.
    """
    found = _array("images", images)
    if found.dtype.kind not in "buif":
        raise TypeError(f"images must be numbers, got {found.dtype} {found.shape}")
    return found


def as_labels(labels: Any, classes: int | None) -> Any:
    """An array of classes, from one or from a list.

    Raises:
        TypeError: It is something else.
        ValueError: A label is no class.
    """
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


def class_count(graph: Graph) -> int | None:
    """Classes that a network tells apart; None where its loss does not count them."""
    for node in graph.nodes:
        if node.op == "softmax_cross_entropy" and LABEL in node.inputs:
            return graph.tensors[node.inputs[0]].shape[1]
    return None


def check_batches(name: str, batches: object) -> None:
    """Refuse what has no epochs.

    Raises:
        TypeError: It has none.
    """
    if not callable(getattr(batches, "epoch", None)):
        raise TypeError(
            f"{name} must have epochs of (images, labels), as a mucudnn.data.Loader "
            f"has, got {batches!r}; Loader(ArrayDataset(images, labels), batch) makes "
            "one of arrays"
        )


def image_and_label(batch: Any) -> tuple[Any, Any]:
    """The two halves of a batch.

    Raises:
        TypeError: It has not two.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        parts = len(batch) if isinstance(batch, tuple | list) else type(batch).__name__
        raise TypeError(f"a batch is a pair (images, labels), got {parts}")
    return batch[0], batch[1]


def _array(name: str, values: Any) -> Any:
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as e:
        raise TypeError(f"{name} must be an array or even lists of numbers: {e}") from e


def cast(graph: Graph, name: str, values: Any) -> Any:
    """An input's values in its data type."""
    return np.asarray(values).astype(graph.tensors[name].dtype, copy=False)


def read(graph: Graph, found: Mapping[str, Any]) -> tuple[float, int]:
    """Loss and right answers among the outputs of a run; 0 where none are counted."""
    loss, *counts = graph.outputs
    return float(found[loss]), int(found[counts[0]]) if counts else 0
