"""PyTorch's resized and padded images by strips.

Images grow by a whole number of times; where neighbours are mixed, one row more on each
side is read, and what a strip makes of its own border is not kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mucudnn.ir.strips import HEIGHT
from mucudnn.ir.traits import Interval, Rows
from mucudnn.torch.lowering.lowered import Call
from mucudnn.torch.splitting.axes import Axis, Cut, Site, StripCall

__all__ = [
    "bilinear",
    "bilinear_backward",
    "nearest",
    "nearest_backward",
    "pad",
    "slice_backward",
]

_HEIGHT = Axis(HEIGHT)

_TIMES = 12
"""Up to which a scale's reciprocal is rounded up: no row falls below its own."""


def _resized(around: int, site: Site, call: Call) -> Cut | None:
    """Images that grow; `around` is how many rows are read on each side."""
    x = site.operand(0)
    if x is None or site.axis(0) != _HEIGHT or _corners(around, call.args[2:3]):
        return None
    size, total = site.shape(0)[HEIGHT], site.outputs[0].shape[HEIGHT]
    columns = site.outputs[0].shape[HEIGHT + 1 :]
    scale = _scale(around, size, total, call)
    if scale is None:
        return None

    def strip(rows: Rows) -> StripCall:
        y = rows.of(total)
        start = max(0, y.start // scale - around)
        stop = min(size, -(-y.stop // scale) + around)
        sizes = [(stop - start) * scale, *columns]
        args = _sized(call, sizes)
        made = start * scale, stop * scale
        mine = replace(call, args=args, into=None)
        return StripCall({x: (start, stop)}, made, mine)

    return Cut({x: _HEIGHT}, (_HEIGHT,), stripped=strip)


def _resized_backward(around: int, site: Site, call: Call) -> Cut | None:
    gradient = site.operand(0)
    if gradient is None or site.axis(0) != _HEIGHT:
        return None
    if _corners(around, call.args[3:4]):
        return None
    out, before, *rest = call.args[1:]
    scale = _scale(around, before[HEIGHT], out[0], call)
    if scale is None:
        return None

    def strip(rows: Rows) -> StripCall:
        x = rows.of(before[HEIGHT])
        start, stop = max(0, x.start - around), min(x.total, x.stop + around)
        reads = start * scale, stop * scale
        mine = [*before[:HEIGHT], stop - start, *before[HEIGHT + 1 :]]
        args = (call.args[0], [reads[1] - reads[0], *out[1:]], mine, *rest)
        found = replace(call, args=args, into=None)
        return StripCall({gradient: reads}, (start, stop), found)

    return Cut({gradient: _HEIGHT}, (_HEIGHT,), stripped=strip)


nearest = partial(_resized, 0)
nearest_backward = partial(_resized_backward, 0)
bilinear = partial(_resized, 1)
bilinear_backward = partial(_resized_backward, 1)


def _corners(around: int, aligned: Sequence[Any]) -> bool:
    """Whether corners lie over corners: then each row is mixed by another share."""
    return bool(around) and aligned == (True,)


def _scale(around: int, size: int, total: int, call: Call) -> int | None:
    """How many times as large images become; None if strips would be rounded otherwise.

    Shares of neighbours are exact for powers of two. PyTorch may be told the number
    beside the sizes, and then goes by that.
    """
    scale, rest = divmod(total, size)
    said = [a for a in call.args if isinstance(a, float)]
    lists = [a for a in call.args if isinstance(a, list | tuple) and a]
    said += [a[0] for a in lists if isinstance(a[0], float)]
    if rest or not scale or any(number != scale for number in said[:1]):
        return None
    exact = not scale & (scale - 1)
    return scale if exact or (not around and scale <= _TIMES) else None


def _sized(call: Call, sizes: list[int]) -> tuple[Any, ...]:
    """Arguments with the sizes of a strip, if they have any."""
    image, asked, *rest = call.args
    return image, asked if asked is None else sizes, *rest


def pad(site: Site, call: Call) -> Cut | None:
    """Zeros around images, or less of them; of other axes than the height any number.

    A strip reads one row of the image at least.
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
    args = (call.args[0], widths, *call.args[2:])
    return _shifted(site, axis, before, replace(call, args=args, into=None))


def slice_backward(site: Site, call: Call) -> Cut | None:
    """Zeros around what was cut out of images, row by row."""
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
    """Rows of images as they are, with so many of zeros above them."""
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
