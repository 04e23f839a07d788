"""Batches of a data set: ordered, transformed, prefetched and shared among ranks.

The order of an epoch depends only on the seed and the epoch; the random numbers of a
batch's transform depend on these and the batch's position. Neither the number of
threads nor the first batch matters, so training resumes bit-exactly from (epoch,
batch).
"""

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mucudnn.arguments import check_bool, check_function, check_integer
from mucudnn.data.dataset import Dataset, Images, Labels, checked_dataset
from mucudnn.data.transforms import Transform

_ORDER, _TRANSFORM = range(2)


class Batch(NamedTuple):
    """Input of a training step: images (n, C, H, W) and labels (n,)."""

    images: Images
    labels: Labels


@dataclass(frozen=True, slots=True, eq=False)
class Loader:
    """Epochs of a data set in batches.

    Attributes:
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

    dataset: Dataset
    batch: int
    _: KW_ONLY
    shuffle: bool = True
    seed: int = 0
    transform: Transform | None = None
    drop_last: bool = False
    workers: int = 1
    depth: int = 2

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("seed", 0), ("workers", 0), ("depth", 1)):
            check_integer(name, getattr(self, name), least)
        checked_dataset(self.dataset)
        check_bool("shuffle", self.shuffle)
        check_bool("drop_last", self.drop_last)
        if self.transform is not None:
            check_function("transform", self.transform, "a function of (images, rng)")
        if self.drop_last and len(self.dataset) < self.batch:
            raise ValueError(
                f"a data set of {len(self.dataset)} images has no full batch of "
                f"{self.batch}; use a smaller batch or keep the last one"
            )

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        count = len(self.dataset)
        return count // self.batch if self.drop_last else -(-count // self.batch)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of one epoch.

        Closing or dropping the iterator ends its threads.

        Args:
            epoch: Number of the epoch, from 0.
            start: First batch, to resume an epoch; at most `len(self)`.

        Raises:
            ValueError: The epoch or batch is out of range.
        """
        check_integer("epoch", epoch)
        check_integer("start", start)
        if epoch < 0 or not 0 <= start <= len(self):
            raise ValueError(
                f"epochs count from 0, and start is from 0 to {len(self)}; got epoch "
                f"{epoch}, start {start}"
            )
        order = np.arange(len(self.dataset))
        if self.shuffle:
            np.random.default_rng([self.seed, _ORDER, epoch]).shuffle(order)
        make = functools.partial(self._make, epoch, order)
        jobs = range(start, len(self))
        return ordered_map(make, jobs, workers=self.workers, depth=self.depth)

    def _make(self, epoch: int, order: NDArray[np.intp], index: int) -> Batch:
        chosen = order[index * self.batch : (index + 1) * self.batch]
        images, labels = self.dataset.read(chosen)
        if self.transform is not None:
            rng = np.random.default_rng([self.seed, _TRANSFORM, epoch, index])
            images = self.transform(images, rng)
        return Batch(images, labels)


T = TypeVar("T")


def ordered_map(
    make: Callable[[int], T], jobs: Sequence[int], *, workers: int, depth: int
) -> Iterator[T]:
    """Yield `make(job)` of every job, in order, made by `workers` threads.

    Up to `depth` results, but at least one per worker, are made ahead. Without workers,
    each is made on demand on the caller's thread. An exception of `make` is raised in
    place of its result, with its own traceback; no later job is begun. However the
    generator ends, its threads end with it. Workers do not reference the generator, so
    that it can be collected while they run.
    """
    if workers == 0:
        yield from map(make, jobs)
        return
    process, ahead, last = os.getpid(), max(depth, workers), len(jobs)
    threads = set[int]()
    pool = ThreadPoolExecutor(
        workers, "mucudnn-data", lambda: threads.add(threading.get_ident())
    )

    def run(position: int) -> T:
        nonlocal last
        if position > last:
            raise CancelledError
        try:
            return make(jobs[position])
        except BaseException:
            last = min(last, position)
            raise

    passed = iter(range(len(jobs)))
    awaited = deque(pool.submit(run, i) for i in islice(passed, ahead))
    try:
        for job in jobs:
            if os.getpid() != process:  # a forked process has no workers
                yield make(job)
                continue
            awaited.extend(pool.submit(run, i) for i in islice(passed, 1))
            # Not assigned to a name, which would keep a batch that the caller drops.
            yield awaited.popleft().result()
    finally:
        if os.getpid() == process:
            # The garbage collector may run this on a worker, which cannot join itself.
            wait = threading.get_ident() not in threads
            pool.shutdown(wait, cancel_futures=True)


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
        """Iterate over the batches of one epoch, from batch `start` on."""
        for images, labels in self._loader.epoch(epoch, start):
            yield Batch(images[self._rows], labels[self._rows])
