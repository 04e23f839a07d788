"""Positions of a convolution's samples on the circle of a Fourier transform.

A circular transform of length n computes all three kernels of a convolution exactly if
no two positions that do not belong together agree modulo n. With x at position j, the
filter at t and y at m they belong together when j = m + t, so n must exceed the
greatest |j - m - t| of a tile. It need not cover the padding at both ends.
"""

from dataclasses import dataclass

from mucudnn.backends.cpu.conv.fourier.dft import Window
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["Axis", "tiled_axis", "whole_axis"]


@dataclass(frozen=True, slots=True)
class Axis:
    """A spatial axis: the length of its transform and its tiles.

    Attributes:
        length: Points of the circle.
        x: Windows of the input, one per tile.
        y: Windows of the output, one per tile.
        x_at: Positions of the columns that `x` refers to.
        y_at: Positions of the columns that `y` refers to, `stride` apart.
        w_at: Positions of the filter's taps, `dilation` apart.
    """

    length: int
    x: tuple[Window, ...]
    y: tuple[Window, ...]
    x_at: range
    y_at: range
    w_at: range


def whole_axis(problem: ConvProblem, axis: int) -> Axis:
    """Return spatial axis number `axis` in one piece, on the shortest exact circle."""
    size, out = problem.x_shape[2 + axis], problem.y_shape[2 + axis]
    step, pad = problem.stride[axis], problem.padding[axis]
    taps = _taps(problem, axis)
    reach = taps[-1] + 1
    length = max(pad + size, (out - 1) * step - pad + reach)
    return Axis(
        length,
        (Window(0, size, 0),),
        (Window(0, out, 0),),
        range(pad, pad + size),
        range(0, (out - 1) * step + 1, step),
        taps,
    )


def tiled_axis(problem: ConvProblem, axis: int, tile: int) -> Axis:
    """Return spatial axis number `axis` in tiles on circles of `tile` points.

    The tiles that the kernel reads overlap, those it writes do not (overlap-save); a
    filter gradient reads tiles of y that do not overlap.
    """
    size, out = problem.x_shape[2 + axis], problem.y_shape[2 + axis]
    step, pad = problem.stride[axis], problem.padding[axis]
    taps = _taps(problem, axis)
    reach = taps[-1] + 1
    if reach + step - 1 > tile:
        raise ValueError(f"a filter that spans {reach} has no output in {tile} points")
    if problem.direction is not Direction.BACKWARD_DATA:
        new = (tile - reach) // step + 1
        count = -(-out // new)
        width = (new - 1) * step + reach
        return Axis(
            tile,
            tuple(_window(i * new * step - pad, width, size) for i in range(count)),
            tuple(_window(i * new, new, out) for i in range(count)),
            range(width),
            range(0, width - reach + 1, step),
            taps,
        )
    new = (tile - reach + 1) // step * step
    count = -(-size // new)
    shift = reach - 1 - pad  # position of output 0 in the first tile
    first = -(shift // step)
    y_at = range(first * step + shift, new + reach - 1, step)
    return Axis(
        tile,
        tuple(_window(i * new, new, size) for i in range(count)),
        tuple(_window(i * new // step + first, len(y_at), out) for i in range(count)),
        range(reach - 1, reach - 1 + new),
        y_at,
        taps,
    )


def _taps(problem: ConvProblem, axis: int) -> range:
    step = problem.dilation[axis]
    return range(0, step * (problem.w_shape[2 + axis] - 1) + 1, step)


def _window(start: int, width: int, size: int) -> Window:
    """Return the existing part of the positions `start` to `start + width`."""
    low = min(max(start, 0), size)
    high = min(max(start + width, low), size)
    return Window(low, high, max(low - start, 0) if high > low else 0)
