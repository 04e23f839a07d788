"""The outputs of a step, which may still be computed when its caller has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.transit import Arriving

__all__ = ["Present", "Results"]


@dataclass(frozen=True, slots=True)
class Present:
    """A tensor that is on the host."""

    value: Any
    ready: bool = True

    def __call__(self) -> Any:
        """The array."""
        return self.value


@dataclass(frozen=True, slots=True)
class Results:
    """Tensor -> its values, now or later."""

    found: Mapping[str, Arriving]

    def read(self) -> dict[str, Any]:
        """All of them as NumPy arrays, waited for.

        Raises:
            BackendError: A kernel or a copy failed.
        """
        return {name: arriving() for name, arriving in self.found.items()}

    @property
    def ready(self) -> bool:
        """Whether nothing has to be waited for."""
        return all(arriving.ready for arriving in self.found.values())
