"""The collective operations that the ranks of a training use.

An existing engine implements them: `torch.distributed` for PyTorch models, MPI for our
own networks. All ranks call the same operations in the same order.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

from mucudnn.errors import RankLostError
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
    """One rank's view of its process group.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
    """

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
    """The ranks of a training have different settings; all of them raise it."""


def digest_of(arrays: Iterable[Any]) -> str:
    """Return a short hash of NumPy arrays, for `check_alike`."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return f"of digest {digest.hexdigest()[:12]}"


def text_of(value: object) -> str:
    """All that a value says of itself; of a function its name, and what it is given."""
    if not (isinstance(value, str) or callable(value)):
        return repr(value)
    given = getattr(value, "args", ()), getattr(value, "keywords", {})
    return name_of(value) + (str(given) if any(given) else "")


@contextlib.contextmanager
def ending_together(together: Collectives) -> Iterator[None]:
    """Around what each rank does alone: at its end all know if one of them failed.

    Raises:
        RankLostError: Another rank failed, and this one did not; says how.
    """
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
    """Check that all ranks have the same settings.

    Values are compared by their text, so the text must contain everything relevant;
    functions are compared by their names.

    Raises:
        RanksDifferError: A setting differs; names the setting and each rank's value.
    """
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
