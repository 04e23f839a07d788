"""Gradients weighted by samples: the mean of a mini-batch that is shared out unevenly.

A rank's loss is the mean over its n_i samples, so the gradient of the whole batch is

    sum of n_i / N * gradient_i,    N = sum of n_i

where DistributedDataParallel takes the plain mean over ranks. Its communication hook is
the place to weigh. N is summed over the ranks once a step, ahead of the first
gradients: nobody has to tell it, and a last batch that is smaller is weighed right too.
Not earlier: ranks may run their shares in different numbers of passes, and collectives
of the wrapped model lie between those.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from mucudnn.torch.distributed.clock import StepClock
from mucudnn.torch.distributed.collectives import begin_sum

__all__ = ["Count", "Reduction", "SampleWeights", "samples_of", "weigh_gradients"]

Count = Callable[[Sequence[Any], Mapping[str, Any]], float]
"""The arguments of a forward pass -> how much its loss is a mean of."""

Reduction = Literal["mean", "sum"]
"""What the loss does with its samples."""


def samples_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The first axis of the first tensor among a forward pass's arguments.

    Raises:
        ValueError: There is no tensor with an axis.
    """
    found = _first_axis(args, kwargs)
    if found is None:
        raise ValueError(
            "the model is called without a tensor whose first axis is the batch; say "
            "how many samples there are with distribute(count=...)"
        )
    return found


def _first_axis(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    return None


class SampleWeights:
    """How much the gradients of this rank count.

    Args:
        group: Of the ranks; None is the default group.
        device: Where the sum of samples is made.
        clock: Of this rank's steps.
        reduction: Of the loss: the gradients of sums are summed as they are.
        count: Of a forward pass.

    Attributes:
        current: What the last forward pass that is trained on counts.
        stepped: What all passes of the last step count.
        share: n_i / N of the last step.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        clock: StepClock,
        reduction: Reduction = "mean",
        count: Count = samples_of,
    ) -> None:
        self.group = group
        self.clock = clock
        self.reduction = reduction
        self.current = self.stepped = 1.0
        self._device = device
        self._count = count
        self._own = 0.0
        self.share = torch.ones((), dtype=torch.float64, device=device)

    @property
    def counted(self) -> float:
        """What the passes of this step count so far, or those of the last one."""
        return self._own or self.stepped

    def before_forward(
        self, model: DistributedDataParallel, args: Any, kwargs: Any
    ) -> None:
        """Count a pass that is trained on."""
        if not (model.training and torch.is_grad_enabled()):
            return
        self.clock.begin(_first_axis(args, kwargs) or 0)
        if self.reduction == "sum":
            return
        self.current = float(self._count(args, kwargs))
        self._own += self.current

    def sum_up(self) -> None:
        """Sum what all passes count since the last time over all ranks."""
        own = torch.tensor(self._own, dtype=torch.float64, device=self._device)
        total = own.clone()
        begin_sum(total, self.group).wait()
        self.share = own / total
        self.stepped, self._own = self._own, 0.0


def weigh_gradients(model: DistributedDataParallel, weights: SampleWeights) -> None:
    """Have a model's gradients weighted: no other communication hook may be there."""
    model.register_forward_pre_hook(weights.before_forward, with_kwargs=True)
    model.register_comm_hook(weights, _weighted_sum)


def _weighted_sum(
    weights: SampleWeights, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    if bucket.is_last():
        weights.clock.end()
    if weights.reduction == "mean":
        if bucket.index() == 0:
            weights.sum_up()
        buffer.mul_(weights.share)
    work = dist.all_reduce(buffer, group=weights.group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(_first)
    return future


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]
