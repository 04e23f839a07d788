"""The collectives over `torch.distributed`: gloo between CPUs, NCCL between GPUs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from mucudnn.errors import RankLostError

__all__ = ["TorchCollectives", "begin_sum", "lost_rank", "lost_ranks_told"]

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
