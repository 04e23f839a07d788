"""Max pooling, with the position of each maximum in its window, and its gradient.

The maximum is taken along one axis after the other. Its position is the number of
elements before the first equal one: comparisons and additions of single bytes. The
gradient is one indexed addition per output. Workers take separate planes, so that no
two add to the same position.
"""

import functools
import math
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import KernelCall, Run, tiles
from mucudnn.backends.cpu.kernels.windows import Axis, Windows, spatial_axes
from mucudnn.backends.cpu.scratch import Scratch

__all__ = ["OPERATIONS"]

_INDEXED = 32768  # outputs whose positions are computed at a time, 16 bytes each

Images = dict[tuple[int, ...], Any]


def max_pool(call: KernelCall) -> None:
    """Compute (y, index): the maximum, and its element number in the window.

    The first of equal maxima counts; if an element is NaN, so is the maximum.
    """
    axes = spatial_axes(call.inputs[0].shape, call.outputs[0].shape, call.attrs)
    x = call.inputs[0].reshape([axis.size for axis in axes])
    y, index = (out.reshape([axis.out for axis in axes]) for out in call.outputs)

    def tile(windows: Windows) -> None:
        scratch = call.scratch
        scratch.restart()
        images = {p: windows.gather(x, p, -np.inf, scratch) for p in windows.phases()}
        best = windows.reduce(images, np.maximum, scratch)
        number = _first_equal(windows, images, best, scratch)
        place = windows.outputs()
        y[place] = windows.inner(best)
        if not np.isfinite(y[place]).all():
            _search_inside(windows, images, best, number, scratch)
        index[place] = windows.inner(number)

    call.share(Windows.cover(axes, y.shape, x.itemsize), tile)


def _first_equal(windows: Windows, images: Images, best: Any, scratch: Scratch) -> Any:
    """Count the elements of each window before its maximum."""
    *taps, _ = windows.taps()  # if no other element is equal, the last one is
    before, searching = (scratch.take(windows.size, np.uint8) for _ in range(2))
    before[...], searching[...] = 0, 1
    differs = scratch.take(windows.size, bool)
    for tap in taps:
        np.not_equal(windows.element(images, tap), best, out=differs)
        np.bitwise_and(searching, differs.view(np.uint8), out=searching)
        np.add(before, searching, out=before)
    return before


def _search_inside(
    windows: Windows, images: Images, best: Any, number: Any, scratch: Scratch
) -> None:
    """Correct `number` where a maximum is NaN, or minus infinity like the padding."""
    anything = np.broadcast_to(np.True_, [axis.size for axis in windows.axes])
    inside = {p: windows.gather(anything, p, False, scratch) for p in windows.phases()}
    for i, tap in reversed(list(enumerate(windows.taps()))):
        x = windows.element(images, tap)
        found = (x == best) | np.isnan(x)
        number[found & windows.element(inside, tap) & ~np.isfinite(best)] = i


def max_pool_grad(call: KernelCall) -> None:
    """Add each dy to dx at its maximum's position, in the order of the windows."""
    axes = spatial_axes(call.outputs[0].shape, call.inputs[0].shape, call.attrs)
    planes, *spatial = axes
    pixels = math.prod(axis.size for axis in spatial)
    dy, index = (v.reshape([axis.out for axis in axes]) for v in call.inputs)
    dx = call.outputs[0].reshape(planes.size, pixels)
    steps = _steps(spatial)
    parts = tiles(dy.shape[1:], _INDEXED)
    together = max(1, _INDEXED // math.prod(dy.shape[1:]))
    alike = len(parts) == 1  # then corners are equal for all blocks of planes
    corners = _corners(spatial, parts[0], together, pixels) if alike else None

    def block(part: tuple[slice, ...]) -> None:
        (some,) = part
        target = dx[some].reshape(-1)
        target[...] = 0
        for inner in parts:
            part_of_dy, count = dy[(some, *inner)], len(dx[some])
            call.scratch.restart()
            number, where = (
                call.scratch.take(part_of_dy.size, np.intp).reshape(part_of_dy.shape)
                for _ in range(2)
            )
            np.copyto(number, index[(some, *inner)])
            np.take(steps, number, out=where, mode="clip")
            where += (
                _corners(spatial, inner, count, pixels)
                if corners is None
                else corners[:count]
            )
            np.add.at(target, where.reshape(-1), part_of_dy.reshape(-1))

    call.share(tiles((planes.size,), together), block)


def _pitches(axes: list[Axis]) -> list[int]:
    sizes = [axis.size for axis in axes]
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _steps(axes: list[Axis]) -> Any:
    """Return the flat distance of each element of a window from its first."""
    along = (
        np.arange(axis.kernel) * pitch
        for axis, pitch in zip(axes, _pitches(axes), strict=True)
    )
    return functools.reduce(np.add.outer, along).reshape(-1)


def _corners(
    axes: list[Axis], part: tuple[slice, ...], planes: int, pixels: int
) -> Any:
    """Return the flat positions of windows' first elements, maybe in the padding."""
    along = [np.arange(planes) * pixels]
    for axis, pitch, s in zip(axes, _pitches(axes), part, strict=True):
        first = np.arange(s.start, s.stop) * axis.stride - axis.padding
        along.append(first * pitch)
    return functools.reduce(np.add.outer, along)


OPERATIONS: dict[str, Run] = {"max_pool": max_pool, "max_pool_grad": max_pool_grad}
