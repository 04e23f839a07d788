"""One process's part of every batch."""

from collections.abc import Iterator

from mucudnn.data.loader import Batch, Loader

__all__ = ["PartOfBatches"]


class PartOfBatches:
    """Epochs of one part of every batch of a loader.

    Batches are made whole, as one process alone makes them: their order, and what is
    drawn for their images, is the same.

    Args:
        loader: Of whole batches.
        start: The first image of the part.
        stop: The one behind the last.
        pieces: Into how many of one size a batch falls, of each of which the part is.
    """

    def __init__(self, loader: Loader, start: int, stop: int, pieces: int = 1) -> None:
        self._loader = loader
        size = loader.batch // pieces
        self._rows = [p * size + i for p in range(pieces) for i in range(start, stop)]

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._loader)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, from one on.

        Raises:
            ValueError: There is no such epoch or batch.
        """
        for images, labels in self._loader.epoch(epoch, start):
            yield Batch(images[self._rows], labels[self._rows])
