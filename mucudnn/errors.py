"""Every exception mucudnn raises on purpose.

* MucudnnError
  + UnsupportedError      no algorithm of this backend can run this problem
  + PlanningError         no plan fits the limit
  + ScheduleError         a schedule breaks a rule of its instructions
  + CacheError            a file to import or export is not what it claims to be
  + DataError             a data set is missing, truncated or something else
  + CheckpointError       a checkpoint cannot be written, or is of something else
  + RankLostError         another process of the training is gone
  + TrainingError         training cannot go on: its loss is no number any more
  + VerificationError     a planned run's results differ from an unplanned one's
  + BackendUnavailableError (ImportError)   the library or device is missing
  + BackendError          a driver or library call returned a status
    - StepFailedError     a kernel of a plan failed
  + OutOfMemoryError (MemoryError)

Bad arguments (shapes, sizes, names) raise the builtin ValueError or TypeError.

All of them survive `pickle` and `copy` with every attribute: an error of a worker
process must reach the one that waits for it. An attribute that cannot travel, such as
a driver's own exception, is replaced by words about it.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

__all__ = [
    "BackendError",
    "BackendUnavailableError",
    "CacheError",
    "CheckpointError",
    "DataError",
    "MucudnnError",
    "OutOfMemoryError",
    "PlanningError",
    "RankLostError",
    "ScheduleError",
    "StepFailedError",
    "TrainingError",
    "UnsupportedError",
    "VerificationError",
]


class MucudnnError(Exception):
    """Base class of every error raised by this library."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _parts(self, super().__reduce__(), _portable)

    def __copy__(self) -> "MucudnnError":
        return _rebuilt(*_parts(self, super().__reduce__(), lambda value: value)[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> "MucudnnError":
        def copied(value: Any) -> Any:
            try:
                return copy.deepcopy(value, memo)
            except Exception:  # what it is made of may refuse; then it is shared
                return value

        return _rebuilt(*_parts(self, super().__reduce__(), copied)[1])


def _parts(
    error: MucudnnError, reduced: Any, carried: Callable[[Any], Any]
) -> tuple[Any, ...]:
    """What an error is rebuilt from; its constructor wants something else."""
    state = reduced[2] if len(reduced) > 2 else {}
    return _rebuilt, (
        type(error),
        tuple(carried(value) for value in error.args),
        {name: carried(value) for name, value in (state or {}).items()},
    )


def _rebuilt(
    kind: type[MucudnnError], args: tuple[Any, ...], state: dict[str, Any]
) -> MucudnnError:
    error = BaseException.__new__(kind, *args)
    super(MucudnnError, error).__init__(*args)  # the builtin's: it takes any
    error.__setstate__(state)
    return error


def _portable(value: Any) -> Any:
    """A value, or where it would not arrive, words about it."""
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:  # objects that do not pickle raise anything
        name = type(value).__qualname__
        try:
            text = f"{name}: {value}"
        except Exception:  # nor can it speak
            text = name
        return BackendError(text) if isinstance(value, BaseException) else text
    return value


class UnsupportedError(MucudnnError):
    """The backend has no algorithm for the problem."""


class PlanningError(MucudnnError):
    """No plan fits the limit.

    Attributes:
        node: Where bytes are short, of a step; None if it is of none.
        short_by: How many bytes the limit is below `least_bytes`; None if not known.
        least_bytes: A limit that will do; None if not known.
    """

    def __init__(
        self,
        message: str = "",
        *,
        node: str | None = None,
        short_by: int | None = None,
        least_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.node = node
        self.short_by = short_by
        self.least_bytes = least_bytes


class ScheduleError(MucudnnError):
    """A schedule reads what is not there, frees what is in use, or leaks."""


class CacheError(MucudnnError):
    """A file of measurements cannot be read or written."""


class DataError(MucudnnError):
    """A data set cannot be read: its files, or what reads them, are not there or wrong.

    The message names the file and, where there is one, the byte.
    """


class CheckpointError(MucudnnError):
    """A checkpoint cannot be written or read, or belongs to another training."""


class RankLostError(MucudnnError):
    """Another process of the training is gone, so this one cannot go on."""


class TrainingError(MucudnnError):
    """Training cannot go on.

    Attributes:
        epoch: In which epoch, from 0.
        step: In which step of the whole training, from 0.
    """

    def __init__(self, message: str, *, epoch: int, step: int) -> None:
        super().__init__(message)
        self.epoch = epoch
        self.step = step


class VerificationError(MucudnnError):
    """A planned run's results differ from those of an unplanned one."""


class BackendUnavailableError(MucudnnError, ImportError):
    """The backend's library or device is missing."""


class BackendError(MucudnnError):
    """A driver or library call returned an error status."""


class StepFailedError(BackendError):
    """A kernel of a plan failed.

    Attributes:
        algo: The algorithm that failed.
        done: Samples whose result had been written before it.
        reason: What the backend said.
    """

    def __init__(self, algo: str, done: int, reason: Exception) -> None:
        super().__init__(f"{algo} failed after {done} samples: {reason}")
        self.algo = algo
        self.done = done
        self.reason = reason


class OutOfMemoryError(MucudnnError, MemoryError):
    """The device memory resource has no room for the request."""
