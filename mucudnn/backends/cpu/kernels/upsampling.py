"""Enlarging images by whole factors: nearest and (bi-, tri-)linear, with gradients.

Axis after axis. Linear: pixel i s + k of the result lies f = (k + 1/2) / s - 1/2 from
pixel i of the image, so it is (1 - |f|) of it and |f| of its neighbour on that side.
Beyond the border the image is its own reflection, and so is the gradient.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import BLOCK_BYTES, KernelCall, Run, tiles

__all__ = ["OPERATIONS"]


def upsample_nearest(call: KernelCall) -> None:
    """Each pixel repeated along every axis."""
    scale = call.attrs["scale"]
    x = _planes(call.inputs[0])
    y = _split(_planes(call.outputs[0]), scale)
    rank = len(scale)

    def tile(part: tuple[slice, ...]) -> None:
        out, source = y[_pixels(part)], x[part]
        for k in range(scale[-1]):
            out[_phase([0] * (rank - 1), k)] = source
        for axis in reversed(range(rank - 1)):
            for k in range(1, scale[axis]):
                out[_phase([0] * axis, k)] = out[_phase([0] * axis, 0)]

    call.share(_tiles(x, scale), tile)


def upsample_nearest_grad(call: KernelCall) -> None:
    """Dx: the sum over each pixel's repetitions."""
    dx = _planes(call.outputs[0])
    scale = call.attrs["scale"]
    dy = _split(_planes(call.inputs[0]), scale)

    def tile(part: tuple[slice, ...]) -> None:
        out, source = dx[part], dy[_pixels(part)]
        for number, phase in enumerate(np.ndindex(*scale)):
            part_of = source[_phase(phase[:-1], phase[-1])]
            if number:
                out += part_of
            else:
                out[...] = part_of

    call.share(_tiles(dx, scale), tile)


def upsample_bilinear(call: KernelCall) -> None:
    """Linear interpolation between pixels' centres (`align_corners=False`)."""
    x, y = _planes(call.inputs[0]), _planes(call.outputs[0])
    scale = call.attrs["scale"]

    def tile(part: tuple[slice, ...]) -> None:
        values = _haloed(x, part, [1] * len(scale))
        for axis, s in enumerate(scale, 1):
            shape = list(values.shape)
            shape[axis] = (shape[axis] - 2) * s
            last = axis == len(scale)
            grown = y[_enlarged(part, scale)] if last else np.empty(shape, y.dtype)
            _stretch(values, axis, s, grown)
            values = grown

    call.share(_tiles(x, scale), tile)


def upsample_bilinear_grad(call: KernelCall) -> None:
    """The transpose of the interpolation."""
    dy, dx = _planes(call.inputs[0]), _planes(call.outputs[0])
    scale = call.attrs["scale"]

    def tile(part: tuple[slice, ...]) -> None:
        values = _haloed(dy, _enlarged(part, scale), scale)
        for axis in range(len(scale), 0, -1):
            values = _fold(values, axis, scale[axis - 1])
        dx[part] = values

    call.share(_tiles(dx, scale), tile)


def _planes(array: Any) -> Any:
    N, C, *spatial = array.shape
    return array.reshape(N * C, *spatial)


def _tiles(x: Any, scale: Sequence[int]) -> list[tuple[slice, ...]]:
    """Tiles of the small image whose enlargement is of the size of a tile."""
    grown = int(np.prod(scale))
    return tiles(x.shape, max(1, BLOCK_BYTES // x.itemsize // grown))


def _split(y: Any, scale: Sequence[int]) -> Any:
    """(planes, H s, W s) as (planes, H, s, W, s)."""
    shape = [y.shape[0]]
    for size, s in zip(y.shape[1:], scale, strict=True):
        shape += [size // s, s]
    return y.reshape(shape)


def _pixels(part: tuple[slice, ...]) -> tuple[slice, ...]:
    """A tile of the small image, of the large one as `_split` gives it."""
    place = [part[0]]
    for s in part[1:]:
        place += [s, slice(None)]
    return tuple(place)


def _phase(before: Sequence[int], last: int) -> tuple[Any, ...]:
    """Of an array as `_split` gives it, one repetition on each of the first axes."""
    place: list[Any] = [slice(None)]
    for k in (*before, last):
        place += [slice(None), k]
    return tuple(place)


def _enlarged(part: tuple[slice, ...], scale: Sequence[int]) -> tuple[slice, ...]:
    spatial = zip(part[1:], scale, strict=True)
    return (part[0], *(slice(p.start * s, p.stop * s) for p, s in spatial))


def _haloed(x: Any, part: tuple[slice, ...], halo: Sequence[int]) -> Any:
    """A copy of a tile with its surroundings; reflections beyond the border."""
    margins = [0, *halo]
    shape = [p.stop - p.start + 2 * h for p, h in zip(part, margins, strict=True)]
    copy = np.empty(shape, x.dtype)
    inside, source = [], []
    for size, p, h in zip(x.shape, part, margins, strict=True):
        start, stop = max(0, p.start - h), min(size, p.stop + h)
        source.append(slice(start, stop))
        inside.append(slice(start - p.start + h, stop - p.start + h))
    copy[tuple(inside)] = x[tuple(source)]
    for axis, (size, p, h) in enumerate(zip(x.shape, part, margins, strict=True)):
        turned = np.moveaxis(copy, axis, 0)
        if p.start == 0:
            turned[:h] = turned[h : 2 * h][::-1]
        if h and p.stop == size:
            turned[-h:] = turned[-2 * h : -h][::-1]
    return copy


def _cut(values: Any, axis: int, part: slice) -> Any:
    return values[(*[slice(None)] * axis, part)]


def _distances(scale: int) -> list[float]:
    return [(k + 0.5) / scale - 0.5 for k in range(scale)]


def _stretch(values: Any, axis: int, scale: int, out: Any) -> None:
    """Interpolate along an axis that has a pixel more on either side."""
    centre = _cut(values, axis, slice(1, -1))
    for k, f in enumerate(_distances(scale)):
        target = _cut(out, axis, slice(k, None, scale))
        side = slice(0, -2) if f < 0 else slice(2, None)
        neighbour = _cut(values, axis, side) * abs(f)
        np.add(neighbour, centre * (1 - abs(f)), out=target)


def _fold(values: Any, axis: int, scale: int) -> Any:
    """The transpose of `_stretch`, of values with `scale` more on either side."""
    size = values.shape[axis] - 2 * scale
    total: Any = None
    for k, f in enumerate(_distances(scale)):
        own = _cut(values, axis, slice(scale + k, scale + size, scale)) * (1 - abs(f))
        total = own if total is None else np.add(total, own, out=total)
        if f:
            first = k if f > 0 else 2 * scale + k
            other = _cut(values, axis, slice(first, first + size, scale))
            total += other * abs(f)
    return total


OPERATIONS: dict[str, Run] = {
    "upsample_bilinear": upsample_bilinear,
    "upsample_bilinear_grad": upsample_bilinear_grad,
    "upsample_nearest": upsample_nearest,
    "upsample_nearest_grad": upsample_nearest_grad,
}
