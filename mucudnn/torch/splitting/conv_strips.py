"""PyTorch's convolutions by strips: which rows they read, and with which padding.

What a strip reads beyond the image is zeros that are there, so that it is padded alike
at both ends: PyTorch's convolutions know no other padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mucudnn.ir.strips import HEIGHT
from mucudnn.ir.traits import Interval, Rows
from mucudnn.ir.windows import Window
from mucudnn.torch.lowering.lowered import Call
from mucudnn.torch.splitting.axes import Axis, Cut, Site, StripCall
from mucudnn.torch.splitting.shape_operands import OfShape

__all__ = ["convolution", "convolution_backward"]

_HEIGHT = Axis(HEIGHT)


@dataclass(frozen=True, slots=True)
class _Options:
    """Of a convolution, as PyTorch has them behind its tensors.

    Attributes:
        window: Along the height.
        before: Arguments in front of them.
        stride: Steps of the windows.
        padding: Rows and columns around an image.
        dilation: Steps within windows.
        transposed: Whether it is the gradient of a convolution by its images.
        beyond: Rows and columns that a transposed one has more of.
        behind: Arguments behind those.
    """

    window: Window
    before: tuple[Any, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    beyond: tuple[int, ...]
    behind: tuple[Any, ...]

    @classmethod
    def of(cls, args: Sequence[Any], first: int, filters: Sequence[int]) -> "_Options":
        """Those that begin at an argument; one number for all axes is as many."""
        dims = len(filters) - HEIGHT
        stride, padding, dilation, transposed, beyond, *behind = args[first:]
        stride, padding, dilation, beyond = (
            tuple(some) * (dims if len(some) == 1 else 1)
            for some in (stride, padding, dilation, beyond)
        )
        window = Window(filters[HEIGHT], stride[0], padding[0], dilation[0])
        options = stride, padding, dilation, transposed, beyond
        return cls(window, tuple(args[:first]), *options, tuple(behind))

    def args(self, padding: int, beyond: int = 0) -> tuple[Any, ...]:
        """All arguments of a strip, with this padding along the height."""
        return (
            *self.before,
            list(self.stride),
            [padding, *self.padding[1:]],
            list(self.dilation),
            self.transposed,
            [beyond, *self.beyond[1:]],
            *self.behind,
        )


def convolution(site: Site, call: Call) -> Cut | None:
    """Of images with filters, and perhaps a bias."""
    x = site.operand(0)
    if x is None or not _images(site, 0) or x == site.operand(1):
        return None
    options = _Options.of(site.args, 3, site.shape(1))
    window, total = options.window, site.outputs[0].shape[HEIGHT]

    def strip(rows: Rows) -> StripCall:
        y = rows.of(total)
        if options.transposed:
            reads, padding = window.padded_for(y)
            least = (reads[1] - reads[0] - 1) * window.stride + window.span
            args = options.args(padding, y.count - least + 2 * padding)
        else:
            reads, args = window.under(y), options.args(0)
        return StripCall({x: reads}, y.interval, _with(call, args))

    return Cut({x: _HEIGHT}, (_HEIGHT,), stripped=strip)


def convolution_backward(site: Site, call: Call) -> Cut | None:
    """By images, of which there are the sizes alone; or by filters and a bias."""
    if (found := OfShape.of(call)) is not None:
        return _by_images(site, found, call)
    return _by_filters(site, call) if 0 not in call.results else None


def _by_images(site: Site, of: OfShape, call: Call) -> Cut | None:
    site = replace(site, args=of.args)
    gradient = site.operand(0)
    if gradient is None or not _images(site, 0) or gradient == site.operand(1):
        return None
    options = _Options.of(of.args, 3, site.shape(1))
    window, total = options.window, of.sizes[HEIGHT]

    def strip(rows: Rows) -> StripCall:
        x = rows.of(total)
        padding, reads = 0, window.under(x)
        if not options.transposed:
            reads, padding = window.padded_for(x)
        sizes = (*of.sizes[:HEIGHT], x.count, *of.sizes[HEIGHT + 1 :])
        mine = replace(of, sizes=sizes, args=options.args(padding))
        return StripCall({gradient: reads}, x.interval, mine.call(call))

    return Cut({gradient: _HEIGHT}, (_HEIGHT,), stripped=strip)


def _by_filters(site: Site, call: Call) -> Cut | None:
    """Rows of each window's gradient once, and those under them."""
    gradient, x = site.operand(0), site.operand(1)
    known = _images(site, 0) and _images(site, 1)
    if gradient is None or x is None or not known or gradient == x:
        return None
    options = _Options.of(site.args, 4, site.shape(2))
    if options.transposed and 2 in call.results:
        return None
    one, under = (x, gradient) if options.transposed else (gradient, x)
    total = site.inputs[one].shape[HEIGHT]

    def strip(rows: Rows) -> StripCall:
        y = rows.of(total)
        reads: dict[int, Interval] = {one: y.interval, under: options.window.under(y)}
        return StripCall(reads, None, _with(call, options.args(0)))

    nowhere = (None,) * len(site.outputs)
    return Cut({gradient: _HEIGHT, x: _HEIGHT}, nowhere, stripped=strip)


def _images(site: Site, position: int) -> bool:
    """Whether an argument has images whose height is where images have it."""
    return site.axis(position) == _HEIGHT and len(site.shape(position)) > HEIGHT


def _with(call: Call, args: tuple[Any, ...]) -> Call:
    return replace(call, args=args, into=None)
