"""FFT_TILING: images in tiles of 32 x 32 points, whatever their size.

The workspace and the cost of a tile are fixed. Tiles overlap by the filter's span, so
small filters waste little; a filter that spans a whole tile leaves no output in it.
Volumes take tiles of 16 points an axis: 32 would need 32 768 a tile.
"""

from mucudnn.backends.cpu.conv.algorithm import Algorithm
from mucudnn.backends.cpu.conv.fourier.circles import tiled_axis
from mucudnn.backends.cpu.conv.fourier.spectral import Spectral
from mucudnn.ir.conv import ConvProblem

__all__ = ["ALGORITHM"]

_TILE = {1: 32, 2: 32, 3: 16}  # points per axis, by the number of spatial axes


def _kernel(problem: ConvProblem, workers: int) -> Spectral:
    rank = len(problem.stride)
    axes = (tiled_axis(problem, i, _TILE[rank]) for i in reversed(range(rank)))
    return Spectral(problem, workers, tuple(axes))


def _excluded(problem: ConvProblem) -> str | None:
    tile = _TILE[len(problem.stride)]
    for i, step in enumerate(problem.stride):
        reach = problem.dilation[i] * (problem.w_shape[2 + i] - 1) + 1
        if reach + step - 1 > tile:
            return (
                f"on spatial axis {i} the filter spans {reach} at a stride of {step}, "
                f"too much for tiles of {tile} points"
            )
    return None


ALGORITHM = Algorithm("FFT_TILING", _kernel, _excluded)
