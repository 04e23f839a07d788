"""Where training stands, and what it has found so far."""

from dataclasses import dataclass, replace

from mucudnn.runtime.training.evaluation import Evaluation
from mucudnn.runtime.training.stepping import StepResult

__all__ = ["EpochReport", "Position"]


@dataclass(frozen=True, slots=True)
class EpochReport:
    """What came of an epoch.

    Attributes:
        epoch: From 0.
        loss: Mean over the training images, each as the step that saw it found it.
        accuracy: Share of right answers, likewise.
        test_loss: Mean over the test images with the weights at the end; None if
            nothing was evaluated.
        test_accuracy: Share of right answers, likewise.
        images_per_s: Training images a second, waiting for data included.
        learning_rate: Of the last step.
    """

    epoch: int
    loss: float
    accuracy: float
    test_loss: float | None
    test_accuracy: float | None
    images_per_s: float
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Position:
    """Where training stands, and the sums of the epoch so far.

    Attributes:
        epoch: The current one, from 0.
        batch: Batches of it that are done.
        steps: Steps of the whole training that are done.
        loss: Sum over the labels seen in this epoch.
        correct: Right answers among them.
        labels: How many labels; an image has one, or one a pixel.
        images: How many images.
        ms: Time that this epoch took so far.
        learning_rate: Of the last step.
    """

    epoch: int = 0
    batch: int = 0
    steps: int = 0
    loss: float = 0.0
    correct: int = 0
    labels: int = 0
    images: int = 0
    ms: float = 0.0
    learning_rate: float = 0.0

    def after(self, result: StepResult, ms: float) -> "Position":
        """One step further, `ms` later."""
        return replace(
            self,
            batch=self.batch + 1,
            steps=self.steps + 1,
            loss=self.loss + result.loss * result.labels,
            correct=self.correct + result.correct,
            labels=self.labels + result.labels,
            images=self.images + result.images,
            ms=self.ms + ms,
            learning_rate=result.learning_rate,
        )

    def report(self, tested: Evaluation | None) -> EpochReport:
        """What has come of the epoch so far."""
        return EpochReport(
            epoch=self.epoch,
            loss=self.mean_loss,
            accuracy=self.accuracy,
            test_loss=None if tested is None else tested.loss,
            test_accuracy=None if tested is None else tested.accuracy,
            images_per_s=self.images_per_s,
            learning_rate=self.learning_rate,
        )

    @property
    def mean_loss(self) -> float:
        """Mean loss of this epoch so far."""
        return self.loss / max(1, self.labels)

    @property
    def accuracy(self) -> float:
        """Share of right answers in this epoch so far."""
        return self.correct / max(1, self.labels)

    @property
    def images_per_s(self) -> float:
        """Training images a second in this epoch so far; 0 where no time passed."""
        return self.images / self.ms * 1e3 if self.ms else 0.0
