"""Prebuilt calls of cuDNN, and the geometry of convolutions for its descriptors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mucudnn.backends.cuda.libcudnn import DataType
from mucudnn.ir.conv import ConvProblem, Direction


@dataclass(frozen=True, slots=True)
class Launch:
    """A call `function(handle, *arguments)` of C, which returns a status.

    `name` is the function's, for errors; `kept` objects live as long as the launch.
    """

    function: Callable[..., int]
    arguments: tuple[Any, ...]
    name: str
    kept: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Operands:
    """Addresses of two inputs, an output and a workspace of `nbytes`.

    In the order of `ConvLibrary.run`: (x, w) -> y, (dy, w) -> dx, (x, dy) -> dw.
    """

    a: int
    b: int
    out: int
    workspace: int
    nbytes: int

    def alignment(self, most: int) -> int:
        """Return the largest power of two up to `most` that divides all addresses."""
        bits = self.a | self.b | self.out | most
        return min(most, bits & -bits)


# A convolution in cuDNN's terms: tensors of at least four axes with strides.


DATA_TYPES = {
    "float16": DataType.HALF,
    "bfloat16": DataType.BFLOAT16,
    "float32": DataType.FLOAT,
    "float64": DataType.DOUBLE,
}


def as_planar(problem: ConvProblem) -> ConvProblem:
    """Return a 1-D problem as a 2-D one of height 1, and any other as it is."""
    if len(problem.x_shape) > 3:
        return problem
    (n, c, *width), (k, depth, *taps) = problem.x_shape, problem.w_shape
    return replace(
        problem,
        x_shape=(n, c, 1, *width),
        w_shape=(k, depth, 1, *taps),
        stride=(1, *problem.stride),
        padding=(0, *problem.padding),
        dilation=(1, *problem.dilation),
    )


def compute_type(problem: ConvProblem) -> DataType:
    """Return the type of sums and scale factors."""
    return DataType.DOUBLE if problem.dtype == "float64" else DataType.FLOAT


def strides_of(shape: Sequence[int], *, channels_last: bool) -> tuple[int, ...]:
    """Return a dense tensor's strides in elements; axes are written channels first."""
    if not channels_last:
        return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    channels, spatial = shape[1], shape[2:]
    inner = [channels * math.prod(spatial[i + 1 :]) for i in range(len(spatial))]
    return (channels * math.prod(spatial), 1, *inner)


def operand_order(direction: Direction) -> tuple[str, str, str]:
    """Return the names of the two inputs and the output: x, w or y."""
    match direction:
        case Direction.FORWARD:
            return "x", "w", "y"
        case Direction.BACKWARD_DATA:
            return "y", "w", "x"
        case Direction.BACKWARD_FILTER:
            return "x", "y", "w"
