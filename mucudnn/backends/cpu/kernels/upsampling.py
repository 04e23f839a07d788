"""Upsampling by integer factors: nearest and (bi-, tri-)linear, with gradients.

Axis by axis. Linear: pixel i s + k of the result is f = (k + 1/2) / s - 1/2 from pixel
i of the image, so it is the sum of (1 - |f|) of that pixel and |f| of its neighbour on
that side. Beyond the border the image is its own reflection, and so is the gradient.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.tiles import BLOCK_BYTES, KernelCall, Part, Run, tiles


def upsample_nearest(call: KernelCall) -> None:
    """Repeat each pixel along every axis."""
    x, y = _planes(call.inputs[0]), _planes(call.outputs[0])
    scale = call.attrs["scale"]
    rank = len(scale)

    def tile(part: Part) -> None:
        out, source = y[_enlarged(part, scale)], x[part]
        for k in range(scale[-1]):
            out[_repetition([*[0] * (rank - 1), k], scale)] = source
        for axis in reversed(range(rank - 1)):
            first = out[_repetition([0] * (axis + 1), scale)]
            for k in range(1, scale[axis]):
                out[_repetition([*[0] * axis, k], scale)] = first

    call.share(_tiles(x, scale), tile)


def upsample_nearest_grad(call: KernelCall) -> None:
    """Compute dx as the sum over each pixel's repetitions."""
    dy, dx = _planes(call.inputs[0]), _planes(call.outputs[0])
    scale = call.attrs["scale"]

    def tile(part: Part) -> None:
        out, source = dx[part], dy[_enlarged(part, scale)]
        for number, phase in enumerate(np.ndindex(*scale)):
            repetition = source[_repetition(phase, scale)]
            if number:
                out += repetition
            else:
                out[...] = repetition

    call.share(_tiles(dx, scale), tile)


def upsample_bilinear(call: KernelCall) -> None:
    """Interpolate linearly between pixels' centres (`align_corners=False`)."""
    x, y = _planes(call.inputs[0]), _planes(call.outputs[0])
    scale = call.attrs["scale"]

    def tile(part: Part) -> None:
        values = _with_halo(x, part, [1] * len(scale))
        for axis, s in enumerate(scale, 1):
            shape = list(values.shape)
            shape[axis] = (shape[axis] - 2) * s
            last = axis == len(scale)
            grown = y[_enlarged(part, scale)] if last else np.empty(shape, y.dtype)
            _interpolate(values, axis, s, grown)
            values = grown

    call.share(_tiles(x, scale), tile)


def upsample_bilinear_grad(call: KernelCall) -> None:
    """Apply the transpose of the interpolation."""
    dy, dx = _planes(call.inputs[0]), _planes(call.outputs[0])
    scale = call.attrs["scale"]

    def tile(part: Part) -> None:
        values = _with_halo(dy, _enlarged(part, scale), scale)
        for axis in range(len(scale), 0, -1):
            values = _interpolate_transposed(values, axis, scale[axis - 1])
        dx[part] = values

    call.share(_tiles(dx, scale), tile)


def _planes(array: Any) -> Any:
    N, C, *spatial = array.shape
    return array.reshape(N * C, *spatial)


def _tiles(x: Any, scale: Sequence[int]) -> list[Part]:
    """Return tiles of the small image whose enlargements have the size of a tile."""
    grown = int(np.prod(scale))
    return tiles(x.shape, max(1, BLOCK_BYTES // x.itemsize // grown))


def _repetition(phase: Sequence[int], scale: Sequence[int]) -> Part:
    """Return the slices of one repetition of each pixel, along the first axes."""
    pairs = zip(phase, scale, strict=False)
    return (slice(None), *(slice(k, None, s) for k, s in pairs))


def _enlarged(part: Part, scale: Sequence[int]) -> Part:
    spatial = zip(part[1:], scale, strict=True)
    return (part[0], *(slice(p.start * s, p.stop * s) for p, s in spatial))


def _with_halo(x: Any, part: Part, halo: Sequence[int]) -> Any:
    """Copy a tile with its surroundings; reflections beyond the border."""
    source, beyond = [], []
    for size, p, h in zip(x.shape, part, (0, *halo), strict=True):
        start, stop = max(0, p.start - h), min(size, p.stop + h)
        source.append(slice(start, stop))
        beyond.append((start - p.start + h, p.stop + h - stop))
    return np.pad(x[tuple(source)], beyond, mode="symmetric")


def _cut(values: Any, axis: int, part: slice) -> Any:
    return values[(*[slice(None)] * axis, part)]


def _interpolate(values: Any, axis: int, scale: int, out: Any) -> None:
    """Interpolate along an axis that has one more pixel on either side."""
    centre = _cut(values, axis, slice(1, -1))
    for k in range(scale):
        f = (k + 0.5) / scale - 0.5
        target = _cut(out, axis, slice(k, None, scale))
        side = slice(0, -2) if f < 0 else slice(2, None)
        neighbour = _cut(values, axis, side) * abs(f)
        np.add(neighbour, centre * (1 - abs(f)), out=target)


def _interpolate_transposed(values: Any, axis: int, scale: int) -> Any:
    """Apply `_interpolate` transposed to values with `scale` more on either side."""
    size = values.shape[axis] - 2 * scale
    total: Any = None
    for k in range(scale):
        f = (k + 0.5) / scale - 0.5
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
