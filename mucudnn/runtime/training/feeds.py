"""What a caller feeds a network with, checked before anything runs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mucudnn.ir.graph import Graph
from mucudnn.ir.tensor import TensorSpec

__all__ = [
    "as_images",
    "as_labels",
    "cast",
    "check_batches",
    "fed",
    "image_and_label",
]


def fed(spec: TensorSpec, feeds: Mapping[str, Any]) -> Any:
    """The NumPy array for an input.

    Raises:
        ValueError: It is missing, or of another shape or type.
    """
    value = feeds.get(spec.name)
    if value is None:
        raise ValueError(f"input {spec.name!r} was not given")
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise ValueError(
            f"input {spec.name!r} must be {spec.dtype} {spec.shape}, got "
            f"{value.dtype} {value.shape}"
        )
    return value


def cast(graph: Graph, name: str, values: Any) -> Any:
    """An input's values in its data type."""
    return np.asarray(values).astype(graph.tensors[name].dtype, copy=False)


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
