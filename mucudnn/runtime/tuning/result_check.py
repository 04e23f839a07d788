"""Compare what an algorithm computes with what others compute, before it is timed.

A library may list algorithms that are wrong: on an H100, cuDNN 9.19's runtime-compiled
engines return garbage for some convolutions in NCHW, and others add to their output
wrongly. The reference is the result that two algorithms agree on, well-tried ones
first. What differs from it by more than rounding is not used. An algorithm in float32
that differs as TF32 would is taken to be in TF32, whatever the library says of it.

Only the two ends of a large result are compared.
"""

import math
from collections.abc import Collection, Iterator
from typing import Any

from mucudnn.backends.base import Backend
from mucudnn.backends.device import Array, Buffer
from mucudnn.errors import MucudnnError, UnsupportedError
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.numerics import DOWN_CONVERT, NATIVE, TF32, Traits
from mucudnn.ir.tensor import TensorSpec

_EPSILON = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}
_ENDS = 1 << 16
"""Numbers that are compared at each end."""

_CANDIDATES = 6
_LESS_TRIED = ("runtime_compilation", "winograd", "fft", "reduced_precision_reduction")


def rounding_error(problem: ConvProblem, modes: Collection[str], parts: int) -> float:
    """Return the error that rounding of operands and sums can explain.

    It is relative to the largest products, summed as if they were random. `modes` are
    the math modes of all that is compared; `parts` are the micro-batches.
    """
    fine = coarse = _EPSILON[problem.dtype]
    if problem.itemsize < 4:  # summed in float32
        fine = _EPSILON["float32"]
    elif {*modes} & {TF32, DOWN_CONVERT}:  # TF32 has the digits of float16
        coarse = _EPSILON["bfloat16" if DOWN_CONVERT in modes else "float16"]
    return (3 + parts) * coarse + 64 * fine * math.sqrt(summed_terms(problem))


def summed_terms(problem: ConvProblem) -> int:
    """Return how many products each result of a convolution sums."""
    k, *taps = problem.w_shape
    if problem.direction is Direction.FORWARD:
        return math.prod(taps)
    if problem.direction is Direction.BACKWARD_DATA:
        return k // problem.groups * math.prod(taps[1:])
    return problem.batch * math.prod(problem.y_shape[2:])


class ResultCheck:
    """Checks the algorithms of one convolution on given operands.

    Args:
        backend: The library, on its device.
        problem: The convolution, at the micro-batch size that is timed.
        arrays: Its operands and its result.
        out: The buffer of the result.
    """

    def __init__(
        self,
        backend: Backend,
        problem: ConvProblem,
        arrays: tuple[Array, Array, Array],
        out: Buffer,
    ) -> None:
        self._backend, self._problem, self._arrays = backend, problem, arrays
        device, dtype = backend.device, problem.operands()[2].dtype
        whole = math.prod(problem.operands()[2].shape)
        count = min(whole, _ENDS)
        size = TensorSpec("end", (count,), dtype)
        starts = {0, (whole - count) * size.nbytes // count}
        self._ends = [device.view(out, start, size) for start in sorted(starts)]
        self._reference: tuple[str, Any] | None = None
        self._scale = 0.0
        try:
            self._downloaded()
        except UnsupportedError:  # bfloat16 without ml_dtypes: nothing is compared
            self._ends = []

    def judged(self, algo: str, scratch: Buffer, nbytes: int) -> tuple[Traits, str]:
        """Return an algorithm's true traits, and what is wrong with it, if anything.

        Args:
            algo: The algorithm.
            scratch: Workspace that it may use.
            nbytes: Size of the workspace in bytes.
        """
        traits = self._backend.conv.traits(self._problem, algo)
        if self._reference is None and self._ends:
            self._reference = self._agreed(scratch, nbytes)
        if self._reference is None:
            return traits, ""
        name, expected = self._reference
        error = self._error(self._result(algo, scratch), expected)
        if self._problem.direction is Direction.BACKWARD_FILTER:
            error = max(error, self._error_of_adding(algo, scratch, expected))
        other = self._backend.conv.traits(self._problem, name).math_mode
        if error <= rounding_error(self._problem, {traits.math_mode, other}, 1):
            return traits, ""
        in_tf32 = rounding_error(self._problem, {TF32}, 1)
        if self._problem.dtype == "float32" and error <= in_tf32:
            return Traits(traits.deterministic, TF32, traits.notes), ""
        return traits, (
            f"wrong: its result differs from that of {name} by {error:.2g} of the "
            "largest products"
        )

    def _agreed(self, scratch: Buffer, nbytes: int) -> tuple[str, Any] | None:
        """Return an algorithm whose result another one confirms, and the result.

        Two that agree in TF32 alone are second best.
        """
        found: list[tuple[str, Any]] = []
        coarse = None
        for name in self._candidates(nbytes):
            try:
                result = self._result(name, scratch)
            except MucudnnError:
                continue
            self._scale = self._scale or self._magnitude()
            for other, before in found:
                error = self._error(result, before)
                if error <= rounding_error(self._problem, {NATIVE}, 1):
                    return other, before
                if coarse is None and error <= rounding_error(
                    self._problem, {TF32, DOWN_CONVERT}, 1
                ):
                    coarse = other, before
            found.append((name, result))
        return coarse

    def _candidates(self, nbytes: int) -> Iterator[str]:
        """Yield algorithms that fit into the workspace, well-tried ones first."""
        conv, problem = self._backend.conv, self._problem

        def doubts(name: str) -> tuple[bool, bool]:
            traits = conv.traits(problem, name)
            tried = not {*_LESS_TRIED} & {*traits.notes}
            return not tried, traits.math_mode != NATIVE

        fitting = [name for name, size in conv.algorithms(problem) if size <= nbytes]
        yield from sorted(fitting, key=doubts)[:_CANDIDATES]

    def _result(self, algo: str, scratch: Buffer) -> Any:
        """Return both ends of a result, which is written over random numbers."""
        for end in self._ends:
            self._backend.device.randomize(end)
        self._backend.conv.run(self._problem, algo, *self._arrays, scratch)
        return self._downloaded()

    def _error_of_adding(self, algo: str, scratch: Buffer, expected: Any) -> float:
        """Return the error of a result that is added; 0 if the algorithm cannot add."""
        for end in self._ends:
            self._backend.device.randomize(end)
        before = self._downloaded()
        try:
            self._backend.conv.run(
                self._problem, algo, *self._arrays, scratch, accumulate=True
            )
        except MucudnnError:
            return 0.0
        return self._error(self._downloaded(), before + expected)

    def _downloaded(self) -> Any:
        import numpy as np  # the command line starts without it

        ends = [self._backend.device.download(end) for end in self._ends]
        return np.concatenate([end.astype(np.float64) for end in ends])

    def _magnitude(self) -> float:
        """Return the scale of errors: the largest products, summed at random."""
        largest = [abs(self._sample(array)).max() for array in self._arrays[:2]]
        products = math.prod(largest) * math.sqrt(summed_terms(self._problem))
        return float(max(products, 1e-30))

    def _sample(self, array: Array) -> Any:
        import numpy as np

        found = self._backend.device.download(array)
        return found.reshape(-1)[:_ENDS].astype(np.float64)

    def _error(self, found: Any, expected: Any) -> float:
        error = float(abs(found - expected).max()) / self._scale
        return math.inf if math.isnan(error) else error
