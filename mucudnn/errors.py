"""Every exception mucudnn raises on purpose.

* MucudnnError
  + UnsupportedError      no algorithm of this backend can run this problem
  + PlanningError         no plan fits the limit
  + CacheError            a file to import or export is not what it claims to be
  + BackendUnavailableError (ImportError)   the library or device is missing
  + BackendError          a driver or library call returned a status
  + OutOfMemoryError (MemoryError)

Bad arguments (shapes, sizes, names) raise the builtin ValueError or TypeError.
"""

__all__ = [
    "BackendError",
    "BackendUnavailableError",
    "CacheError",
    "MucudnnError",
    "OutOfMemoryError",
    "PlanningError",
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


class BackendUnavailableError(MucudnnError, ImportError):
    """The backend's library or device is missing."""


class BackendError(MucudnnError):
    """A driver or library call returned an error status."""


class OutOfMemoryError(MucudnnError, MemoryError):
    """The device memory resource has no room for the request."""
