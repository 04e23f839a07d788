"""Average pooling and its gradient; over whole images a product with a vector of ones.

The divisor of a window's sum is counted along each axis separately: elements inside the
image, or inside it and its padding, but never positions that exist only because the
number of windows was rounded up.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import BLOCK_BYTES, KernelCall, Run, tiles
from mucudnn.backends.cpu.kernels.windows import Axis, Windows, spatial_axes

__all__ = ["OPERATIONS"]


def avg_pool(call: KernelCall) -> None:
    """Compute the mean of each window."""
    axes = spatial_axes(call.inputs[0].shape, call.outputs[0].shape, call.attrs)
    if _is_global(axes):
        _global_mean(call, call.inputs[0], call.outputs[0])
        return
    x = call.inputs[0].reshape([axis.size for axis in axes])
    y = call.outputs[0].reshape([axis.out for axis in axes])
    counts = [_count(axis, call.attrs["count_include_pad"]) for axis in axes]

    def tile(windows: Windows) -> None:
        call.scratch.restart()
        images = {p: windows.gather(x, p, 0.0, call.scratch) for p in windows.phases()}
        place = windows.outputs()
        total = windows.inner(windows.reduce(images, np.add, call.scratch))
        np.divide(total, _divisors(counts, place, y.dtype), out=y[place])

    call.share(Windows.cover(axes, y.shape, x.itemsize), tile)


def avg_pool_grad(call: KernelCall) -> None:
    """Compute dx by distributing each dy over the elements of its window."""
    axes = spatial_axes(call.outputs[0].shape, call.inputs[0].shape, call.attrs)
    if _is_global(axes):
        _global_mean_grad(call, call.inputs[0], call.outputs[0])
        return
    dy = call.inputs[0].reshape([axis.out for axis in axes])
    dx = call.outputs[0].reshape([axis.size for axis in axes])
    counts = [_count(axis, call.attrs["count_include_pad"]) for axis in axes]

    def tile(windows: Windows) -> None:
        gradient = _CoveringWindows(windows, dy)
        share_of = gradient.image[gradient.inside]
        share_of /= _divisors(counts, gradient.source, dy.dtype)
        for phase in itertools.product(*(range(axis.stride) for axis in axes)):
            total: Any = None
            for tap in windows.taps():
                where, offset = windows.locate(tap)
                if where == phase:
                    part = gradient.displaced(offset)
                    total = part.copy() if total is None else np.add(total, part, total)
            windows.scatter(phase, total, dx)

    call.share(Windows.of_inputs(axes, dx.itemsize), tile)


def _is_global(axes: list[Axis]) -> bool:
    return all(
        axis.out == 1 and axis.padding == 0 and axis.kernel == axis.size
        for axis in axes[1:]
    )


def _global_mean(call: KernelCall, x: Any, y: Any) -> None:
    pixels = math.prod(x.shape[2:])
    planes, means = x.reshape(-1, pixels), y.reshape(-1)
    share_of = np.full(pixels, 1 / pixels, x.dtype)

    def tile(part: tuple[slice, ...]) -> None:
        np.matmul(planes[part], share_of, out=means[part])

    call.share(tiles(means.shape, max(1, 2 * BLOCK_BYTES // x[0, 0].nbytes)), tile)


def _global_mean_grad(call: KernelCall, dy: Any, dx: Any) -> None:
    pixels = math.prod(dx.shape[2:])
    planes, column = dx.reshape(-1, pixels), dy.reshape(-1, 1)

    def tile(part: tuple[slice, ...]) -> None:
        np.multiply(column[part], 1 / pixels, out=planes[part])

    rows = max(1, 2 * BLOCK_BYTES // dx[0, 0].nbytes)
    call.share(tiles((len(planes),), rows), tile)


class _CoveringWindows:
    """Results of all windows that cover a tile, including those that start before it.

    They are zero where no window exists, so gradients need no special case at borders.

    Attributes:
        image: A copy of the results, one element per window, of `windows.lengths`.
        inside: The part of `image` that has windows.
        source: The part of `results` that was copied.
    """

    def __init__(self, windows: Windows, results: Any) -> None:
        self._size, self._spare = windows.size, windows.spare
        self._flat = np.zeros(self._size + self._spare, results.dtype)
        self.image = self._flat[: self._size].reshape(windows.lengths)
        inside, source = [], []
        for axis, start, length in zip(
            windows.axes, windows.starts, windows.lengths, strict=True
        ):
            first = start - axis.reach
            low = min(length, max(0, -first))
            high = max(low, min(length, axis.out - first))
            inside.append(slice(low, high))
            source.append(slice(first + low, first + high))
        self.inside, self.source = tuple(inside), tuple(source)
        self.image[self.inside] = results[self.source]

    def displaced(self, offset: int) -> Any:
        """Return, per position, the window whose element at this offset is there."""
        start = self._spare - offset
        return self._flat[start : start + self._size]


def _divisors(counts: Sequence[Any], place: tuple[slice, ...], dtype: Any) -> Any:
    """Return divisors from the counts along each axis; one number if they are equal."""
    along = [of[part] for of, part in zip(counts, place, strict=True)]
    if all((of == of[:1]).all() for of in along):
        return dtype.type(math.prod(int(of[:1].sum()) for of in along))
    return functools.reduce(np.multiply.outer, along).astype(dtype)


def _count(axis: Axis, padded: bool) -> Any:
    margin = axis.padding if padded else 0
    first = np.arange(axis.out) * axis.stride - axis.padding
    last = np.minimum(first + axis.kernel, axis.size + margin)
    return last - np.maximum(first, -margin)


OPERATIONS: dict[str, Run] = {"avg_pool": avg_pool, "avg_pool_grad": avg_pool_grad}
