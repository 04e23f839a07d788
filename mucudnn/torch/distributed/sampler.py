"""Each rank's share of every batch, in the data order of one device."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch.utils.data import Sampler

__all__ = ["ShareSampler"]


class ShareSampler(Sampler[list[int]]):  # type: ignore[misc]
    """A batch sampler that takes one rank's part of each batch of another.

    The other one is what a single device would use, made and seeded alike on every
    rank: so the batches are the same as there, and in the same order. It serves as the
    `batch_sampler` of a `DataLoader`.

    Args:
        batches: Of one device, the same on every rank.
        shares: Samples of a batch -> samples of every rank.
        rank: Whose part is taken.
        skip: Batches to leave out the first time, of an epoch that is resumed.
        before: Called before each epoch.
        first: Called with the first whole batch of each.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[int]],
        shares: Callable[[int], Sequence[int]],
        rank: int,
        *,
        skip: int = 0,
        before: Sequence[Callable[[], object]] = (),
        first: Sequence[Callable[[Sequence[int]], object]] = (),
    ) -> None:
        self._batches = batches
        self._shares = shares
        self._rank = rank
        self._skip = skip
        self._before = before
        self._first = first

    def __iter__(self) -> Iterator[list[int]]:
        """One epoch.

        Raises:
            ValueError: A batch has fewer samples than there are ranks.
        """
        for call in self._before:
            call()
        skip, self._skip = self._skip, 0
        for number, batch in enumerate(self._batches):
            if number < skip:
                continue
            if number == skip:
                for check in self._first:
                    check(batch)
            samples = self._shares(len(batch))
            start = sum(samples[: self._rank])
            yield list(batch[start : start + samples[self._rank]])

    def __len__(self) -> int:
        """Batches of an epoch, as many as on one device."""
        return len(self._batches)  # type: ignore[arg-type]
