"""What a backend offers where inputs and results of steps can be under way."""

from typing import Any, Protocol

__all__ = ["Arriving", "Transit"]


class Arriving(Protocol):
    """A tensor that is on its way to the host."""

    def __call__(self) -> Any:
        """It as a NumPy array, waited for.

        Raises:
            BackendError: A kernel before it failed, or the copy.
        """
        ...

    @property
    def ready(self) -> bool:
        """Whether nothing has to be waited for."""
        ...


class Transit(Protocol):
    """Copies of inputs and results, ordered with the kernels; the host goes on."""

    def upload(self, source: Any, target: Any) -> None:
        """Have a NumPy array in a tensor, for kernels that are launched later.

        The source may be changed as soon as this returns.
        """
        ...

    def download(self, source: Any) -> Arriving:
        """A tensor as what was launched so far leaves it."""
        ...

    def close(self) -> None:
        """Wait for what is under way, and free what it took."""
        ...
