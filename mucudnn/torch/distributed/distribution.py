"""A model trained in step on unequal devices: what `distribute` returns."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler

from mucudnn.ir.fleet import Fleet
from mucudnn.passes.fleet import (
    FleetPlan,
    drifted,
    plan_of,
    replanned,
    share_times,
    split_batch,
)
from mucudnn.runtime.distributed.collectives import check_alike
from mucudnn.torch.distributed.collectives import TorchCollectives, lost_rank
from mucudnn.torch.distributed.sampler import ShareSampler
from mucudnn.torch.distributed.weights import SampleWeights

__all__ = ["Distribution"]


_SHOWN = 8
"""Samples that batches are told apart by."""


def _check_last(batches: Iterable[Sequence[int]], least: int) -> None:
    """Refuse what is known to fail at the end of an epoch.

    Raises:
        ValueError: It would.
    """
    if not isinstance(batches, BatchSampler) or batches.drop_last:
        return
    last = len(batches.sampler) % batches.batch_size
    if 0 < last < least:
        raise ValueError(
            f"the last batch of an epoch has {last} samples, of which the ranks take "
            f"{least} at the least: drop_last=True leaves it out, or choose another "
            "batch size"
        )


class Distribution:
    """A model whose mini-batches are shared out as its ranks can end together.

    As a context manager it says in one line when another rank is gone.

    Args:
        model: Wrapped, its gradients weighted.
        fleet: The ranks as they were measured.
        plan: How a whole mini-batch is shared out.
        together: What the ranks do together.
        weights: How much each rank's gradients count.
        at_least: Samples of every rank.

    Attributes:
        model: What to call; a `DistributedDataParallel`.
        plan: How a mini-batch is shared out now.
        fleet: The ranks as they were measured.
        rank: The number of this one.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        fleet: Fleet,
        plan: FleetPlan,
        together: TorchCollectives,
        weights: SampleWeights,
        at_least: int,
    ) -> None:
        self.model = model
        self.fleet = fleet
        self.plan = plan
        self.rank = together.rank
        self._together = together
        self._weights = weights
        self._now = fleet
        self._at_least = at_least
        self._splits: dict[int, tuple[int, ...]] = {plan.batch: plan.samples}

    @property
    def samples(self) -> int:
        """This rank's share of a mini-batch."""
        return self.plan.samples[self.rank]

    def batches(
        self,
        of_one_device: Iterable[Sequence[int]],
        *,
        skip: int = 0,
        keep_up: bool = True,
    ) -> ShareSampler:
        """This rank's share of each batch of one device's batch sampler.

            order = RandomSampler(data, generator=torch.Generator().manual_seed(0))
            batches = work.batches(BatchSampler(order, 256, drop_last=False))
            loader = DataLoader(data, batch_sampler=batches)

        Args:
            of_one_device: Made and seeded alike on every rank.
            skip: Batches to leave out in the first epoch, of one that is resumed.
            keep_up: Whether the ranks see before each epoch if their times are still
                as planned, and share out anew where that pays; and if its first batch
                is the same on all of them.

        Raises:
            ValueError: The last batch of an epoch has fewer samples than the ranks
                together take at the least.
        """
        _check_last(of_one_device, len(self.fleet.ranks) * self._at_least)
        before = (self.replan,) if keep_up else ()
        first = (self._check_batch,) if keep_up else ()
        return ShareSampler(
            *(of_one_device, self.shares, self.rank),
            skip=skip,
            before=before,
            first=first,
        )

    def _check_batch(self, batch: Sequence[int]) -> None:
        words = ", ".join(map(str, batch[:_SHOWN]))
        check_alike(self._together, {"the first batch": f"{len(batch)} from {words}"})

    def shares(self, samples: int) -> tuple[int, ...]:
        """How a batch is shared out, of any size that every rank has a part of.

        Raises:
            ValueError: It has fewer samples than there are ranks.
        """
        if samples not in self._splits:
            found = split_batch(self._now, samples, at_least=self._at_least)
            self._splits[samples] = found.samples
        return self._splits[samples]

    def backward(self, loss_fn: Callable[..., Any], inputs: Any, *targets: Any) -> Any:
        """Forward and backward of this rank's share, in as many passes as it needs.

        Args:
            loss_fn: Of the model's result and the targets; a mean over samples.
            inputs: The model's input, a tensor.
            targets: Tensors with the same first axis.

        Returns:
            The mean loss of the share, without a graph.
        """
        at_once = self.fleet.ranks[self.rank].most_at_once
        passes = -(-inputs.shape[0] // max(1, at_once))
        parts = [torch.tensor_split(t, passes) for t in (inputs, *targets)]
        losses = []
        for number, (x, *rest) in enumerate(zip(*parts, strict=True), start=1):
            apart = number < len(parts[0])
            with self.model.no_sync() if apart else contextlib.nullcontext():
                loss = loss_fn(self.model(x), *rest) * (x.shape[0] / inputs.shape[0])
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over all samples of a batch, from each rank's mean over its own."""
        own = torch.tensor(self._weights.counted, device=loss.device)
        both = torch.stack([loss.detach().double() * own, own.double()])
        self._together.all_reduce(both).wait()
        if self._weights.reduction == "sum":
            return both[0].to(loss.dtype)
        return (both[0] / both[1]).to(loss.dtype)

    def replan(self) -> bool:
        """Share out anew if ranks have left their tables and it pays; all call it.

        Returns:
            Whether anything changed.
        """
        times = share_times(self.fleet.ranks[self.rank], self.plan.batch)
        factor = self._weights.clock.factor(lambda n: times.time_ms(min(n, times.most)))
        factors = self._together.all_gather(factor)
        found = replanned(
            self.fleet, self.plan.samples, factors, at_least=self._at_least
        )
        if found is None:
            return False
        self._now = drifted(self.fleet, factors)
        self.plan = plan_of(self._now, found.samples)
        self._splits = {found.batch: found.samples}
        return True

    def __enter__(self) -> "Distribution":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and (lost := lost_rank(error)) is not None:
            raise lost from error
