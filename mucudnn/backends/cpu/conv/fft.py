"""FFT: each image is one tile on the shortest circle that is exact.

The transforms are matrix products (see `dft`), so the length need not be a product of
small primes: 13 x 13 images with a padding of 1 take 14 points, not 16. The cost grows
with the square of the length, which limits the image size.
"""

from mucudnn.backends.cpu.conv.algorithm import Algorithm
from mucudnn.backends.cpu.conv.fourier.circles import whole_axis
from mucudnn.backends.cpu.conv.fourier.spectral import Spectral
from mucudnn.ir.conv import ConvProblem

__all__ = ["ALGORITHM"]

_LONGEST = 512  # points; beyond, a table outgrows the cache and tiles are faster


def _kernel(problem: ConvProblem, workers: int) -> Spectral:
    rank = len(problem.stride)
    return Spectral(
        problem, workers, tuple(whole_axis(problem, i) for i in range(rank))[::-1]
    )


def _excluded(problem: ConvProblem) -> str | None:
    for i, axis in enumerate(reversed(_kernel(problem, 1).axes)):
        if axis.length > _LONGEST:
            return (
                f"spatial axis {i} of x {problem.x_shape} needs a transform of "
                f"{axis.length} points, more than {_LONGEST}; FFT_TILING has no limit"
            )
    return None


ALGORITHM = Algorithm("FFT", _kernel, _excluded)
