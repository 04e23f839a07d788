"""What PyTorch calls a convolution, as our problems.

A transposed convolution is the gradient of another one with respect to its input; then
the output is that one's input, and the roles of the kernels change places.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["Geometry", "Role", "operands"]


class Role(Enum):
    """What one kernel computes for PyTorch."""

    OUTPUT = auto()
    INPUT_GRADIENT = auto()
    FILTER_GRADIENT = auto()


_DIRECTIONS = {
    (Role.OUTPUT, False): Direction.FORWARD,
    (Role.INPUT_GRADIENT, False): Direction.BACKWARD_DATA,
    (Role.FILTER_GRADIENT, False): Direction.BACKWARD_FILTER,
    (Role.OUTPUT, True): Direction.BACKWARD_DATA,
    (Role.INPUT_GRADIENT, True): Direction.FORWARD,
    (Role.FILTER_GRADIENT, True): Direction.BACKWARD_FILTER,
}

_DTYPES = {torch.float32: "float32", torch.float64: "float64"}


@dataclass(frozen=True, slots=True)
class Geometry:
    """The options of `aten::convolution`, and what its operands look like.

    Attributes:
        stride: One a spatial axis, or one for all; so are the next two.
        output_padding: What is added to one end of a transposed convolution's output;
            means nothing for others, but double backward hands it on.
        layout: How the operands of our kernels are stored; see `ConvProblem`.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    layout: str

    @classmethod
    def of(
        cls, x: Any, w: Any, bias_sizes: Any, options: tuple[Any, ...]
    ) -> "Geometry":
        """From the arguments of a call, stored as PyTorch stores its result.

        Raises:
            ValueError: It is not computed by us.
            RuntimeError: PyTorch refuses it.
        """
        if x.dtype not in _DTYPES or w.dtype != x.dtype:
            raise ValueError(f"data type {str(x.dtype).removeprefix('torch.')}")
        if not 3 <= x.dim() <= 5 or w.dim() != x.dim():
            raise ValueError(f"{x.dim()} axes")
        if not x.numel() or not w.numel():
            raise ValueError("no elements")
        stride, padding, dilation, transposed, output_padding, groups = options
        axes = x.dim() - 2
        lists = (stride, padding, dilation, output_padding)
        full = [(*v,) * axes if len(v) == 1 else (*v,) for v in lists]
        if any(len(v) != axes for v in full):
            raise ValueError("options of another number of axes")
        chosen = torch._C._select_conv_backend(x, w, None, *options, bias_sizes)
        form = torch._C._conv_determine_backend_memory_format(x, w, chosen)
        plain = form == torch.contiguous_format or axes == 1
        return cls(
            stride=full[0],
            padding=full[1],
            dilation=full[2],
            transposed=transposed,
            output_padding=full[3],
            groups=groups,
            layout="NCHW" if plain else "NHWC",
        )

    def output_shape(self, x: Any, w: Any) -> tuple[int, ...]:
        """Shape of what a transposed convolution gives."""
        spatial = (
            (size - 1) * step - 2 * pad + dil * (k - 1) + 1 + more
            for size, k, step, pad, dil, more in zip(
                x[2:],
                w[2:],
                self.stride,
                self.padding,
                self.dilation,
                self.output_padding,
                strict=True,
            )
        )
        return (x[0], w[1] * self.groups, *spatial)

    def problem(self, role: Role, x: Any, w: Any) -> ConvProblem:
        """The problem that computes `role` for operands of these shapes.

        Raises:
            ValueError: They contradict each other, or no problem says the same.
        """
        image = self.output_shape(x.shape, w.shape) if self.transposed else x.shape
        problem = ConvProblem(
            direction=_DIRECTIONS[role, self.transposed],
            x_shape=image,
            w_shape=w.shape,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            dtype=_DTYPES[x.dtype],
            layout=self.layout,
        )
        if self.transposed and problem.y_shape != x.shape:
            raise ValueError("output_padding beyond the stride")
        return problem

    def result_shape(self, x: Any, w: Any) -> tuple[int, ...]:
        """Shape of the output."""
        problem = self.problem(Role.OUTPUT, x, w)
        return problem.x_shape if self.transposed else problem.y_shape


def operands(role: Role, transposed: bool, gy: Any, x: Any, w: Any) -> tuple[Any, Any]:
    """The two inputs of a role's kernel, in the order of its problem's operands."""
    if role is Role.OUTPUT:
        return x, w
    if role is Role.INPUT_GRADIENT:
        return gy, w
    return (gy, x) if transposed else (x, gy)
