"""Convolutions by one algorithm: sums that no clock chooses the order of."""

from dataclasses import replace

from mucudnn.backends import get_backend


class OneAlgorithm:
    """A library that keeps all its algorithms but one to itself."""

    def __init__(self, library, name):
        self._library, self._name = library, name
        self.excluded, self.traits = library.excluded, library.traits
        self.run = library.run

    def algorithms(self, problem):
        every = self._library.algorithms(problem)
        return [(algo, nbytes) for algo, nbytes in every if algo == self._name]


def one_algorithm(name="IMPLICIT_GEMM", backend="cpu"):
    """A backend whose convolutions are computed in one way, whatever is measured."""
    loaded = get_backend(backend)
    return replace(loaded, conv=OneAlgorithm(loaded.conv, name))
