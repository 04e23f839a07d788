"""How operations are cut into strips: along the first axis of their images.

Images are (N, C, *spatial); a strip is some of the rows of axis 2, the height of an
image or the depth of a volume. Rows of a result depend on as many rows of an input as
the operation's windows reach over. A strip reads those, zeros where they lie outside of
the image, and computes each row of its results once: nothing is added up where strips
meet. That holds for gradients as well, which gather from all windows that hold a row.
The few operations that cannot compute just the rows asked for compute some more.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.slices import counted
from mucudnn.ir.tensor import TensorSpec
from mucudnn.ir.traits import Batch, Interval, Operands, Rows, Strip
from mucudnn.ir.windows import Window

__all__ = ["HEIGHT", "STRIPS", "strips_of"]

HEIGHT = 2
"""The first axis of images, in (N, C, *spatial)."""

_LABELS = 1
"""The same axis of labels, (N, *spatial)."""

Attributes = Mapping[str, Any]


def _problem(whole: ConvProblem, rows: int, padding: int) -> ConvProblem:
    """A convolution of some rows of an image."""
    return replace(
        whole,
        x_shape=(*whole.x_shape[:HEIGHT], rows, *whole.x_shape[HEIGHT + 1 :]),
        padding=(padding, *whole.padding[1:]),
    )


def _conv(node: Operands, rows: Rows) -> Strip:
    """Rows of y and the rows of x under them, without padding along the axis."""
    problem: ConvProblem = node.attrs["problem"]
    if problem.direction is Direction.BACKWARD_DATA:
        return _conv_transpose(node, rows)
    y = rows.of(problem.y_shape[HEIGHT])
    x = _window(problem).under(y)
    attrs = {**node.attrs, "problem": _problem(problem, x[1] - x[0], 0)}
    if problem.direction is Direction.BACKWARD_FILTER:
        return Strip((x, y.interval), None, attrs)
    others = (None,) * (len(node.inputs) - 1)  # a filter, and perhaps a bias
    return Strip((x, *others), y.interval, attrs)


def _conv_transpose(node: Operands, rows: Rows) -> Strip:
    """Rows of x, and the rows of y whose windows hold them."""
    problem: ConvProblem = node.attrs["problem"]
    x = rows.of(problem.x_shape[HEIGHT])
    y, padding = _window(problem).padded_for(x)
    attrs = {**node.attrs, "problem": _problem(problem, x.count, padding)}
    return Strip((y, None), x.interval, attrs)


def _window(problem: ConvProblem) -> Window:
    kernel, dilation = problem.w_shape[HEIGHT], problem.dilation[0]
    return Window(kernel, problem.stride[0], problem.padding[0], dilation)


def _pool(node: Operands, rows: Rows) -> Strip:
    """Rows of a pooled image; padding that counts as zeros is read as such."""
    kernel, step, padding = (node.attrs[w][0] for w in ("kernel", "stride", "padding"))
    y = rows.of(node.outputs[0].shape[HEIGHT])
    margin = _margin(node, padding)
    first = y.start * step - padding
    start = max(first, -margin)
    stop = (y.stop - 1) * step - padding + kernel
    stop = min(stop, node.inputs[0].shape[HEIGHT] + margin)
    return Strip(((start, stop),), (y.start, y.stop), _padded(node, start - first))


def _pool_grad(node: Operands, rows: Rows) -> Strip:
    """Rows of an image, and of all windows that hold one of them."""
    kernel, step, padding = (node.attrs[w][0] for w in ("kernel", "stride", "padding"))
    x = rows.of(node.outputs[0].shape[HEIGHT])
    windows = node.inputs[0].shape[HEIGHT]
    margin = _margin(node, padding)
    first, past = Window(kernel, step, padding).holding(x, windows)
    corner = first * step - padding
    start = max(corner, -margin)
    stop = min((past - 1) * step - padding + kernel, x.total + margin)
    made = start, max(stop, x.stop)
    reads = ((first, past),) * len(node.inputs)
    return Strip(reads, made, _padded(node, start - corner))


def _margin(node: Operands, padding: int) -> int:
    """Rows around an image that belong to it: zeros that are averaged as well."""
    return padding if node.attrs.get("count_include_pad", False) else 0


def _padded(node: Operands, padding: int) -> Attributes:
    return {**node.attrs, "padding": (padding, *node.attrs["padding"][1:])}


def _upsample_nearest(node: Operands, rows: Rows) -> Strip:
    scale = node.attrs["scale"][0]
    y = rows.of(node.outputs[0].shape[HEIGHT])
    start, stop = y.start // scale, -(-y.stop // scale)
    return Strip(((start, stop),), (start * scale, stop * scale), node.attrs)


def _upsample_nearest_grad(node: Operands, rows: Rows) -> Strip:
    scale = node.attrs["scale"][0]
    x = rows.of(node.outputs[0].shape[HEIGHT])
    reads = x.start * scale, x.stop * scale
    return Strip((reads,), (x.start, x.stop), node.attrs)


def _upsample_bilinear(node: Operands, rows: Rows) -> Strip:
    """A row more at either end: what a strip makes of its own border is not kept."""
    scale, size = node.attrs["scale"][0], node.inputs[0].shape[HEIGHT]
    y = rows.of(node.outputs[0].shape[HEIGHT])
    start, stop = _around(y.start // scale, -(-y.stop // scale), size)
    return Strip(((start, stop),), (start * scale, stop * scale), node.attrs)


def _upsample_bilinear_grad(node: Operands, rows: Rows) -> Strip:
    scale = node.attrs["scale"][0]
    x = rows.of(node.outputs[0].shape[HEIGHT])
    made = _around(x.start, x.stop, x.total)
    return Strip(((made[0] * scale, made[1] * scale),), made, node.attrs)


def _around(start: int, stop: int, size: int) -> Interval:
    return max(0, start - 1), min(size, stop + 1)


def _box(node: Operands, rows: Rows) -> Strip:
    """Rows of a box that is cut out of an image."""
    y = rows.of(node.outputs[0].shape[HEIGHT])
    first = node.attrs["starts"][HEIGHT]
    attrs = {**node.attrs, **_here(node, "starts", 0), **_here(node, "stops", y.count)}
    return Strip(((first + y.start, first + y.stop),), (y.start, y.stop), attrs)


def _pad(node: Operands, rows: Rows) -> Strip:
    """Rows of an image with zeros around, which read one of its own at least."""
    y = rows.of(node.outputs[0].shape[HEIGHT])
    before, size = node.attrs["before"][HEIGHT], node.inputs[0].shape[HEIGHT]
    start, stop = min(y.start - before, size - 1), max(y.stop - before, 1)
    attrs = {**node.attrs, **_here(node, "before", 0), **_here(node, "after", 0)}
    return Strip(((start, stop),), (start + before, stop + before), attrs)


def _here(node: Operands, name: str, value: int) -> Attributes:
    """An attribute that has a number for each axis, with another for the height."""
    numbers = list(node.attrs[name])
    numbers[HEIGHT] = value
    return {name: tuple(numbers)}


def _drawn(
    attrs: Attributes, inputs: Sequence[TensorSpec], rows: Rows
) -> Mapping[str, Any]:
    """Numbers that follow from an element's position in the whole tensor."""
    height, *others = inputs[0].shape[HEIGHT:]
    here, row = rows.of(height), math.prod(others)
    places = {"run": here.count * row, "apart": height * row}
    return {**attrs, "offset": attrs.get("offset", 0) + here.start * row, **places}


_ONE = Batch((HEIGHT,), (HEIGHT,))
_TWO = Batch((HEIGHT, HEIGHT), (HEIGHT,))
_AND_WEIGHTS = Batch((HEIGHT, None), (HEIGHT,))
_LOSS = partial(counted, 1)
_ERROR = partial(counted, 0)


def _convolution(whole: Operands) -> Batch | None:
    problem: ConvProblem = whole.attrs["problem"]
    if problem.layout != "NCHW":
        return None
    if problem.direction is Direction.BACKWARD_FILTER:
        return Batch((HEIGHT, HEIGHT), (None,), accumulates=True, reach=_conv)
    others = (None,) * (len(whole.inputs) - 1)
    return replace(_AND_WEIGHTS, inputs=(HEIGHT, *others), reach=_conv)


def _concat(whole: Operands) -> Batch | None:
    """Side by side in channels."""
    joined = Batch((HEIGHT,) * len(whole.inputs), (HEIGHT,))
    return joined if whole.attrs["axis"] == 1 else None


def _slice(whole: Operands) -> Batch | None:
    """A box; not the view of a slice, which says nothing of it."""
    return replace(_ONE, reach=_box) if "stops" in whole.attrs else None


STRIPS: Mapping[str, Batch | Callable[[Operands], Batch | None]] = MappingProxyType(
    {
        "accuracy": Batch((HEIGHT, _LABELS), (None,), accumulates=True),
        "add": _TWO,
        "add_relu": _TWO,
        "avg_pool": replace(_ONE, reach=_pool),
        "avg_pool_grad": replace(_ONE, reach=_pool_grad),
        "batch_norm_eval": Batch((HEIGHT, *(None,) * 4), (HEIGHT,)),
        "bias": _AND_WEIGHTS,
        "bias_grad": Batch((HEIGHT,), (None,)),
        "bias_relu": _AND_WEIGHTS,
        "bias_relu_grad": Batch((HEIGHT, HEIGHT), (HEIGHT, None)),
        "cast": _ONE,
        "concat": _concat,
        "conv": _convolution,
        "dropout": replace(_AND_WEIGHTS, sliced=_drawn),
        "gelu": _ONE,
        "gelu_grad": _TWO,
        "identity": _ONE,
        "leaky_relu": _ONE,
        "leaky_relu_grad": _TWO,
        "lrn": _ONE,
        "lrn_grad": Batch((HEIGHT,) * 3, (HEIGHT,)),
        "max_pool": Batch((HEIGHT,), (HEIGHT, HEIGHT), reach=_pool),
        "max_pool_grad": replace(_TWO, reach=_pool_grad),
        "mean_squared_error": Batch((HEIGHT, HEIGHT), (None,), (0,), sliced=_ERROR),
        "mean_squared_error_grad": Batch(
            (HEIGHT, HEIGHT, None), (HEIGHT,), (0,), sliced=_ERROR
        ),
        "multiply": _TWO,
        "pad": replace(_ONE, reach=_pad),
        "relu": _ONE,
        "relu_grad": _TWO,
        "scale": _ONE,
        "sigmoid": _ONE,
        "sigmoid_grad": _TWO,
        "slice": _slice,
        "softmax_cross_entropy": Batch(
            (HEIGHT, _LABELS), (None, HEIGHT), (0,), sliced=_LOSS
        ),
        "softmax_cross_entropy_grad": Batch(
            (HEIGHT, _LABELS, None), (HEIGHT,), (0,), sliced=_LOSS
        ),
        "tanh": _ONE,
        "tanh_grad": _TWO,
        "upsample_bilinear": replace(_ONE, reach=_upsample_bilinear),
        "upsample_bilinear_grad": replace(_ONE, reach=_upsample_bilinear_grad),
        "upsample_nearest": replace(_ONE, reach=_upsample_nearest),
        "upsample_nearest_grad": replace(_ONE, reach=_upsample_nearest_grad),
    }
)
"""Operation -> how it is cut into strips, where it has images."""


def strips_of(op: str, whole: Operands) -> Batch | None:
    """How an operation on certain operands is cut into strips; None if it is not."""
    found = STRIPS.get(op)
    if found is None or not whole.inputs or len(whole.inputs[0].shape) <= HEIGHT:
        return None
    how = found if isinstance(found, Batch) else found(whole)
    specs = (*whole.inputs, *whole.outputs)
    if how is None or any(spec.layout != "NCHW" for spec in specs):
        return None
    axes = zip(specs, (*how.inputs, *how.outputs), strict=True)
    enough = all(axis is None or axis < len(spec.shape) for spec, axis in axes)
    return how if enough else None
