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
from mucudnn.torch.distributed.step_times import StepClock

T = TypeVar("T")


_REPEATS = 3

_LET_GO_S = 1.0

_MOST_WORDS = 120


_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe")
"""What the messages of transports have in them; they have no type of their own."""


@contextmanager
def lost_ranks_told() -> Iterator[None]:
    """Around code that waits for others: a transport's error says that one is gone.

    Raises:
        RankLostError: It is.
    """
    try:
        yield
    except RuntimeError as e:
        if (lost := lost_rank(e)) is not None:
            raise lost from e
        raise


def lost_rank(error: BaseException) -> RankLostError | None:
    """What to say where an error is that of a transport; else None."""
    words = str(error).lower()
    of_transport = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in words for sign in _SIGNS)
    )
    if not of_transport:
        return None
    reason = (str(error).strip().splitlines() or [""])[0][:_MOST_WORDS]
    return RankLostError(
        "another rank of the training is gone or does not answer; start all of them "
        f"again from the last checkpoint ({reason})"
    )


class _Work:
    """A collective of PyTorch's that was begun."""

    def __init__(self, work: dist.Work, array: torch.Tensor, holders: int) -> None:
        self._work: dist.Work | None = work
        self._array = array
        self._holders = holders

    def wait(self) -> None:
        """Return when it is done, and gloo does not hold the tensor any more.

        A thread of gloo may be the last to hold it. To free it, it then needs the
        interpreter, and where that has ended meanwhile the process is aborted. A GPU's
        sums are only launched by now, and are not waited for here.
        """
        if self._work is None:
            return
        with lost_ranks_told():
            self._work.wait()
        self._work = None
        if self._array.is_cuda:
            return
        deadline = time.monotonic() + _LET_GO_S
        while self._array._use_count() > self._holders and time.monotonic() < deadline:
            time.sleep(0)


def begin_sum(array: torch.Tensor, group: dist.ProcessGroup | None) -> _Work:
    """Begin to sum tensors over a group, in place.

    Raises:
        RankLostError: Another rank is gone.
    """
    holders = array._use_count()
    with lost_ranks_told():
        return _Work(dist.all_reduce(array, group=group, async_op=True), array, holders)


class TorchCollectives:
    """Those of a process group.

    Args:
        group: Which; None is the default group.
        device: Where tensors of this process are.

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
        """Begin to sum tensors in place."""
        return begin_sum(array, self.group)

    def broadcast(self, array: torch.Tensor, root: int = 0) -> None:
        """Everybody's tensor becomes that of one rank."""
        with lost_ranks_told():
            dist.broadcast(array, group=self.group, group_src=root)

    def all_gather(self, value: T) -> list[T]:
        """What each rank says; values are pickled."""
        found: list[T | None] = [None] * self.size
        with lost_ranks_told():
            dist.all_gather_object(found, value, group=self.group)
        return found  # type: ignore[return-value]

    def barrier(self) -> None:
        """Return when all are here."""
        with lost_ranks_told():
            dist.barrier(group=self.group)

    def time_all_reduce(self, nbytes: int) -> float:
        """Milliseconds that a sum of so many bytes takes, the best of a few."""
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
        """End the group: who waits for this rank fails, and this one says why.

        Raises:
            RankLostError: With that message.
        """
        dist.destroy_process_group(self.group)
        raise RankLostError(message)


# Gradients weighted by samples: the mean of a mini-batch that is shared out unevenly.
#
# A rank's loss is the mean over its n_i samples, so the gradient of the whole batch is
#
#     sum of n_i / N * gradient_i,    N = sum of n_i
#
# where DistributedDataParallel takes the plain mean over ranks. Its communication hook
# is the place to weigh. N is summed over the ranks once a step, ahead of the first
# gradients: nobody has to tell it, and a last batch that is smaller is weighed right
# too. Not earlier: ranks may run their shares in different numbers of passes, and
# collectives of the wrapped model lie between those.


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
