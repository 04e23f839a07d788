"""Outputs of a step, which may still be being computed when the caller gets them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.transit import Arriving

__all__ = ["Present", "Results"]


@dataclass(frozen=True, slots=True)
class Present:
    """A tensor on the host that needs no waiting."""

    value: Any
    ready: bool = True

    def __call__(self) -> Any:
        """Return the array."""
        return self.value


@dataclass(frozen=True, slots=True)
class Results:
    """Tensor -> its value, possibly pending."""

    found: Mapping[str, Arriving]

    def read(self) -> dict[str, Any]:
        """Wait for all tensors; return them as NumPy arrays."""
        return {name: arriving() for name, arriving in self.found.items()}

    @property
    def ready(self) -> bool:
        """Whether reading would not wait."""
        return all(arriving.ready for arriving in self.found.values())
