"""Collective operations over MPI, by mpi4py: `mpiexec -n 2 mucudnn train …`."""

import os
from typing import Any, NoReturn, TypeVar

import numpy as np

from mucudnn.errors import BackendUnavailableError

__all__ = ["MpiCollectives"]

T = TypeVar("T")

_FAILED = 2


class _Request:
    def __init__(self, request: Any, array: Any) -> None:
        self._request = request
        self._array = array

    def wait(self) -> None:
        self._request.Wait()


class MpiCollectives:
    """Collective operations of all processes that `mpiexec` started.

    Raises:
        BackendUnavailableError: mpi4py or an MPI library is missing.
    """

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as e:
            raise BackendUnavailableError(
                f"several processes need mpi4py and an MPI library ({e}); install "
                "them with: pip install 'mucudnn[mpi]'"
            ) from e
        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()

    def all_reduce(self, array: Any) -> _Request:
        """Start to sum contiguous NumPy arrays over all ranks, in place."""
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
        self._world.Abort(_FAILED)
        os._exit(_FAILED)  # Abort may return before the launcher ends this process
