"""The result of a step, read on demand, as a device may still be computing it."""

from collections.abc import Callable
from typing import Any

__all__ = ["StepResult", "known_result"]


class StepResult:
    """Loss and correct answers of one step, computed before the weights changed.

    Reading either waits for the step to finish; a caller that does not read them can
    launch the next step meanwhile.

    Attributes:
        labels: Number of labels: one per image, or one per pixel.
        images: Number of images.
        learning_rate: Learning rate of the step.

    `found` waits for loss and correct answers; `ready` returns whether that is needed.
    """

    __slots__ = ("_found", "_ready", "images", "labels", "learning_rate")

    def __init__(
        self,
        found: Callable[[], tuple[float, int]],
        ready: Callable[[], bool],
        *,
        labels: int,
        images: int,
        learning_rate: float,
    ) -> None:
        self._found, self._ready = found, ready
        self.labels, self.images = labels, images
        self.learning_rate = learning_rate

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
        """Whether reading does not wait."""
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
        return (
            f"StepResult(loss={self.loss!r}, correct={self.correct!r}, "
            f"labels={self.labels!r}, images={self.images!r}, "
            f"learning_rate={self.learning_rate!r})"
        )


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
