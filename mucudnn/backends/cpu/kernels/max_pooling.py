"""Max pooling, with the position of each maximum in its window, and its gradient.

The maximum is taken along one axis after the other. Its position is the number of
elements before the first equal one: comparisons and additions of single bytes.
"""

import itertools
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.behind import Behind
from mucudnn.backends.cpu.kernels.elementwise import keep
from mucudnn.backends.cpu.kernels.tiles import Attrs, Inputs, Outputs, Run, share
from mucudnn.backends.cpu.kernels.windows import Windows, spatial_axes
from mucudnn.backends.cpu.threads import Workers

__all__ = ["OPERATIONS", "max_pool", "max_pool_grad"]


def max_pool(workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs) -> None:
    """(y, index): the maximum, and which of the window's elements it is.

    Of equal maxima the first counts; if one is NaN, so is the maximum.
    """
    axes = spatial_axes(inputs[0].shape, outputs[0].shape, attrs)
    x = inputs[0].reshape([axis.size for axis in axes])
    y, index = (out.reshape([axis.out for axis in axes]) for out in outputs)

    def tile(windows: Windows) -> None:
        images = {p: windows.gather(x, p, -np.inf) for p in windows.phases()}
        best = windows.reduce(images, np.maximum)
        place = windows.outputs()
        y[place] = windows.inner(best)
        index[place] = windows.inner(_first_equal(windows, images, best))

    share(workers, Windows.cover(axes, y.shape, x.itemsize), tile)


def _first_equal(
    windows: Windows, images: dict[tuple[int, ...], Any], best: Any
) -> Any:
    """How many elements of each window come before its maximum."""
    *taps, _ = windows.taps()  # if it is none of the others, it is the last
    before = np.zeros(windows.size, np.uint8)
    searching = np.ones(windows.size, bool)
    differs = np.empty(windows.size, bool)
    for tap in taps:
        phase, offset = windows.locate(tap)
        image = images[phase][offset : offset + windows.size]
        np.not_equal(image, best, out=differs)
        np.logical_and(searching, differs, out=searching)
        np.add(before, searching.view(np.uint8), out=before)
    return before


def max_pool_grad(
    workers: Workers, inputs: Inputs, outputs: Outputs, attrs: Attrs
) -> None:
    """Dx: each dy at its maximum's place; gathered, so that tiles do not meet."""
    axes = spatial_axes(outputs[0].shape, inputs[0].shape, attrs)
    dy, index = (v.reshape([axis.out for axis in axes]) for v in inputs)
    dx = outputs[0].reshape([axis.size for axis in axes])

    def tile(windows: Windows) -> None:
        gradient, chosen = Behind(windows, dy), Behind(windows, index)
        for phase in itertools.product(*(range(axis.stride) for axis in axes)):
            total: Any = None
            for number, tap in enumerate(windows.taps()):
                where, offset = windows.locate(tap)
                if where != phase:
                    continue
                mask = np.equal(chosen.displaced(offset), number)
                values = gradient.displaced(offset)
                part = np.empty_like(values)
                keep(mask, values, part)
                total = part if total is None else np.add(total, part, out=total)
            windows.scatter(phase, total, dx)

    share(workers, Windows.of_inputs(axes, dx.itemsize), tile)


OPERATIONS: dict[str, Run] = {"max_pool": max_pool, "max_pool_grad": max_pool_grad}
