"""Compare what an algorithm computes with what others compute, before it is timed.

A library may list algorithms that are wrong: on an H100, cuDNN 9.19's runtime-compiled
engines return garbage for some convolutions in NCHW, and others add to their output
wrongly. The reference is the result that two algorithms agree on, well-tried ones
first. What differs from it by more than rounding is not used. An algorithm in float32
that differs as TF32 would is taken to be in TF32, whatever the library says of it.

Only the two ends of a large result are compared.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

from mucudnn.backends.base import Backend
from mucudnn.backends.device import Array, Buffer
from mucudnn.errors import MucudnnError
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
    """Checks the algorithms of one convolution, at the micro-batch size that is timed.

    `arrays` are its operands and its result, `buffers` their buffers.
    """

    def __init__(
        self,
        backend: Backend,
        problem: ConvProblem,
        arrays: tuple[Array, Array, Array],
        buffers: Sequence[Buffer],
    ) -> None:
        self._backend, self._problem, self._arrays = backend, problem, arrays
        specs = problem.operands()
        *operands, self._ends = (
            self._ends_of(buffer, spec)
            for buffer, spec in zip(buffers, specs, strict=True)
        )
        self._reference: tuple[str, Any] | None = None
        self._searched = -1  # the workspace within which two were looked for
        # Errors are relative to the largest products, summed at random.
        largest = [abs(self._downloaded(ends)).max() for ends in operands]
        products = math.prod(largest) * math.sqrt(summed_terms(problem))
        self._scale = max(float(products), 1e-30)

    def _ends_of(self, buffer: Buffer, spec: TensorSpec) -> list[Array]:
        """Return the first and the last numbers of a tensor, or all of a small one."""
        whole = math.prod(spec.shape)
        end = TensorSpec("end", (min(whole, _ENDS),), spec.dtype)
        starts = sorted({0, spec.nbytes - end.nbytes})
        return [self._backend.device.view(buffer, start, end) for start in starts]

    def judged(self, algo: str, scratch: Buffer, nbytes: int) -> tuple[Traits, str]:
        """Return an algorithm's true traits, and what is wrong with it, if anything.

        `scratch` is the workspace that it may use, of `nbytes` bytes.
        """
        traits = self._backend.conv.traits(self._problem, algo)
        # More workspace admits more algorithms, of which two may agree.
        if self._reference is None and nbytes > self._searched:
            self._searched = nbytes
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
        # The library may use TF32 without saying so: the result shows it.
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
        conv, problem = self._backend.conv, self._problem

        def doubts(name: str) -> tuple[bool, bool]:
            traits = conv.traits(problem, name)
            return not {*_LESS_TRIED}.isdisjoint(
                traits.notes
            ), traits.math_mode != NATIVE

        # Well-tried algorithms come first.
        fitting = [name for name, size in conv.algorithms(problem) if size <= nbytes]
        found: list[tuple[str, Any]] = []
        coarse = None
        for name in sorted(fitting, key=doubts)[:_CANDIDATES]:
            try:
                result = self._result(name, scratch)
            except MucudnnError:
                continue
            for other, before in found:
                error = self._error(result, before)
                if error <= rounding_error(problem, {NATIVE}, 1):
                    return other, before
                in_tf32 = rounding_error(problem, {TF32, DOWN_CONVERT}, 1)
                if coarse is None and error <= in_tf32:
                    coarse = other, before
            found.append((name, result))
        return coarse

    def _result(self, algo: str, scratch: Buffer) -> Any:
        """Return both ends of a result, which is written over random numbers."""
        for end in self._ends:
            self._backend.device.randomize(end)
        self._backend.conv.run(self._problem, algo, *self._arrays, scratch)
        return self._downloaded(self._ends)

    def _error_of_adding(self, algo: str, scratch: Buffer, expected: Any) -> float:
        """Return the error of a result that is added; 0 if the algorithm cannot add."""
        for end in self._ends:
            self._backend.device.randomize(end)
        before = self._downloaded(self._ends)
        try:
            self._backend.conv.run(
                self._problem, algo, *self._arrays, scratch, accumulate=True
            )
        except MucudnnError:
            return 0.0
        return self._error(self._downloaded(self._ends), before + expected)

    def _downloaded(self, ends: Sequence[Array]) -> Any:
        import numpy as np  # the command line starts without it

        found = (self._backend.device.download(end) for end in ends)
        return np.concatenate([end.astype(np.float64) for end in found])

    def _error(self, found: Any, expected: Any) -> float:
        error = float(abs(found - expected).max()) / self._scale
        return math.inf if math.isnan(error) else error
