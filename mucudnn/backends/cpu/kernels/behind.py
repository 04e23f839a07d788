"""Windows seen from the image: the results that an element has gone into."""

from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.windows import Windows

__all__ = ["Behind"]


class Behind:
    """Results of the windows that reach back to a tile: those before it, and its own.

    Zero where there is no window, so that a gradient needs no care at the borders.

    Args:
        windows: A tile of the image: positions in each of its phases.
        results: A tensor with an element a window.

    Attributes:
        image: The copied results, of `windows.lengths`.
        inside: The part of `image` that has windows.
        source: The part of `results` that it is a copy of.
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
        """Of each position the window that has its element at this offset there."""
        start = self._spare - offset
        return self._flat[start : start + self._size]
