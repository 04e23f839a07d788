"""Gradients without the operands of which they need the sizes alone.

PyTorch gives a gradient of images the images themselves, and reads nothing of them but
how large they are. A strip of the gradient would have to wait for them.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.ir.graph import Node
from mucudnn.torch.lowering.lowered import Call, Layout, Lowered, Operand
from mucudnn.torch.splitting.rewriting import Rewriting

__all__ = ["OfShape", "of_shape", "without_shape_operands"]

_IMAGE = 1
"""Where gradients have the images."""

_POOLS = frozenset(
    f"aten.{kind}_backward.default"
    for kind in (
        *("avg_pool2d", "avg_pool3d"),
        *("max_pool2d_with_indices", "max_pool3d_with_indices"),
    )
)
_CONVOLUTION = "aten.convolution_backward.default"
_TRANSPOSED = 7
"""Where the gradient of a convolution has whether it is a transposed one."""


@dataclass(frozen=True, slots=True)
class OfShape:
    """A call of `of_shape`, by its arguments.

    Attributes:
        function: PyTorch's.
        sizes: Of the images.
        args: PyTorch's, without the images.
    """

    function: Any
    sizes: tuple[int, ...]
    args: tuple[Any, ...]

    @classmethod
    def of(cls, call: Call) -> "OfShape | None":
        """What is called; None if it is something else."""
        if call.function is not of_shape:
            return None
        function, sizes, *args = call.args
        return cls(function, tuple(sizes), tuple(args))

    def call(self, whole: Call) -> Call:
        """As a call, like another."""
        args = (self.function, list(self.sizes), *self.args)
        return replace(whole, function=of_shape, args=args, into=None)


def of_shape(
    function: Any, sizes: list[int], gradient: torch.Tensor, *args: Any
) -> Any:
    """A gradient of images of which there are the sizes alone."""
    image = gradient.new_zeros(()).expand(sizes)
    return function(gradient, image, *args)


def without_shape_operands(lowered: Lowered) -> Lowered:
    """The same step, whose gradients of images do not read them.

    A bias's gradient of a transposed convolution is a sum of its own: the rows that a
    strip of the filter's reads overlap.
    """
    return _Writer(lowered).rewritten()


class _Writer(Rewriting):
    def write(self, node: Node) -> None:
        """A node, or what is in its place."""
        call = self.calls[node.name]
        of_images = node.op in _POOLS or (
            node.op == _CONVOLUTION and call.results == (0,)
        )
        if of_images and self._shape_alone(node, call):
            self._without_image(node, call)
        elif node.op == _CONVOLUTION and call.results == (1, 2) and self._turned(call):
            self._apart(node, call)
        else:
            self.nodes.append(node)

    def _turned(self, call: Call) -> bool:
        return call.args[_TRANSPOSED] is True

    def _shape_alone(self, node: Node, call: Call) -> bool:
        """Whether the images are dense, and are no other operand too."""
        image = call.args[_IMAGE]
        others = [*call.args[:_IMAGE], *call.args[_IMAGE + 1 :]]
        if not isinstance(image, Operand) or image in others:
            return False
        return _dense(self.layouts[node.inputs[image.index]])

    def _without_image(self, node: Node, call: Call) -> None:
        gone = call.args[_IMAGE].index
        moved = [
            Operand(a.index - (a.index > gone)) if isinstance(a, Operand) else a
            for a in call.args
        ]
        sizes = self.layouts[node.inputs[gone]].shape
        args = (*moved[:_IMAGE], *moved[_IMAGE + 1 :])
        self.calls[node.name] = OfShape(call.function, sizes, args).call(call)
        inputs = (*node.inputs[:gone], *node.inputs[gone + 1 :])
        self.nodes.append(replace(node, inputs=inputs))

    def _apart(self, node: Node, call: Call) -> None:
        """A filter's gradient, and its bias's, of a transposed convolution."""
        filters, bias = node.outputs
        self.calls[node.name] = replace(
            call, args=(*call.args[:-1], [False, True, False]), results=(1,)
        )
        self.nodes.append(replace(node, outputs=(filters,)))
        gradient = node.inputs[call.args[0].index]
        rank = len(self.layouts[gradient].shape)
        axes = [axis for axis in range(rank) if axis != 1]
        name = f"{node.name}:bias"
        summed = torch.ops.aten.sum.dim_IntList
        self.calls[name] = Call(
            summed, (Operand(0), axes), MappingProxyType({}), (None,)
        )
        self.nodes.append(
            Node(name, str(summed), (gradient,), (bias,), phase=node.phase)
        )


def _dense(layout: Layout) -> bool:
    plain = torch.empty(layout.shape, device="meta").stride()
    return layout.stride == tuple(plain)
