"""Prebuilt calls of cuDNN, and the geometry of convolutions for its descriptors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes and parameters of a problem; a 1-D one is written as 2-D of height 1.

    Shapes are (N, C, *spatial), (K, C // groups, *kernel) and (N, K, *spatial). Sums
    and scale factors are of `compute_type`. Channels last, the channels' stride is 1.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    data_type: DataType
    compute_type: DataType
    channels_last: bool

    @classmethod
    def of(cls, problem: ConvProblem) -> "Geometry":
        """Translate a problem."""
        flat = len(problem.x_shape) == 3

        def shape(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return (*sizes[:2], 1, *sizes[2:]) if flat else sizes

        def axes(values: tuple[int, ...], neutral: int) -> tuple[int, ...]:
            return (neutral, *values) if flat else values

        data_type = DATA_TYPES[problem.dtype]
        double = data_type is DataType.DOUBLE
        return cls(
            x=shape(problem.x_shape),
            w=shape(problem.w_shape),
            y=shape(problem.y_shape),
            stride=axes(problem.stride, 1),
            padding=axes(problem.padding, 0),
            dilation=axes(problem.dilation, 1),
            groups=problem.groups,
            data_type=data_type,
            compute_type=DataType.DOUBLE if double else DataType.FLOAT,
            channels_last=problem.layout == "NHWC",
        )

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the strides of a dense tensor in elements, as (N, C, *spatial)."""
        return strides_of(shape, channels_last=self.channels_last)


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
