"""What a step found out, read when it is asked for: a device may still compute it."""

from collections.abc import Callable
from typing import Any

__all__ = ["StepResult", "known_result"]


class StepResult:
    """What a step found out about its batch, before it changed the weights.

    Reading the loss or the right answers waits for the step where it is not done; a
    caller that does not read them goes on to launch the next one.

    Attributes:
        labels: How many labels there are: one an image, or one a pixel.
        images: How many images.
        learning_rate: What the step was taken with.

    Args:
        found: Gives loss and right answers, waiting for them.
        ready: Tells whether nothing has to be waited for.
        labels: See above.
        images: See above.
        learning_rate: See above.
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
        """Mean over the labels."""
        return self._found()[0]

    @property
    def correct(self) -> int:
        """Right answers."""
        return self._found()[1]

    @property
    def ready(self) -> bool:
        """Whether reading waits for nothing."""
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
    """The result of a step that is done."""
    return StepResult(
        lambda: (loss, correct),
        lambda: True,
        labels=labels,
        images=images,
        learning_rate=learning_rate,
    )
