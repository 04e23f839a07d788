"""Rules that cut PyTorch's operations along the height of images, into strips.

An operation that computes each row from the same row of its operands is cut by its rule
for the batch. Operations with windows (convolutions, pools, resized and padded images)
have rules here: for the rows that a strip computes, a rule gives the rows that it reads
and the arguments of its call. Other operations stay whole.

Rows that a strip of a convolution reads beyond the image are stored as zeros. PyTorch's
convolutions pad both ends alike, which the first and the last strip could not use.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.ir.strips import HEIGHT
from mucudnn.ir.traits import Interval, Rows, Window
from mucudnn.torch.lowering.lowered import Call
from mucudnn.torch.splitting.axes import Axis, Cut, Site, StripCall
from mucudnn.torch.splitting.batch_rules import carried, cut_of
from mucudnn.torch.splitting.prepare import NORMS, ShapedGradient
from mucudnn.torch.splitting.recurrent import RECURRENT

_HEIGHT = Axis(HEIGHT)


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of a convolution among the arguments of its call.

    Attributes:
        window: The window along the height.
        transposed: Whether the convolution is transposed.
        given: All arguments, with one number for each spatial axis in every option.
        first: Position of the stride, before padding, dilation, `transposed` and the
            additional rows and columns of a transposed convolution.
    """

    window: Window
    transposed: bool
    given: tuple[Any, ...]
    first: int

    @classmethod
    def of(cls, args: Sequence[Any], first: int, filters: Sequence[int]) -> "_Options":
        """Return the options that begin at argument `first`."""
        given = [*args]
        for at in (first, first + 1, first + 2, first + 4):
            given[at] = _for_each_axis(given[at], len(filters) - HEIGHT)
        stride, padding, dilation, transposed = given[first : first + 4]
        window = Window(filters[HEIGHT], stride[0], padding[0], dilation[0])
        return cls(window, transposed, tuple(given), first)

    def args(self, padding: int, output_padding: int = 0) -> tuple[Any, ...]:
        """Return all arguments of a strip with this padding along the height."""
        found = [*self.given]
        for at, along in ((1, padding), (4, output_padding)):
            found[self.first + at] = [along, *found[self.first + at][1:]]
        return tuple(found)


def _for_each_axis(option: Sequence[int], axes: int) -> list[int]:
    """Return an option with a number for each spatial axis, if it has one for all."""
    return [*option] * (axes if len(option) == 1 else 1)


def convolution(site: Site, call: Call) -> Cut | None:
    """Cut a convolution; the rows that a strip reads include its halo."""
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
        return StripCall({x: reads}, y.interval, _with_args(call, args))

    return Cut({x: _HEIGHT}, (_HEIGHT,), stripped=strip)


def convolution_backward(site: Site, call: Call) -> Cut | None:
    """Cut the gradient of images, or the gradients of filters and bias."""
    if (found := ShapedGradient.of(call)) is not None:
        return _image_gradient(site, found, call)
    return _filter_gradient(site, call) if 0 not in call.results else None


def _image_gradient(site: Site, of: ShapedGradient, call: Call) -> Cut | None:
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
        sizes = _with_height(of.sizes, x.count)
        mine = replace(of, sizes=sizes, args=options.args(padding))
        return StripCall({gradient: reads}, x.interval, mine.call(call))

    return Cut({gradient: _HEIGHT}, (_HEIGHT,), stripped=strip)


def _filter_gradient(site: Site, call: Call) -> Cut | None:
    """Cut the rows of the output's gradient once; a strip also reads their windows."""
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
        return StripCall(reads, None, _with_args(call, options.args(0)))

    nowhere = (None,) * len(site.outputs)
    return Cut({gradient: _HEIGHT, x: _HEIGHT}, nowhere, stripped=strip)


def _images(site: Site, position: int) -> bool:
    """Return whether an argument has images, cut along their height."""
    return site.axis(position) == _HEIGHT and len(site.shape(position)) > HEIGHT


def _with_args(call: Call, args: tuple[Any, ...]) -> Call:
    return replace(call, args=args, into=None)


def _with_height(sizes: Sequence[int], rows: int) -> tuple[int, ...]:
    return (*sizes[:HEIGHT], rows, *sizes[HEIGHT + 1 :])


# Pools and their gradients.
#
# The index of a maximum counts the elements of the whole image. Within a strip it
# counts from the strip's first row, which is where its first window begins.


@dataclass(frozen=True, slots=True)
class _Pool:
    """Options of a pool.

    Attributes:
        window: The window along the height.
        args: Arguments of a strip, which has no padding along the height.
        ceil: PyTorch's `ceil_mode`: windows may end outside of the image.
        behind: Arguments behind the options.
    """

    window: Window
    args: tuple[Any, ...]
    ceil: bool
    behind: tuple[Any, ...]

    @classmethod
    def of(cls, args: Sequence[Any], dims: int, *, dilated: bool) -> "_Pool":
        """Return the options among arguments that begin with the kernel."""
        kernel, *rest = args
        stride = rest[0] if rest and rest[0] else kernel
        padding = rest[1] if len(rest) > 1 else [0]
        dilation = rest[2] if dilated and len(rest) > 2 else [1]
        ceil, *behind = [*rest[2 + dilated :]] or [False]
        kernel, stride, padding, dilation = (
            _for_each_axis(option, dims)
            for option in (kernel, stride, padding, dilation)
        )
        window = Window(kernel[0], stride[0], padding[0], dilation[0])
        options = kernel, stride, [0, *padding[1:]], *([dilation] * dilated), ceil
        return cls(window, options, ceil, tuple(behind))

    @property
    def counts_windows(self) -> bool:
        """True if PyTorch computes the expected number of windows in a strip.

        With `ceil_mode` it finds one more if rows are left over behind the last window.
        """
        return not self.ceil or self.window.span >= self.window.stride

    def averages_alike(self, size: int, windows: int) -> bool:
        """Return whether every window averages over the same number of rows.

        This is so if padding counts, and no window reaches beyond it.
        """
        counted = self.behind[0] if self.behind else True
        last = (windows - 1) * self.window.stride + self.window.span
        inside = last <= size + 2 * self.window.padding
        return inside and (counted or not self.window.padding)

    def gathered(self, x: Rows, windows: int) -> tuple[tuple[int, int], int, int]:
        """Return the windows that contain some rows, and first and last row of them."""
        first, past = self.window.holding(x, windows)
        start, stop = self.window.under(Rows(first, past, windows))
        return (first, past), start, max(stop, x.stop)


def max_pool(site: Site, call: Call) -> Cut | None:
    """Cut a maximum pool, with the indices of the maxima."""
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
        args = (call.function, around, first * row, *call.args[:1], *pool.args)
        mine = replace(call, function=_max_pool_strip, args=args)
        return StripCall({x: reads}, y.interval, mine)

    return Cut({x: _HEIGHT}, (_HEIGHT,) * len(site.outputs), stripped=strip)


def max_pool_backward(site: Site, call: Call) -> Cut | None:
    """Cut the gradient of a maximum pool."""
    of = ShapedGradient.of(call)
    if of is None:
        return None
    gradient, places = of.args[0].index, of.args[-1].index
    pool = _Pool.of(of.args[1:-1], len(of.sizes) - HEIGHT, dilated=True)
    cut = site.axes[gradient] == _HEIGHT and site.axes[places] == _HEIGHT
    if not cut or not pool.counts_windows:
        return None
    windows = site.inputs[gradient].shape[HEIGHT]
    row = math.prod(of.sizes[HEIGHT + 1 :])

    def strip(rows: Rows) -> StripCall:
        reads, start, stop = pool.gathered(rows.of(of.sizes[HEIGHT]), windows)
        sizes = _with_height(of.sizes, stop - start)
        args = (of.args[0], of.function, start * row, *pool.args, of.args[-1])
        mine = ShapedGradient(_max_pool_gradient, sizes, args).call(call)
        return StripCall({gradient: reads, places: reads}, (start, stop), mine)

    return Cut({gradient: _HEIGHT, places: _HEIGHT}, (_HEIGHT,), stripped=strip)


def avg_pool(site: Site, call: Call) -> Cut | None:
    """Cut an average pool, if every window divides by the same count."""
    x, dims = site.operand(0), len(site.shape(0)) - HEIGHT
    if x is None or site.axis(0) != _HEIGHT or dims < 1:
        return None
    pool = _Pool.of(site.args[1:], dims, dilated=False)
    total = site.outputs[0].shape[HEIGHT]
    if not pool.averages_alike(site.shape(0)[HEIGHT], total):
        return None

    def strip(rows: Rows) -> StripCall:
        y = rows.of(total)
        mine = _with_args(call, (*call.args[:1], *pool.args, *pool.behind))
        return StripCall({x: pool.window.under(y)}, y.interval, mine)

    return Cut({x: _HEIGHT}, (_HEIGHT,), stripped=strip)


def avg_pool_backward(site: Site, call: Call) -> Cut | None:
    """Cut the gradient of an average pool."""
    of = ShapedGradient.of(call)
    if of is None:
        return None
    gradient = of.args[0].index
    pool = _Pool.of(of.args[1:], len(of.sizes) - HEIGHT, dilated=False)
    windows = site.inputs[gradient].shape[HEIGHT]
    alike = pool.counts_windows and pool.averages_alike(of.sizes[HEIGHT], windows)
    if site.axes[gradient] != _HEIGHT or not alike:
        return None

    def strip(rows: Rows) -> StripCall:
        reads, start, stop = pool.gathered(rows.of(of.sizes[HEIGHT]), windows)
        args = (of.args[0], *pool.args, *pool.behind)
        mine = replace(of, sizes=_with_height(of.sizes, stop - start), args=args)
        return StripCall({gradient: reads}, (start, stop), mine.call(call))

    return Cut({gradient: _HEIGHT}, (_HEIGHT,), stripped=strip)


def _max_pool_strip(
    function: Any, around: tuple[int, int], before: int, image: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a strip's maxima, and their indices in the whole image.

    `around` are the rows of windows above and below the image, and `before` the
    elements of the image before the strip's first window.
    """
    if any(around):
        columns = [0, 0] * (image.dim() - HEIGHT - 1)
        image = torch.constant_pad_nd(image, [*columns, *around], -math.inf)
    largest, places = function(image, *args)
    return largest, places.add_(before)


def _max_pool_gradient(
    gradient: torch.Tensor, image: torch.Tensor, function: Any, before: int, *args: Any
) -> torch.Tensor:
    """Return the gradient of a strip, given indices of maxima in the whole image."""
    *options, places = args
    last = math.prod(image.shape[HEIGHT:]) - 1
    local = places.sub(before).clamp_(0, last)
    found: torch.Tensor = function(gradient, image, *options, local)
    return found


# Resized and padded images.
#
# Images are enlarged by an integer factor. Where neighbours are interpolated, one more
# row on each side is read, and the rows that a strip computes at its own border are
# dropped.


_MAX_INEXACT_SCALE = 12
"""Up to this scale the reciprocal is rounded such that no row maps below its own."""


def _resized(around: int, site: Site, call: Call) -> Cut | None:
    """Cut an enlargement of images that reads `around` more rows on each side."""
    x = site.operand(0)
    if x is None or site.axis(0) != _HEIGHT or (around and call.args[2:3] == (True,)):
        return None  # with aligned corners each row has other weights
    size, total = site.shape(0)[HEIGHT], site.outputs[0].shape[HEIGHT]
    columns = site.outputs[0].shape[HEIGHT + 1 :]
    scale = _scale(around, size, total, call)
    if scale is None:
        return None

    def strip(rows: Rows) -> StripCall:
        y = rows.of(total)
        start = max(0, y.start // scale - around)
        stop = min(size, -(-y.stop // scale) + around)
        image, sizes, *rest = call.args
        if sizes is not None:
            sizes = [(stop - start) * scale, *columns]
        made = start * scale, stop * scale
        mine = _with_args(call, (image, sizes, *rest))
        return StripCall({x: (start, stop)}, made, mine)

    return Cut({x: _HEIGHT}, (_HEIGHT,), stripped=strip)


def _resized_backward(around: int, site: Site, call: Call) -> Cut | None:
    gradient = site.operand(0)
    if gradient is None or site.axis(0) != _HEIGHT:
        return None
    if around and call.args[3:4] == (True,):
        return None
    out, before, *rest = call.args[1:]
    scale = _scale(around, before[HEIGHT], out[0], call)
    if scale is None:
        return None

    def strip(rows: Rows) -> StripCall:
        x = rows.of(before[HEIGHT])
        start, stop = max(0, x.start - around), min(x.total, x.stop + around)
        reads = start * scale, stop * scale
        sizes = [*_with_height(before, stop - start)]
        args = (call.args[0], [reads[1] - reads[0], *out[1:]], sizes, *rest)
        return StripCall({gradient: reads}, (start, stop), _with_args(call, args))

    return Cut({gradient: _HEIGHT}, (_HEIGHT,), stripped=strip)


def _scale(around: int, size: int, total: int, call: Call) -> int | None:
    """Return the integer scale of an enlargement; None if strips would round otherwise.

    Weights of neighbours are exact for powers of two. If PyTorch is given the scale
    beside the sizes, it computes with that one, so the two have to be equal.
    """
    scale, rest = divmod(total, size)
    given = [a for a in call.args if isinstance(a, float)]
    lists = [a for a in call.args if isinstance(a, list | tuple) and a]
    given += [a[0] for a in lists if isinstance(a[0], float)]
    if rest or not scale or any(number != scale for number in given[:1]):
        return None
    exact = not scale & (scale - 1) or (not around and scale <= _MAX_INEXACT_SCALE)
    return scale if exact else None


def pad(site: Site, call: Call) -> Cut | None:
    """Cut a padding, by zeros along the split axis, or a cropping.

    A strip reads at least one row of the image.
    """
    axis, widths = site.axis(0), list(site.arg(1))
    rank = len(site.shape(0))
    if axis is None or axis.each != 1:
        return None
    place = 2 * (rank - 1 - axis.index)
    before, after = (*widths[place : place + 2], 0, 0)[:2]
    if (before or after) and site.arg(2, 0):
        return None
    if place < len(widths):
        widths[place : place + 2] = [0, 0]
    padded = _with_args(call, (call.args[0], widths, *call.args[2:]))
    return _shifted(site, axis, before, padded)


def slice_backward(site: Site, call: Call) -> Cut | None:
    """Cut the gradient of a slice of images, which is padded by zeros."""
    axis = site.axis(0)
    sizes, dim, start, _, step = call.args[1:]
    if axis is None or axis.each != 1 or dim % len(sizes) != axis.index or step != 1:
        return None
    copied = replace(
        call, function=torch.ops.aten.clone.default, args=call.args[:1], into=None
    )
    size = sizes[axis.index]
    before = max(0, start + size) if start < 0 else min(start, size)
    return _shifted(site, axis, before, copied)


def _shifted(site: Site, axis: Axis, before: int, call: Call) -> Cut | None:
    """Cut a call that copies rows behind `before` rows of zeros."""
    x = site.operand(0)
    if x is None:
        return None
    size, total = site.shape(0)[axis.index], site.outputs[0].shape[axis.index]

    def strip(rows: Rows) -> StripCall:
        y = rows.of(total)
        start, stop = min(y.start - before, size - 1), max(y.stop - before, 1)
        made: Interval = start + before, stop + before
        return StripCall({x: (start, stop)}, made, call)

    return Cut({x: axis}, (axis,), stripped=strip)


def strip_of(site: Site, call: Call) -> Cut | None:
    """Return how a call is cut into strips; None if it stays whole."""
    if (own := NORMS.get(site.op) or RECURRENT.get(site.op)) is not None:
        return own(site)
    if (cut := cut_of(site, call)) is not None:  # row by row
        return cut
    rule = IMAGE_RULES.get(site.op)
    return None if rule is None else rule(site, call)


def strip_carried(site: Site, call: Call) -> tuple[Axis | None, ...]:
    """Return the split axes of the results of a call that stays whole.

    The results of images are treated as images. A wrong guess changes no result, as the
    rules hold along any axis.
    """
    if site.op == "aten.slice.Tensor":  # a view, of which strips read row ranges
        return (site.axis(0),)
    imaged = any(axis == _HEIGHT for axis in site.axes)
    rank = max((len(layout.shape) for layout in site.inputs), default=0)
    return tuple(
        _HEIGHT if imaged and len(layout.shape) == rank > HEIGHT else axis
        for layout, axis in zip(site.outputs, carried(site, call), strict=True)
    )


IMAGE_RULES: Mapping[str, Callable[[Site, Call], Cut | None]] = MappingProxyType(
    {
        "aten.avg_pool2d.default": avg_pool,
        "aten.avg_pool2d_backward.default": avg_pool_backward,
        "aten.avg_pool3d.default": avg_pool,
        "aten.avg_pool3d_backward.default": avg_pool_backward,
        "aten.constant_pad_nd.default": pad,
        "aten.convolution.default": convolution,
        "aten.convolution_backward.default": convolution_backward,
        "aten.max_pool2d_with_indices.default": max_pool,
        "aten.max_pool2d_with_indices_backward.default": max_pool_backward,
        "aten.max_pool3d_with_indices.default": max_pool,
        "aten.max_pool3d_with_indices_backward.default": max_pool_backward,
        "aten.slice_backward.default": slice_backward,
    }
    | {
        f"aten.upsample_{kind}{form}": partial(rule, around)
        for kind, around in (("nearest2d", 0), ("nearest3d", 0), ("bilinear2d", 1))
        for form, rule in (
            (".default", _resized),
            (".vec", _resized),
            ("_backward.default", _resized_backward),
        )
    }
)
"""Operation -> its rule."""
