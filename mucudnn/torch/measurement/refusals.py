"""Nodes whose kernels return something else than their graph says."""

from collections.abc import Mapping

from mucudnn.errors import UnsupportedError
from mucudnn.torch.lowering.lowered import Layout

__all__ = ["WrongResultsError"]


class WrongResultsError(UnsupportedError):
    """Kernels return other types, or results that lie otherwise.

    Attributes:
        found: Node of PyTorch's graph -> place among its results, None for all of it ->
            how that result really lies.
    """

    def __init__(
        self, message: str, found: Mapping[str, Mapping[int | None, Layout]]
    ) -> None:
        super().__init__(message)
        self.found = found
