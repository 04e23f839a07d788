"""Convolutions by one algorithm: sums that no clock chooses the order of."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mucudnn.backends import Backend, ConvLibrary, get_backend
from mucudnn.ir.conv import ConvProblem
from mucudnn.ir.numerics import Traits

__all__ = ["OneAlgorithm", "one_algorithm"]


class OneAlgorithm:
    """A library that keeps all its algorithms but one to itself."""

    def __init__(self, library: ConvLibrary, name: str) -> None:
        self._library = library
        self._name = name

    def algorithms(self, problem: ConvProblem) -> Sequence[tuple[str, int]]:
        """The one, where it can run `problem`."""
        every = self._library.algorithms(problem)
        return [(algo, nbytes) for algo, nbytes in every if algo == self._name]

    def excluded(self, problem: ConvProblem) -> Sequence[tuple[str, str]]:
        """See `ConvLibrary.excluded`."""
        return self._library.excluded(problem)

    def traits(self, problem: ConvProblem, algo: str) -> Traits:
        """See `ConvLibrary.traits`."""
        return self._library.traits(problem, algo)

    def run(
        self, problem: ConvProblem, algo: str, *operands: Any, accumulate: bool = False
    ) -> None:
        """See `ConvLibrary.run`."""
        self._library.run(problem, algo, *operands, accumulate=accumulate)


def one_algorithm(name: str = "IMPLICIT_GEMM", backend: str = "cpu") -> Backend:
    """A backend whose convolutions are computed in one way, whatever is measured."""
    loaded = get_backend(backend)
    return replace(loaded, conv=OneAlgorithm(loaded.conv, name))
