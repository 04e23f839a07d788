"""The five things that the processes of one training do together.

An engine that exists carries them: `torch.distributed` for PyTorch's models, MPI for
ours. All processes call the same ones in the same order.
"""

from typing import Any, NoReturn, Protocol, TypeVar

__all__ = ["Collectives", "Pending"]

T = TypeVar("T")


class Pending(Protocol):
    """A collective that was begun."""

    def wait(self) -> None:
        """Return when it is done.

        Raises:
            RankLostError: Another process is gone.
        """
        ...


class Collectives(Protocol):
    """One process's view of the group.

    Attributes:
        rank: Its number.
        size: How many there are.
    """

    rank: int
    size: int

    def all_reduce(self, array: Any) -> Pending:
        """Begin to sum arrays of one shape, in place; all get the sum."""
        ...

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Everybody's array becomes that of one process."""
        ...

    def all_gather(self, value: T) -> list[T]:
        """What each process says, in the order of their numbers."""
        ...

    def barrier(self) -> None:
        """Return when all are here."""
        ...

    def abort(self, message: str) -> NoReturn:
        """End all of them; this one with that error."""
        ...
