"""A convolution on bare addresses, from dimensions and strides, as cuDNN is told it."""

import ctypes
import math
from dataclasses import dataclass

import numpy as np

from mucudnn.ir.conv import Direction
from tests.conv_problems import conv_problem
from tests.reference import reference

_NAMES = {0: "float32", 1: "float64", 2: "float16"}


@dataclass(frozen=True)
class Tensor:
    """Dimensions (N, C, *spatial), strides in elements, and how it is aligned."""

    dims: tuple
    strides: tuple
    data_type: int
    alignment: int

    @property
    def dtype(self):
        return _NAMES[self.data_type]

    def at(self, pointer):
        """A view of memory in the order of `dims`; it must be dense.

        What is not would be written outside of its memory.
        """
        itemsize = np.dtype(self.dtype).itemsize
        last = sum((n - 1) * s for n, s in zip(self.dims, self.strides, strict=True))
        if last + 1 != math.prod(self.dims):
            raise ValueError(f"{self} is not densely packed")
        flat = window(pointer, (last + 1) * itemsize).view(self.dtype)
        strides = tuple(s * itemsize for s in self.strides)
        return np.lib.stride_tricks.as_strided(flat, self.dims, strides)


@dataclass(frozen=True)
class Convolution:
    """What one call computes: out = convolution + beta * out."""

    direction: Direction
    x: Tensor
    w: Tensor
    y: Tensor
    stride: tuple
    padding: tuple
    dilation: tuple
    beta: float
    bias: Tensor | None = None  # (1, K, 1, …): added to y, before a ReLU

    @property
    def bias_is_wide(self):
        """Whether it is of another type than y, channels first: nothing takes that."""
        if self.bias is None or self.y.strides[1] == 1:
            return False
        return self.bias.data_type != self.y.data_type

    @property
    def batch(self):
        return self.x.dims[0]

    @property
    def alignment(self):
        return min(t.alignment for t in (self.x, self.w, self.y, self.bias) if t)

    def state(self):
        """As plain JSON values."""
        tensors = {
            name: [t.dims, t.strides, int(t.data_type), t.alignment]
            for name, t in zip("xwyb", (self.x, self.w, self.y, self.bias), strict=True)
            if t is not None
        }
        axes = [self.stride, self.padding, self.dilation]
        return [self.direction.value, tensors, axes, self.beta]

    @classmethod
    def restored(cls, state):
        direction, tensors, axes, beta = state
        made = {
            name: Tensor(tuple(dims), tuple(strides), data_type, alignment)
            for name, (dims, strides, data_type, alignment) in tensors.items()
        }
        x, w, y = (made[name] for name in "xwy")
        bias = made.get("b")
        return cls(Direction(direction), x, w, y, *map(tuple, axes), beta, bias)

    def compute(self, pointers, workspace, beta):
        """Spoil the workspace, then write the output."""
        address, nbytes = workspace
        if nbytes:
            window(address, nbytes)[...] = 0xFF
        problem = conv_problem(
            self.x.dims,
            self.w.dims,
            self.direction,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.x.dims[1] // self.w.dims[1],
            dtype=self.x.dtype,
        )
        if problem.y_shape != self.y.dims:
            raise ValueError(f"y is {self.y.dims}, x and w give {problem.y_shape}")
        x, w, y = (
            t.at(p) for t, p in zip((self.x, self.w, self.y), pointers, strict=False)
        )
        a, b, out = {
            Direction.FORWARD: (x, w, y),
            Direction.BACKWARD_DATA: (y, w, x),
            Direction.BACKWARD_FILTER: (x, y, w),
        }[self.direction]
        result = reference(problem, a, b)
        if self.bias is not None:
            result = np.maximum(result + self.bias.at(pointers[3]).astype("f8"), 0)
        out[...] = result + beta * out.astype("float64") if beta else result


def strides_of(dims, *, last):
    """Of a dense tensor (N, C, *spatial) stored channels first or last."""
    if not last:
        return tuple(math.prod(dims[i + 1 :]) for i in range(len(dims)))
    stored = (dims[0], *dims[2:], dims[1])
    outer = [math.prod(stored[i + 1 :]) for i in range(len(stored))]
    return (outer[0], outer[-1], *outer[1:-1])


def window(pointer, nbytes):
    """Bytes of this process's memory."""
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(pointer), np.uint8)
