"""Batches of a data set: ordered, transformed and prefetched.

The order of an epoch depends only on the seed and the epoch; the random numbers of a
batch's transform depend on these and the batch's position. Neither the number of
threads nor the first batch matters, so training resumes bit-exactly from (epoch,
batch).
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mucudnn.arguments import a_flag, a_function, an_integer
from mucudnn.data.dataset import Dataset, Images, Labels, checked_dataset
from mucudnn.data.prefetch import in_order
from mucudnn.data.transforms import Transform

__all__ = ["Batch", "Loader"]

_ORDER, _TRANSFORM = range(2)


class Batch(NamedTuple):
    """Input of a training step: images (n, C, H, W) and labels (n,)."""

    images: Images
    labels: Labels


class Loader:
    """Epochs of a data set in batches.

    Args:
        dataset: Data set, read from `workers` threads at once.
        batch: Images in a batch; the last batch may be smaller.
        shuffle: Use a random order for each epoch, instead of the data set's order.
        seed: Seed of orders and transforms.
        transform: Function applied to each batch.
        drop_last: Omit a smaller last batch.
        workers: Number of threads; 0 reads on the caller's thread.
        depth: Number of batches prepared ahead, at least one per worker.

    Raises:
        ValueError: A number is out of range, or there is no full batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        transform: Transform | None = None,
        drop_last: bool = False,
        workers: int = 1,
        depth: int = 2,
    ) -> None:
        an_integer("batch", batch, 1)
        an_integer("seed", seed, 0)
        an_integer("workers", workers, 0)
        an_integer("depth", depth, 1)
        checked_dataset(dataset)
        a_flag("shuffle", shuffle)
        a_flag("drop_last", drop_last)
        if transform is not None:
            a_function("transform", transform, "a function of (images, rng)")
        if drop_last and len(dataset) < batch:
            raise ValueError(
                f"a data set of {len(dataset)} images has no full batch of {batch}; "
                "take a smaller one or keep the last"
            )
        self.dataset = dataset
        self.batch = batch
        self._shuffle = shuffle
        self._seed = seed
        self._transform = transform
        self._drop_last = drop_last
        self._workers = workers
        self._depth = depth

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        count = len(self.dataset)
        return count // self.batch if self._drop_last else -(-count // self.batch)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of one epoch.

        Closing or dropping the iterator ends its threads.

        Args:
            epoch: Number of the epoch, from 0.
            start: First batch, to resume an epoch; at most `len(self)`.

        Raises:
            ValueError: The epoch or batch is out of range.
        """
        an_integer("epoch", epoch)
        an_integer("start", start)
        if epoch < 0 or not 0 <= start <= len(self):
            raise ValueError(
                f"epochs count from 0 and start from 0 to {len(self)}; got epoch "
                f"{epoch}, start {start}"
            )
        order = np.arange(len(self.dataset))
        if self._shuffle:
            np.random.default_rng([self._seed, _ORDER, epoch]).shuffle(order)
        make = functools.partial(self._make, epoch, order)
        jobs = range(start, len(self))
        return in_order(make, jobs, workers=self._workers, depth=self._depth)

    def _make(self, epoch: int, order: NDArray[np.intp], index: int) -> Batch:
        chosen = order[index * self.batch : (index + 1) * self.batch]
        images, labels = self.dataset.read(chosen)
        if self._transform is not None:
            rng = np.random.default_rng([self._seed, _TRANSFORM, epoch, index])
            images = self._transform(images, rng)
        return Batch(images, labels)
