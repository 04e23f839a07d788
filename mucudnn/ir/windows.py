"""Windows that move over an image along one axis: which rows depend on which.

Convolutions, pools and their gradients have them. `x` is the image that windows lie on,
`y` has one row for each window.
"""

from dataclasses import dataclass

from mucudnn.ir.traits import Interval, Rows

__all__ = ["Window"]


@dataclass(frozen=True, slots=True)
class Window:
    """Windows along an axis.

    Attributes:
        kernel: Rows that a window has.
        stride: Rows from one window to the next.
        padding: Rows that the first begins above the image.
        dilation: Rows from one row of a window to its next.
    """

    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    @property
    def span(self) -> int:
        """Rows from a window's first to behind its last."""
        return self.dilation * (self.kernel - 1) + 1

    def under(self, y: Rows) -> Interval:
        """Rows of x under some windows; those outside of the image are padding."""
        start = y.start * self.stride - self.padding
        return start, start + (y.count - 1) * self.stride + self.span

    def padded_for(self, x: Rows) -> tuple[Interval, int]:
        """Windows that hold some rows of x, and padding with which they are a strip's.

        Padding of the strip is how many rows its first window begins above it: the
        least with which no window that holds one of its rows is left out, at either
        end. Windows that do not exist are among them.
        """
        step, reach = self.stride, self.span - 1
        place = x.start + self.padding
        padding = max(0, reach - step + 1)
        padding += (place - padding) % step
        last = (x.stop - 1 + self.padding) // step
        while True:
            first = (place - padding) // step
            count = (x.count + 2 * padding - reach - 1) // step + 1
            if count > 0 and first + count > last:
                return (first, first + count), padding
            padding += step

    def holding(self, x: Rows, windows: int) -> Interval:
        """Those of so many windows that hold some rows of x, one at least.

        The first begins above those rows, or with them.
        """
        holding = -(-(x.start + self.padding - self.span + 1) // self.stride)
        first = min(holding, (x.start + self.padding) // self.stride)
        first = min(max(first, 0), windows - 1)
        past = min(windows, (x.stop - 1 + self.padding) // self.stride + 1)
        return first, max(first + 1, past)
