"""The interface of asynchronous copies of step inputs and results."""

from typing import Any, Protocol

__all__ = ["Arriving", "Transit"]


class Arriving(Protocol):
    """A tensor that is being copied to the host."""

    def __call__(self) -> Any:
        """Wait for the copy, and return it as a NumPy array.

        Raises:
            BackendError: A kernel before it failed, or the copy.
        """

    @property
    def ready(self) -> bool:
        """Whether the copy is complete."""


class Transit(Protocol):
    """Copies of inputs and results, ordered with kernels; the host does not wait."""

    def upload(self, source: Any, target: Any) -> None:
        """Copy a NumPy array to a tensor, for kernels that are launched later.

        The source may be changed as soon as this returns.
        """

    def download(self, source: Any) -> Arriving:
        """Start to copy a tensor's value after the work launched so far."""

    def close(self) -> None:
        """Wait for copies in progress, and free all buffers."""
