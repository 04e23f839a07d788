"""The collectives over `torch.distributed`: gloo between CPUs, NCCL between GPUs."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from mucudnn.errors import RankLostError
from mucudnn.torch.distributed.sharding import wait_for_release
from mucudnn.torch.distributed.step_times import StepClock

T = TypeVar("T")

_REPEATS = 3

_MAX_REASON = 120
"""Longest part of a transport's message that is shown, in characters."""

_TRANSPORT = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe")
"""Parts of transports' error messages, which have no type of their own."""


@contextmanager
def lost_ranks_told() -> Iterator[None]:
    """Turn errors of the transport into `RankLostError`.

    Raises:
        RankLostError: Another rank is gone or does not answer.
    """
    try:
        yield
    except RuntimeError as e:
        if (lost := lost_rank(e)) is not None:
            raise lost from e
        raise


def lost_rank(error: BaseException) -> RankLostError | None:
    """Return the error to raise in place of a transport's error; None for others."""
    words = str(error).lower()
    of_transport = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in words for sign in _TRANSPORT)
    )
    if not of_transport:
        return None
    reason = (str(error).strip().splitlines() or [""])[0][:_MAX_REASON]
    return RankLostError(
        "another rank failed or does not respond; restart all ranks from the last "
        f"checkpoint ({reason})"
    )


class _Work:
    """A collective operation in progress."""

    def __init__(self, work: dist.Work, array: torch.Tensor, holders: int) -> None:
        self._work: dist.Work | None = work
        self._array = array
        self._holders = holders

    def wait(self) -> None:
        """Wait until it is done and gloo has released the tensor.

        If a thread of gloo held the last reference, it would need the interpreter to
        free the tensor, and the process would abort if that has ended meanwhile. Sums
        on a GPU are only launched, and are not waited for here.
        """
        if self._work is None:
            return
        with lost_ranks_told():
            self._work.wait()
        self._work = None
        if self._array.is_cuda:
            return
        wait_for_release(self._array, self._holders)


def begin_sum(array: torch.Tensor, group: dist.ProcessGroup | None) -> _Work:
    """Begin to sum a tensor over a group, in place.

    Raises:
        RankLostError: Another rank is gone.
    """
    holders = array._use_count()
    with lost_ranks_told():
        return _Work(dist.all_reduce(array, group=group, async_op=True), array, holders)


class TorchCollectives:
    """The collectives of a process group.

    Args:
        group: The process group; None is the default group.
        device: Device of this process's tensors.

    Raises:
        RuntimeError: No group was initialised.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | None = None
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "there is no process group: call torch.distributed."
                "init_process_group(...) first, and start the script with "
                "torchrun --nproc-per-node N"
            )
        self.group = group
        self.device = device or torch.device("cpu")
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def all_reduce(self, array: torch.Tensor) -> _Work:
        """Begin to sum a tensor over the ranks, in place."""
        return begin_sum(array, self.group)

    def broadcast(self, array: torch.Tensor, root: int = 0) -> None:
        """Copy the tensor of one rank to all ranks, in place."""
        with lost_ranks_told():
            dist.broadcast(array, group=self.group, group_src=root)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks; they are pickled."""
        found: list[T | None] = [None] * self.size
        with lost_ranks_told():
            dist.all_gather_object(found, value, group=self.group)
        return found  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        with lost_ranks_told():
            dist.barrier(group=self.group)

    def time_all_reduce(self, nbytes: int) -> float:
        """Return the milliseconds of a sum of this many bytes, the best of a few."""
        values = torch.zeros(max(1, nbytes // 4), device=self.device)
        found = []
        for _ in range(_REPEATS):
            self.barrier()
            began = time.perf_counter()
            self.all_reduce(values).wait()
            if values.is_cuda:
                torch.cuda.synchronize(values.device)
            found.append(1e3 * (time.perf_counter() - began))
        return min(found)

    def abort(self, message: str) -> NoReturn:
        """End the group, so that ranks that wait for this one fail.

        Raises:
            RankLostError: Always, with the message.
        """
        dist.destroy_process_group(self.group)
        raise RankLostError(message)


# Gradients weighted by samples, for a mini-batch that is divided unequally.
#
# A rank's loss is the mean over its n_i samples, so the gradient of the whole batch is
#
#     sum of n_i / N * gradient_i,    N = sum of n_i
#
# where DistributedDataParallel takes the plain mean over ranks. Its communication hook
# applies the weights. N is summed over the ranks once a step, before the first
# gradients: users need not give it, and a smaller last batch is weighted correctly.
# Not earlier: ranks may run their shares in different numbers of passes, with
# collectives of the wrapped model between them.


Count = Callable[[Sequence[Any], Mapping[str, Any]], float]
"""Returns the number of terms in the mean loss, given a forward pass's arguments."""

Reduction = Literal["mean", "sum"]
"""How the loss combines its samples."""


def samples_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the size of axis 0 of the first tensor among a forward pass's arguments.

    Raises:
        ValueError: No argument is a tensor with an axis.
    """
    found = _first_axis(args, kwargs)
    if found is None:
        raise ValueError(
            "the model was called without a tensor whose first axis is the batch; "
            "pass distribute(count=...) to count the samples"
        )
    return found


def _first_axis(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    return None


class SampleWeights:
    """The weight of this rank's gradients.

    Args:
        group: The process group; None is the default group.
        device: Device on which counts are summed.
        clock: Times this rank's steps.
        reduction: Reduction of the loss: the gradients of sums have no weights.
        count: Returns the samples of a forward pass.

    Attributes:
        current: Samples of the last forward pass in training.
        stepped: Samples of all passes of the last step.
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
        """Samples of this step's passes so far, or else of the last step."""
        return self._own or self.stepped

    def before_forward(
        self, model: DistributedDataParallel, args: Any, kwargs: Any
    ) -> None:
        """Count the samples of a forward pass in training."""
        if not (model.training and torch.is_grad_enabled()):
            return
        self.clock.begin(_first_axis(args, kwargs) or 0)
        if self.reduction == "sum":
            return
        self.current = float(self._count(args, kwargs))
        self._own += self.current

    def sum_up(self) -> None:
        """Sum the samples since the last call over all ranks, and set `share`."""
        own = torch.tensor(self._own, dtype=torch.float64, device=self._device)
        total = own.clone()
        begin_sum(total, self.group).wait()
        self.share = own / total
        self.stepped, self._own = self._own, 0.0


def sum_weighted(
    weights: SampleWeights, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Begin the weighted sum of a bucket of gradients; see `register_comm_hook`."""
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
