"""Collectives between the processes of one training, and their waiting times.

An existing engine implements them: `torch.distributed` for PyTorch models, MPI for our
own networks. All ranks call the same operations in the same order.
"""

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TextIO, TypeVar

from mucudnn.errors import BackendUnavailableError, RankLostError
from mucudnn.passes.registry import name_of

_SHOWN = 5

T = TypeVar("T")


class Pending(Protocol):
    """A collective operation that was started."""

    def wait(self) -> None:
        """Wait until the operation is complete.

        Raises:
            RankLostError: Another process has ended.
        """


class Collectives(Protocol):
    """The view that process `rank` has of its group of `size` processes."""

    rank: int
    size: int

    def all_reduce(self, array: Any) -> Pending:
        """Start to sum arrays of one shape over all ranks, in place."""

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Overwrite the array on all ranks with that of `root`."""

    def all_gather(self, value: T) -> list[T]:
        """Return the value of each rank, ordered by rank."""

    def barrier(self) -> None:
        """Wait until all ranks have called this."""

    def abort(self, message: str) -> NoReturn:
        """End all ranks; raise an error with this message on this one."""


class RanksDifferError(ValueError):
    """The ranks of a training have different settings; raised on all of them."""


def digest_of(arrays: Iterable[Any]) -> str:
    """Return a short hash of NumPy arrays, for `check_alike`."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return f"of digest {digest.hexdigest()[:12]}"


def text_of(value: object) -> str:
    """Return the text by which a setting is compared; a function's name and arguments.

    Arguments are those that a `functools.partial` binds.
    """
    if not (isinstance(value, str) or callable(value)):
        return repr(value)
    given = getattr(value, "args", ()), getattr(value, "keywords", {})
    return name_of(value) + (str(given) if any(given) else "")


@contextlib.contextmanager
def ending_together(together: Collectives) -> Iterator[None]:
    """Wrap work that each rank does alone, so that an error of one ends all of them."""
    error = None
    try:
        yield
    except Exception as e:
        error = e
    words = None if error is None else f"{type(error).__name__}: {error}"
    found = together.all_gather(words)
    if error is not None:
        raise error
    for rank, words in enumerate(found):
        if words is not None:
            raise RankLostError(f"rank {rank} of the training failed: {words}")


def check_alike(together: Collectives, settings: Mapping[str, object]) -> None:
    """Check that all ranks have the same settings."""
    # By text, which must contain everything relevant; functions by their names.
    found = together.all_gather({name: text_of(v) for name, v in settings.items()})
    differing = []
    for name in dict.fromkeys(name for one in found for name in one):
        ranks: dict[str, list[str]] = {}
        for rank, one in enumerate(found):
            ranks.setdefault(one.get(name, "not given"), []).append(str(rank))
        if len(ranks) > 1:
            each = (
                f"{value} on rank{'s'[: len(who) - 1]} {', '.join(who)}"
                for value, who in ranks.items()
            )
            differing.append(f"{name} is {', '.join(each)}")
    if differing:
        more = len(differing) - _SHOWN
        text = "; ".join(differing[:_SHOWN]) + (f"; and {more} more" * (more > 0))
        raise RanksDifferError(
            f"all ranks of a training need the same settings, but {text}; start all "
            "of them with the same"
        )


_FAILED = 2


@dataclass(frozen=True, slots=True)
class _Request:
    request: Any
    array: Any  # MPI writes to it until the request is complete

    def wait(self) -> None:
        self.request.Wait()


def _wait_until_read(stream: TextIO, seconds: float) -> None:
    """Wait until the reader of a pipe has emptied it, at most `seconds`."""
    end = time.monotonic() + seconds
    # No pipe, a closed one, or a system without these modules.
    with contextlib.suppress(ImportError, OSError, ValueError):
        import fcntl
        import termios

        stream.flush()
        while time.monotonic() < end:
            unread = fcntl.ioctl(stream.fileno(), termios.FIONREAD, bytes(4))
            if not any(unread):
                return
            time.sleep(0.01)


class MpiCollectives:
    """Collective operations of all processes that `mpiexec` started."""

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as e:
            raise BackendUnavailableError(
                f"several processes need mpi4py and an MPI library ({e}); install "
                "them with: pip install '.[mpi]'"
            ) from e
        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()

    def all_reduce(self, array: Any) -> _Request:
        """Start to sum contiguous NumPy arrays over all ranks, in place."""
        import numpy as np  # the command line starts without it

        values = np.ascontiguousarray(array)
        if values is not array:
            raise ValueError("an array to be summed in place must be contiguous")
        request = self._world.Iallreduce(self._mpi.IN_PLACE, array, self._mpi.SUM)
        return _Request(request, array)

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Overwrite the NumPy array on all ranks with that of `root`."""
        self._world.Bcast(array, root)

    def all_gather(self, value: T) -> list[T]:
        """Return the (pickled) value of each rank, ordered by rank."""
        found: list[T] = self._world.allgather(value)
        return found

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self._world.Barrier()

    def abort(self, message: str) -> NoReturn:
        """End all ranks at once, this one too; the caller has reported why."""
        # The launcher may end without passing on what it has not read yet.
        _wait_until_read(sys.stderr, 2.0)
        # Other ranks may be blocked in a collective, where no exception reaches them.
        self._world.Abort(_FAILED)
        os._exit(_FAILED)  # Abort may return before the launcher ends this process


class Stopwatch:
    """A clock that adds up the time spent in its `running` blocks."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._spent = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the enclosed block."""
        began = self._now()
        try:
            yield
        finally:
            self._spent += self._now() - began

    def read_ms(self) -> float:
        """Return the milliseconds since the last call, and reset."""
        spent, self._spent = self._spent, 0.0
        return 1e3 * spent


class TimedCollectives:
    """Collectives that measure the waiting time of an upstream implementation.

    A slow step and waiting for slower ranks look the same from outside. The waiting
    time measured here is subtracted from the time of a step.
    """

    def __init__(
        self, upstream: Collectives, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._upstream = upstream
        self._waited = Stopwatch(now)
        self.rank: int = upstream.rank
        self.size: int = upstream.size

    def waited_ms(self) -> float:
        """Return the milliseconds waited since the last call."""
        return self._waited.read_ms()

    def all_reduce(self, array: Any) -> Pending:
        """Start to sum arrays of one shape over all ranks, in place."""
        with self._waited.running():
            return _Timed(self._upstream.all_reduce(array), self._waited)

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Overwrite the array on all ranks with that of `root`."""
        with self._waited.running():
            self._upstream.broadcast(array, root)

    def all_gather(self, value: T) -> list[T]:
        """Return the value of each rank."""
        with self._waited.running():
            return self._upstream.all_gather(value)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        with self._waited.running():
            self._upstream.barrier()

    def abort(self, message: str) -> NoReturn:
        """End all ranks."""
        self._upstream.abort(message)


@dataclass(frozen=True, slots=True)
class _Timed:
    pending: Pending
    waited: Stopwatch

    def wait(self) -> None:
        with self.waited.running():
            self.pending.wait()
