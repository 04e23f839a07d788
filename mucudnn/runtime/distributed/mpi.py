"""The collectives over MPI, by mpi4py: `mpiexec -n 2 mucudnn train …`."""

import os
from typing import Any, NoReturn, TypeVar

import numpy as np

from mucudnn.errors import BackendUnavailableError

__all__ = ["MpiCollectives"]

T = TypeVar("T")

_FAILED = 2


class _Request:
    """A collective of MPI's that was begun, and the memory that it works in."""

    def __init__(self, request: Any, array: Any) -> None:
        self._request = request
        self._array = array

    def wait(self) -> None:
        self._request.Wait()


class MpiCollectives:
    """Those of all processes that `mpiexec` started.

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
        """Begin to sum NumPy arrays in place; they must be contiguous."""
        values = np.ascontiguousarray(array)
        if values is not array:
            raise ValueError("an array to be summed in place must be contiguous")
        request = self._world.Iallreduce(self._mpi.IN_PLACE, array, self._mpi.SUM)
        return _Request(request, array)

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Everybody's NumPy array becomes that of one rank."""
        self._world.Bcast(array, root)

    def all_gather(self, value: T) -> list[T]:
        """What each rank says; values are pickled."""
        found: list[T] = self._world.allgather(value)
        return found

    def barrier(self) -> None:
        """Return when all are here."""
        self._world.Barrier()

    def abort(self, message: str) -> NoReturn:
        """End all ranks at once, this one included; who calls has said why."""
        self._world.Abort(_FAILED)
        os._exit(_FAILED)  # what ends processes may take a moment to be here
