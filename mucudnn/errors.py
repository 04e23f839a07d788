"""Define every exception that mucudnn raises on purpose.

* MucudnnError
  + UnsupportedError      no algorithm of this backend can run this problem
  + PlanningError         no plan fits the limit
  + ScheduleError         a schedule breaks a rule of its instructions
  + CacheError            a file to import or export is invalid
  + DataError             a data set is missing, truncated or invalid
  + CheckpointError       a checkpoint cannot be written, or belongs to something else
  + RankLostError         another process of the training has ended
  + TrainingError         training cannot go on: its loss is not finite
  + VerificationError     a planned run's results differ from an unplanned one's
  + BackendUnavailableError (ImportError)   the library or device is missing
  + BackendError          a driver or library call returned an error status
    - StepFailedError     a kernel of a plan failed
  + OutOfMemoryError (MemoryError)

Invalid arguments (shapes, sizes, names) raise the builtin ValueError or TypeError.

All errors survive `pickle` and `copy` with every attribute, because a worker's error
has to reach the waiting process. An attribute that cannot be pickled, such as a
driver's own exception, is replaced by text.
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
        return _reduce_with(self, super().__reduce__(), _portable)

    def __copy__(self) -> "MucudnnError":
        return _rebuild(
            *_reduce_with(self, super().__reduce__(), lambda value: value)[1]
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "MucudnnError":
        def copied(value: Any) -> Any:
            try:
                return copy.deepcopy(value, memo)
            except Exception:  # what it is made of may refuse; then it is shared
                return value

        return _rebuild(*_reduce_with(self, super().__reduce__(), copied)[1])


def _reduce_with(
    error: MucudnnError, reduced: Any, carried: Callable[[Any], Any]
) -> tuple[Any, ...]:
    """Return the arguments for `pickle` to rebuild an error without its constructor."""
    state = reduced[2] if len(reduced) > 2 else {}
    return _rebuild, (
        type(error),
        tuple(carried(value) for value in error.args),
        {name: carried(value) for name, value in (state or {}).items()},
    )


def _rebuild(
    kind: type[MucudnnError], args: tuple[Any, ...], state: dict[str, Any]
) -> MucudnnError:
    error = BaseException.__new__(kind, *args)
    super(MucudnnError, error).__init__(*args)  # the builtin's: it takes any
    error.__setstate__(state)
    return error


def _portable(value: Any) -> Any:
    """Return a value, or text about it if it cannot be pickled."""
    try:
        # Loading may fail, too, where the other process lacks a module.
        pickle.loads(pickle.dumps(value))
    except Exception:  # `__reduce__` of foreign objects may raise anything
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
        node: Node at which memory is short; None if it is not a step that was planned.
        short_by: Bytes missing up to `least_bytes`; None if unknown.
        least_bytes: A sufficient limit; None if unknown.
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
    """A schedule reads missing data, frees memory in use, or leaks."""


class CacheError(MucudnnError):
    """A file of measurements cannot be read or written."""


class DataError(MucudnnError):
    """A data set cannot be read: a file or its reader is missing or invalid."""


class CheckpointError(MucudnnError):
    """A checkpoint cannot be written or read, or belongs to another training."""


class RankLostError(MucudnnError):
    """Another process of the training has ended, so this one cannot continue."""


class TrainingError(MucudnnError):
    """Training cannot go on; `epoch` and `step` count from 0."""

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
        algo: Algorithm that failed.
        done: Samples whose results had been written before.
        reason: The backend's exception.
    """

    def __init__(self, algo: str, done: int, reason: Exception) -> None:
        super().__init__(f"{algo} failed after {done} samples: {reason}")
        self.algo = algo
        self.done = done
        self.reason = reason


class OutOfMemoryError(MucudnnError, MemoryError):
    """The device memory resource has no room for the request."""
