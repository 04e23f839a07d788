"""Cut operations into strips along the first spatial axis of their images.

Images are (N, C, *spatial); a strip is a range of rows of axis 2, the height of an
image or the depth of a volume. Rows of a result depend on as many rows of an input as
the operation's windows cover (the halo). A strip reads those rows, zeros outside of the
image, and computes each row of its results once: nothing is accumulated across strip
borders. The same holds for gradients, which gather from all windows that contain a row.
The few operations that cannot compute exactly the requested rows compute some more.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.ir.tensor import TensorSpec
from mucudnn.ir.traits import Batch, Operands, Rows, Strip, Window

HEIGHT = 2
"""The first axis of images, in (N, C, *spatial)."""

LABELS = 1
"""First spatial axis of labels, (N, *spatial)."""

Attributes = Mapping[str, Any]


def _row_problem(whole: ConvProblem, rows: int, padding: int) -> ConvProblem:
    return replace(
        whole,
        x_shape=(*whole.x_shape[:HEIGHT], rows, *whole.x_shape[HEIGHT + 1 :]),
        padding=(padding, *whole.padding[1:]),
    )


def _conv(node: Operands, rows: Rows) -> Strip:
    """Map rows of y to the rows of x below them, without padding along the axis."""
    problem: ConvProblem = node.attrs["problem"]
    if problem.direction is Direction.BACKWARD_DATA:
        return _conv_transpose(node, rows)
    y = rows.of(problem.y_shape[HEIGHT])
    # The strip has no padding along the axis: rows beyond the image are read as zeros.
    x = _window(problem).under(y)
    attrs = {**node.attrs, "problem": _row_problem(problem, x[1] - x[0], 0)}
    if problem.direction is Direction.BACKWARD_FILTER:
        return Strip((x, y.interval), None, attrs)
    others = (None,) * (len(node.inputs) - 1)  # a filter, and perhaps a bias
    return Strip((x, *others), y.interval, attrs)


def _conv_transpose(node: Operands, rows: Rows) -> Strip:
    """Map rows of x to the rows of y whose windows contain them."""
    problem: ConvProblem = node.attrs["problem"]
    x = rows.of(problem.x_shape[HEIGHT])
    y, padding = _window(problem).padded_for(x)
    attrs = {**node.attrs, "problem": _row_problem(problem, x.count, padding)}
    return Strip((y, None), x.interval, attrs)


def _window(problem: ConvProblem) -> Window:
    kernel, dilation = problem.w_shape[HEIGHT], problem.dilation[0]
    return Window(kernel, problem.stride[0], problem.padding[0], dilation)


def _pool(node: Operands, rows: Rows) -> Strip:
    """Map rows of a pooled image; zero padding that is averaged is read as zeros."""
    kernel, step, padding = (node.attrs[w][0] for w in ("kernel", "stride", "padding"))
    y = rows.of(node.outputs[0].shape[HEIGHT])
    margin = _counted_margin(node, padding)
    first = y.start * step - padding
    # Padding that counts in averages is read as zeros; the rest stays padding.
    start = max(first, -margin)
    stop = (y.stop - 1) * step - padding + kernel
    stop = min(stop, node.inputs[0].shape[HEIGHT] + margin)
    return Strip(((start, stop),), (y.start, y.stop), _padded(node, start - first))


def _pool_grad(node: Operands, rows: Rows) -> Strip:
    """Map rows of an image to all windows that contain one of them."""
    kernel, step, padding = (node.attrs[w][0] for w in ("kernel", "stride", "padding"))
    x = rows.of(node.outputs[0].shape[HEIGHT])
    windows = node.inputs[0].shape[HEIGHT]
    margin = _counted_margin(node, padding)
    first, past = Window(kernel, step, padding).holding(x, windows)
    corner = first * step - padding
    start = max(corner, -margin)
    stop = min((past - 1) * step - padding + kernel, x.total + margin)
    made = start, max(stop, x.stop)
    reads = ((first, past),) * len(node.inputs)
    return Strip(reads, made, _padded(node, start - corner))


def _counted_margin(node: Operands, padding: int) -> int:
    """Return the number of padding rows that count as zeros in averages."""
    return padding if node.attrs.get("count_include_pad", False) else 0


def _padded(node: Operands, padding: int) -> Attributes:
    return {**node.attrs, "padding": (padding, *node.attrs["padding"][1:])}


def _upsample(node: Operands, rows: Rows, *, border: int) -> Strip:
    """Read `border` more rows at both ends, whose results are wrong and discarded."""
    scale, size = node.attrs["scale"][0], node.inputs[0].shape[HEIGHT]
    y = rows.of(node.outputs[0].shape[HEIGHT])
    start = max(0, y.start // scale - border)
    stop = min(size, -(-y.stop // scale) + border)
    return Strip(((start, stop),), (start * scale, stop * scale), node.attrs)


def _upsample_grad(node: Operands, rows: Rows, *, border: int) -> Strip:
    scale = node.attrs["scale"][0]
    x = rows.of(node.outputs[0].shape[HEIGHT])
    start, stop = max(0, x.start - border), min(x.total, x.stop + border)
    return Strip(((start * scale, stop * scale),), (start, stop), node.attrs)


def _box(node: Operands, rows: Rows) -> Strip:
    y = rows.of(node.outputs[0].shape[HEIGHT])
    first = node.attrs["starts"][HEIGHT]
    attrs = _with_heights(node, starts=0, stops=y.count)
    return Strip(((first + y.start, first + y.stop),), (y.start, y.stop), attrs)


def _pad(node: Operands, rows: Rows) -> Strip:
    """Map rows of a padded image; at least one row of the image is read."""
    y = rows.of(node.outputs[0].shape[HEIGHT])
    before, size = node.attrs["before"][HEIGHT], node.inputs[0].shape[HEIGHT]
    start, stop = min(y.start - before, size - 1), max(y.stop - before, 1)
    attrs = _with_heights(node, before=0, after=0)
    return Strip(((start, stop),), (start + before, stop + before), attrs)


def _with_heights(node: Operands, **heights: int) -> Attributes:
    """Replace the heights of attributes that have one number per axis."""
    attrs = dict(node.attrs)
    for name, value in heights.items():
        attrs[name] = (*attrs[name][:HEIGHT], value, *attrs[name][HEIGHT + 1 :])
    return attrs


def drawn_strip(
    attrs: Attributes, inputs: Sequence[TensorSpec], rows: Rows
) -> Mapping[str, Any]:
    """Derive random numbers from each element's position in the whole tensor."""
    height, *others = inputs[0].shape[HEIGHT:]
    here, row = rows.of(height), math.prod(others)
    places = {"run": here.count * row, "apart": height * row}
    return {**attrs, "offset": attrs.get("offset", 0) + here.start * row, **places}


StripRule = Callable[[Operands], Batch | None]
"""Function from a node's operands to how it is cut; None if it cannot be."""

IMAGE = Batch((HEIGHT,), (HEIGHT,))
TWO_IMAGES = Batch((HEIGHT, HEIGHT), (HEIGHT,))
IMAGE_AND_WEIGHTS = Batch((HEIGHT, None), (HEIGHT,))
POOL = replace(IMAGE, reach=_pool)
POOL_GRAD = replace(IMAGE, reach=_pool_grad)
BOX = replace(IMAGE, reach=_box)
PAD = replace(IMAGE, reach=_pad)


def upsample_strips(*, border: int, grad: bool = False) -> Batch:
    """Return strips of upsampling, whose rows depend on `border` rows around them."""
    return replace(
        IMAGE, reach=partial(_upsample_grad if grad else _upsample, border=border)
    )


def cut_conv(whole: Operands) -> Batch | None:
    """Cut convolutions on channels-first images; filter gradients are sums."""
    problem: ConvProblem = whole.attrs["problem"]
    if problem.layout != "NCHW":
        return None
    if problem.direction is Direction.BACKWARD_FILTER:
        return Batch((HEIGHT, HEIGHT), (None,), accumulates=True, reach=_conv)
    others = (None,) * (len(whole.inputs) - 1)
    return replace(IMAGE_AND_WEIGHTS, inputs=(HEIGHT, *others), reach=_conv)


def cut_concat(whole: Operands) -> Batch | None:
    """Cut concatenations along the channels."""
    joined = Batch((HEIGHT,) * len(whole.inputs), (HEIGHT,))
    return joined if whole.attrs["axis"] == 1 else None


def strips_of(known: Batch | StripRule, whole: Operands) -> Batch | None:
    """Return how an operation is cut into strips, if its operands are images."""
    if not whole.inputs or len(whole.inputs[0].shape) <= HEIGHT:
        return None
    how = known if isinstance(known, Batch) else known(whole)
    specs = (*whole.inputs, *whole.outputs)
    if how is None or any(spec.layout != "NCHW" for spec in specs):
        return None
    axes = zip(specs, (*how.inputs, *how.outputs), strict=True)
    enough = all(axis is None or axis < len(spec.shape) for spec, axis in axes)
    return how if enough else None
