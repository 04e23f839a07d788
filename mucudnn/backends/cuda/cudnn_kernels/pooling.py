"""Pooling by the library: averages both ways, maxima where no gradient is wanted.

Our gradient of a maximum reads where in its window it was, which the library does not
tell; and it does not say which of several equal maxima its own gradient goes to. So
maxima are the library's only where nobody reads their places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.cuda._enums import NanPropagation, PoolingMode
from mucudnn.backends.cuda.cudnn_kernels.case import (
    Arguments,
    Case,
    LibraryOperation,
    describable,
)
from mucudnn.backends.cuda.first_api import ints

__all__ = ["OPERATIONS"]

_RANKS = (2, 3)
"""Spatial axes that the library's windows may have."""


@dataclass(frozen=True, slots=True)
class _Windows:
    """Windows over an image in the library's terms; shapes are (N, C, *spatial)."""

    image: tuple[int, ...]
    made: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    channels_last: bool

    @classmethod
    def of(cls, case: Case, image: Sequence[int], made: Sequence[int]) -> "_Windows":
        """Of a case, the image's shape and that of what windows leave of it.

        Images with their channels last are seen as (N, 1, *spatial, C), with windows
        one wide along the channels; any image seen like that is the same.
        """
        axes = [tuple(case[name]) for name in ("kernel", "stride", "padding")]
        shapes = [tuple(image), tuple(made)]
        last = len(image) > 3 and image[1] == 1 and [a[-1] for a in axes] == [1, 1, 0]
        if last:
            shapes = [(s[0], s[-1], *s[2:-1]) for s in shapes]
            axes = [a[:-1] for a in axes]
        if len(axes[0]) == 1:  # along a line: over an image of height 1
            shapes = [(*s[:2], 1, *s[2:]) for s in shapes]
            axes = [(n, *a) for n, a in zip((1, 1, 0), axes, strict=True)]
        (x, y), (kernel, stride, padding) = shapes, axes
        return cls(x, y, kernel, stride, padding, last)

    @property
    def even(self) -> bool:
        """Whether there are as many as fit between equal paddings at both ends."""
        axes = zip(self.image[2:], self.kernel, self.stride, self.padding, strict=True)
        fitting = tuple((n + 2 * p - k) // step + 1 for n, k, step, p in axes)
        return fitting == self.made[2:] and len(self.kernel) in _RANKS


def _takes(case: Case) -> bool:
    image, made = case.inputs[0], case.outputs[0]
    if case.op.endswith("_grad"):
        image, made = made, image
    return describable(image, made) and _Windows.of(case, image.shape, made.shape).even


def _mode(case: Case) -> PoolingMode:
    if case.op == "max_pool":
        return PoolingMode.MAX
    if case["count_include_pad"]:
        return PoolingMode.AVERAGE_COUNT_INCLUDE_PADDING
    return PoolingMode.AVERAGE_COUNT_EXCLUDE_PADDING


def _described(
    case: Case, kept: Arguments, image: Sequence[int], made: Sequence[int]
) -> tuple[int, int, int]:
    """The descriptors of the windows, the image and what windows leave of it."""
    windows = _Windows.of(case, image, made)
    axes = windows.kernel, windows.padding, windows.stride
    pooling = kept.descriptors.create(
        "Pooling",
        "PoolingNd",
        _mode(case),
        NanPropagation.PROPAGATE_NAN,
        len(windows.kernel),
        *map(ints, axes),
    )
    last = windows.channels_last
    x = kept.tensor(windows.image, channels_last=last)
    return pooling, x, kept.tensor(windows.made, channels_last=last)


def _forward(
    case: Case, kept: Arguments, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Any, ...]:
    shapes = case.inputs[0].shape, case.outputs[0].shape
    pooling, x, y = _described(case, kept, *shapes)
    return pooling, kept.one, x, inputs[0], kept.zero, y, outputs[0]


def _average_back(
    case: Case, kept: Arguments, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Any, ...]:
    """Of an average neither x nor y matters: dx and dy stand for them."""
    shapes = case.outputs[0].shape, case.inputs[0].shape
    pooling, x, y = _described(case, kept, *shapes)
    (dy,), (dx,) = inputs, outputs
    return pooling, kept.one, y, dy, y, dy, x, dx, kept.zero, x, dx


OPERATIONS: dict[str, LibraryOperation] = {
    "avg_pool": LibraryOperation("cudnnPoolingForward", _takes, _forward),
    "avg_pool_grad": LibraryOperation("cudnnPoolingBackward", _takes, _average_back),
    "max_pool": LibraryOperation("cudnnPoolingForward", _takes, _forward, (1,)),
}
