"""Validate the inputs of a step before anything is copied."""

from collections.abc import Mapping
from typing import Any

from mucudnn.ir.tensor import TensorSpec

__all__ = ["fed"]


def fed(spec: TensorSpec, feeds: Mapping[str, Any]) -> Any:
    """Return the NumPy array of an input.

    Raises:
        ValueError: It is missing, or of another shape or type.
    """
    value = feeds.get(spec.name)
    if value is None:
        raise ValueError(f"input {spec.name!r} was not given")
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise ValueError(
            f"input {spec.name!r} must be {spec.dtype} {spec.shape}, got "
            f"{value.dtype} {value.shape}"
        )
    return value
