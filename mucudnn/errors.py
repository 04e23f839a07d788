"""Every exception mucudnn raises on purpose.

* MucudnnError
  + UnsupportedError      no algorithm of this backend can run this problem
  + PlanningError         no plan fits the limit
  + ScheduleError         a schedule breaks a rule of its instructions
  + CacheError            a file to import or export is not what it claims to be
  + DataError             a data set is missing, truncated or something else
  + CheckpointError       a checkpoint cannot be written, or is of something else
  + TrainingError         training cannot go on: its loss is no number any more
  + BackendUnavailableError (ImportError)   the library or device is missing
  + BackendError          a driver or library call returned a status
    - StepFailedError     a kernel of a plan failed
    - ExecutionOrderError a step reads or writes memory before it may
  + OutOfMemoryError (MemoryError)

Bad arguments (shapes, sizes, names) raise the builtin ValueError or TypeError.
"""

__all__ = [
    "BackendError",
    "BackendUnavailableError",
    "CacheError",
    "CheckpointError",
    "DataError",
    "ExecutionOrderError",
    "MucudnnError",
    "OutOfMemoryError",
    "PlanningError",
    "ScheduleError",
    "StepFailedError",
    "TrainingError",
    "UnsupportedError",
]


class MucudnnError(Exception):
    """Base class of every error raised by this library."""


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


class ExecutionOrderError(BackendError):
    """Something touches memory without waiting for what used it before."""


class OutOfMemoryError(MucudnnError, MemoryError):
    """The device memory resource has no room for the request."""
