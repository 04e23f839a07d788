"""PyTorch's pools by strips, and their gradients.

A maximum's position counts through all of an image; within a strip it counts from the
strip's first row, which is where its first window begins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mucudnn.ir.strips import HEIGHT
from mucudnn.ir.traits import Rows
from mucudnn.ir.windows import Window
from mucudnn.torch.lowering.lowered import Call
from mucudnn.torch.splitting.axes import Axis, Cut, Site, StripCall
from mucudnn.torch.splitting.shape_operands import OfShape

__all__ = ["avg_pool", "avg_pool_backward", "max_pool", "max_pool_backward"]

_HEIGHT = Axis(HEIGHT)


@dataclass(frozen=True, slots=True)
class _Pool:
    """What a pool's arguments say, one number for each axis of an image.

    Attributes:
        window: Along the height.
        kernel: Rows and columns of a window.
        stride: Steps of the windows.
        padding: Rows and columns around an image.
        dilation: Steps within windows.
        ceil: Whether windows may begin inside of an image and end outside.
        behind: Arguments behind those.
    """

    window: Window
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil: bool
    behind: tuple[Any, ...]

    @classmethod
    def of(cls, args: Sequence[Any], dims: int, *, dilated: bool) -> "_Pool":
        """Of the arguments that begin with the kernel."""
        kernel, *rest = args
        stride = rest[0] if rest and rest[0] else kernel
        padding = rest[1] if len(rest) > 1 else [0]
        dilation = rest[2] if dilated and len(rest) > 2 else [1]
        ceil, *behind = [*rest[2 + dilated :]] or [False]
        kernel, stride, padding, dilation = (
            tuple(some) * (dims if len(some) == 1 else 1)
            for some in (kernel, stride, padding, dilation)
        )
        window = Window(kernel[0], stride[0], padding[0], dilation[0])
        return cls(window, kernel, stride, padding, dilation, ceil, tuple(behind))

    def args(self, *, dilated: bool) -> tuple[Any, ...]:
        """Those of a strip, which has no padding along the height."""
        padding = [0, *self.padding[1:]]
        dilation = [list(self.dilation)] if dilated else []
        return list(self.kernel), list(self.stride), padding, *dilation, self.ceil

    def gathered(self, x: Rows, windows: int) -> tuple[tuple[int, int], int, int]:
        """Windows that hold some rows, and the rows from the first's on to the last."""
        first, past = self.window.holding(x, windows)
        start, stop = self.window.under(Rows(first, past, windows))
        return (first, past), start, max(stop, x.stop)


def max_pool(site: Site, call: Call) -> Cut | None:
    """The largest of every window, and where it is."""
    x, dims = site.operand(0), len(site.shape(0)) - HEIGHT
    if x is None or site.axis(0) != _HEIGHT or dims < 1:
        return None
    pool = _Pool.of(site.args[1:], dims, dilated=True)
    size, *others = site.shape(0)[HEIGHT:]
    total, row = site.outputs[0].shape[HEIGHT], math.prod(others)

    def strip(rows: Rows) -> StripCall:
        y = rows.of(total)
        first, stop = pool.window.under(y)
        reads = max(first, 0), min(stop, size)
        around = reads[0] - first, stop - reads[1]
        args = (call.function, around, first * row, *call.args[:1])
        mine = replace(call, function=_largest, args=(*args, *pool.args(dilated=True)))
        return StripCall({x: reads}, y.interval, mine)

    return Cut({x: _HEIGHT}, (_HEIGHT,) * len(site.outputs), stripped=strip)


def max_pool_backward(site: Site, call: Call) -> Cut | None:
    """To where each largest was; sizes of the images are given alone."""
    of = OfShape.of(call)
    if of is None or not _covers(of, dilated=True):
        return None
    gradient, places = of.args[0].index, of.args[-1].index
    if site.axes[gradient] != _HEIGHT or site.axes[places] != _HEIGHT:
        return None
    pool = _Pool.of(of.args[1:-1], len(of.sizes) - HEIGHT, dilated=True)
    windows = site.inputs[gradient].shape[HEIGHT]
    row = math.prod(of.sizes[HEIGHT + 1 :])

    def strip(rows: Rows) -> StripCall:
        reads, start, stop = pool.gathered(rows.of(of.sizes[HEIGHT]), windows)
        sizes = (*of.sizes[:HEIGHT], stop - start, *of.sizes[HEIGHT + 1 :])
        args = (of.args[0], of.function, start * row, *pool.args(dilated=True))
        mine = OfShape(_back_to_largest, sizes, (*args, of.args[-1])).call(call)
        return StripCall({gradient: reads, places: reads}, (start, stop), mine)

    read = {gradient: _HEIGHT, places: _HEIGHT}
    return Cut(read, (_HEIGHT,), stripped=strip)


def avg_pool(site: Site, call: Call) -> Cut | None:
    """The mean of every window, of zeros around the image as well."""
    x, dims = site.operand(0), len(site.shape(0)) - HEIGHT
    if x is None or site.axis(0) != _HEIGHT or dims < 1:
        return None
    pool = _Pool.of(site.args[1:], dims, dilated=False)
    total = site.outputs[0].shape[HEIGHT]
    if not _alike(pool, site.shape(0)[HEIGHT], total):
        return None

    def strip(rows: Rows) -> StripCall:
        y = rows.of(total)
        args = (*call.args[:1], *pool.args(dilated=False), *pool.behind)
        mine = replace(call, args=args, into=None)
        return StripCall({x: pool.window.under(y)}, y.interval, mine)

    return Cut({x: _HEIGHT}, (_HEIGHT,), stripped=strip)


def avg_pool_backward(site: Site, call: Call) -> Cut | None:
    """A share of every window's gradient; sizes of the images are given alone."""
    of = OfShape.of(call)
    if of is None or not _covers(of, dilated=False):
        return None
    gradient = of.args[0].index
    pool = _Pool.of(of.args[1:], len(of.sizes) - HEIGHT, dilated=False)
    windows = site.inputs[gradient].shape[HEIGHT]
    if site.axes[gradient] != _HEIGHT or not _alike(pool, of.sizes[HEIGHT], windows):
        return None

    def strip(rows: Rows) -> StripCall:
        reads, start, stop = pool.gathered(rows.of(of.sizes[HEIGHT]), windows)
        sizes = (*of.sizes[:HEIGHT], stop - start, *of.sizes[HEIGHT + 1 :])
        args = (of.args[0], *pool.args(dilated=False), *pool.behind)
        mine = replace(of, sizes=sizes, args=args)
        return StripCall({gradient: reads}, (start, stop), mine.call(call))

    return Cut({gradient: _HEIGHT}, (_HEIGHT,), stripped=strip)


def _alike(pool: _Pool, size: int, windows: int) -> bool:
    """Whether every window divides by as many rows, wherever along the height it is.

    Rows around the image count, and no window reaches beyond them.
    """
    counted = pool.behind[0] if pool.behind else True
    last = (windows - 1) * pool.window.stride + pool.window.span
    inside = last <= size + 2 * pool.window.padding
    return inside and (counted or not pool.window.padding)


def _covers(of: OfShape, *, dilated: bool) -> bool:
    """Whether a strip has as many windows as PyTorch finds in its rows.

    It finds one more where rows are left over behind the last and are rounded up.
    """
    pool = _Pool.of(of.args[1:], len(of.sizes) - HEIGHT, dilated=dilated)
    return not pool.ceil or pool.window.span >= pool.window.stride


def _largest(
    function: Any,
    around: tuple[int, int],
    before: int,
    image: torch.Tensor,
    *args: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A strip's maxima, and where they are in the whole image.

    Args:
        function: PyTorch's pool.
        around: Rows above and below the image that windows reach over.
        before: Elements of the image in front of the strip's first window.
        image: The strip.
        args: Further ones of the pool.
    """
    if any(around):
        columns = [0, 0] * (image.dim() - HEIGHT - 1)
        image = torch.constant_pad_nd(image, [*columns, *around], -math.inf)
    largest, places = function(image, *args)
    return largest, places.add_(before)


def _back_to_largest(
    gradient: torch.Tensor,
    image: torch.Tensor,
    function: Any,
    before: int,
    *args: Any,
) -> torch.Tensor:
    """The gradient of a strip, from maxima whose places are in the whole image."""
    *options, places = args
    most = math.prod(image.shape[HEIGHT:]) - 1
    here = places.sub(before).clamp_(0, most)
    found: torch.Tensor = function(gradient, image, *options, here)
    return found
