"""Every exception mucudnn raises on purpose.

* MucudnnError
  + UnsupportedError      no algorithm of this backend can run this problem
  + PlanningError         no plan fits the limit
  + CacheError            a file to import or export is not what it claims to be
  + DataError             a data set is missing, truncated or something else
  + BackendUnavailableError (ImportError)   the library or device is missing
  + BackendError          a driver or library call returned a status
    - StepFailedError     a kernel of a plan failed
  + OutOfMemoryError (MemoryError)

Bad arguments (shapes, sizes, names) raise the builtin ValueError or TypeError.
"""

__all__ = [
    "BackendError",
    "BackendUnavailableError",
    "CacheError",
    "DataError",
    "MucudnnError",
    "OutOfMemoryError",
    "PlanningError",
    "StepFailedError",
    "UnsupportedError",
]


class MucudnnError(Exception):
    """Base class of every error raised by this library."""


class UnsupportedError(MucudnnError):
    """The backend has no algorithm for the problem."""


class PlanningError(MucudnnError):
    """No plan fits the limit."""


class CacheError(MucudnnError):
    """A file of measurements cannot be read or written."""


class DataError(MucudnnError):
    """A data set cannot be read: its files, or what reads them, are not there or wrong.

    The message names the file and, where there is one, the byte.
    """


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
