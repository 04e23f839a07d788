"""Max pooling, with the position of each maximum in its window, and its gradient.

The maximum is taken along one axis after the other. Its position is the number of
elements before the first equal one: comparisons and additions of single bytes. The
gradient is one indexed addition an output; planes are divided among workers, so that
no two add to the same place.
"""

import functools
import math
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import KernelCall, Run, tiles
from mucudnn.backends.cpu.kernels.windows import Axis, Windows, spatial_axes

__all__ = ["OPERATIONS"]

_INDEXED = 32768  # outputs whose targets are computed at a time, 8 bytes each

Images = dict[tuple[int, ...], Any]


def max_pool(call: KernelCall) -> None:
    """(y, index): the maximum, and which of the window's elements it is.

    Of equal maxima the first counts; if one is NaN, so is the maximum.
    """
    axes = spatial_axes(call.inputs[0].shape, call.outputs[0].shape, call.attrs)
    x = call.inputs[0].reshape([axis.size for axis in axes])
    y, index = (out.reshape([axis.out for axis in axes]) for out in call.outputs)

    def tile(windows: Windows) -> None:
        images = {p: windows.gather(x, p, -np.inf) for p in windows.phases()}
        best = windows.reduce(images, np.maximum)
        number = _first_equal(windows, images, best)
        place = windows.outputs()
        y[place] = windows.inner(best)
        if not np.isfinite(y[place]).all():
            _search_inside(windows, images, best, number)
        index[place] = windows.inner(number)

    call.share(Windows.cover(axes, y.shape, x.itemsize), tile)


def _first_equal(windows: Windows, images: Images, best: Any) -> Any:
    """How many elements of each window come before its maximum."""
    *taps, _ = windows.taps()  # if it is none of the others, it is the last
    before = np.zeros(windows.size, np.uint8)
    searching = np.ones(windows.size, bool)
    differs = np.empty(windows.size, bool)
    for tap in taps:
        np.not_equal(windows.element(images, tap), best, out=differs)
        np.logical_and(searching, differs, out=searching)
        np.add(before, searching.view(np.uint8), out=before)
    return before


def _search_inside(windows: Windows, images: Images, best: Any, number: Any) -> None:
    """Correct `number` where a maximum is NaN, or minus infinity like the padding."""
    anything = np.broadcast_to(np.True_, [axis.size for axis in windows.axes])
    inside = {p: windows.gather(anything, p, False) for p in windows.phases()}
    for i, tap in reversed(list(enumerate(windows.taps()))):
        x = windows.element(images, tap)
        found = (x == best) | np.isnan(x)
        number[found & windows.element(inside, tap) & ~np.isfinite(best)] = i


def max_pool_grad(call: KernelCall) -> None:
    """Dx: each dy added at its maximum's place, in the order of the windows."""
    axes = spatial_axes(call.outputs[0].shape, call.inputs[0].shape, call.attrs)
    planes, *spatial = axes
    pixels = math.prod(axis.size for axis in spatial)
    dy, index = (v.reshape([axis.out for axis in axes]) for v in call.inputs)
    dx = call.outputs[0].reshape(planes.size, pixels)
    steps = _steps(spatial)
    parts = tiles(dy.shape[1:], _INDEXED)
    together = max(1, _INDEXED // math.prod(dy.shape[1:]))

    def block(part: tuple[slice, ...]) -> None:
        (some,) = part
        target = dx[some].reshape(-1)
        target[...] = 0
        for inner in parts:
            corners = _corners(spatial, inner, len(dx[some]), pixels)
            where = np.take(steps, index[(some, *inner)], mode="clip")
            where += corners
            np.add.at(target, where.reshape(-1), dy[(some, *inner)].reshape(-1))

    call.share(tiles((planes.size,), together), block)


def _pitches(axes: list[Axis]) -> list[int]:
    sizes = [axis.size for axis in axes]
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _steps(axes: list[Axis]) -> Any:
    """Flat distance of each element of a window from its first."""
    along = (
        np.arange(axis.kernel) * pitch
        for axis, pitch in zip(axes, _pitches(axes), strict=True)
    )
    return functools.reduce(np.add.outer, along).reshape(-1)


def _corners(
    axes: list[Axis], part: tuple[slice, ...], planes: int, pixels: int
) -> Any:
    """Flat places of windows' first elements, in the padding perhaps."""
    along = [np.arange(planes) * pixels]
    for axis, pitch, s in zip(axes, _pitches(axes), part, strict=True):
        first = np.arange(s.start, s.stop) * axis.stride - axis.padding
        along.append(first * pitch)
    return functools.reduce(np.add.outer, along)


OPERATIONS: dict[str, Run] = {"max_pool": max_pool, "max_pool_grad": max_pool_grad}
