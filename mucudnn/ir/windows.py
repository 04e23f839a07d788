"""Row dependencies of windows that slide along one axis of an image.

Convolutions, pools and their gradients have them. `x` is the image below the windows,
`y` has one row per window.
"""

from dataclasses import dataclass

from mucudnn.ir.traits import Interval, Rows

__all__ = ["Window"]


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding windows along an axis.

    Attributes:
        kernel: Rows of a window.
        stride: Rows from one window to the next.
        padding: Rows of padding above the image.
        dilation: Rows from one row of a window to its next.
    """

    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    @property
    def span(self) -> int:
        """Rows from a window's first row to the end of its last."""
        return self.dilation * (self.kernel - 1) + 1

    def under(self, y: Rows) -> Interval:
        """Return the rows of x below some windows; rows outside of x are padding."""
        start = y.start * self.stride - self.padding
        return start, start + (y.count - 1) * self.stride + self.span

    def padded_for(self, x: Rows) -> tuple[Interval, int]:
        """Return the windows that contain some rows of x, and the strip's padding.

        The padding is the number of rows by which the first window begins above the
        strip: the least for which all windows that contain one of its rows are covered,
        at both ends. Windows beyond the image may be among them.
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
        """Return those of `windows` windows that contain some rows of x, at least one.

        The first begins at or above the first of those rows.
        """
        holding = -(-(x.start + self.padding - self.span + 1) // self.stride)
        first = min(holding, (x.start + self.padding) // self.stride)
        first = min(max(first, 0), windows - 1)
        past = min(windows, (x.stop - 1 + self.padding) // self.stride + 1)
        return first, max(first + 1, past)
