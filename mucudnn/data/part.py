"""One rank's part of every batch."""

from collections.abc import Iterator

from mucudnn.data.loader import Batch, Loader

__all__ = ["PartOfBatches"]


class PartOfBatches:
    """Epochs of one part of every batch of a loader.

    Whole batches are made as in a single process, with the same order and random
    numbers, and then cut.

    Args:
        loader: Loader of whole batches.
        start: First image of the part.
        stop: Image after the last.
        pieces: Number of equal pieces of a batch, of each of which the part is taken.
    """

    def __init__(self, loader: Loader, start: int, stop: int, pieces: int = 1) -> None:
        self._loader = loader
        size = loader.batch // pieces
        self._rows = [p * size + i for p in range(pieces) for i in range(start, stop)]

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self._loader)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of one epoch, from batch `start` on.

        Raises:
            ValueError: The epoch or batch is out of range.
        """
        for images, labels in self._loader.epoch(epoch, start):
            yield Batch(images[self._rows], labels[self._rows])
