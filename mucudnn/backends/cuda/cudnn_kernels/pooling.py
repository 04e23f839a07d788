"""Pooling by cuDNN: averages in both directions, maxima where no gradient is needed.

Our gradient of a maximum reads its position in the window, which cuDNN does not report;
nor does it specify which of several equal maxima its own gradient goes to. So maxima
are computed by cuDNN only if nothing reads their positions.
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

_RANKS = (2, 3)  # numbers of spatial axes that cuDNN's windows may have


@dataclass(frozen=True, slots=True)
class _Windows:
    """Windows over an image in cuDNN's terms; shapes are (N, C, *spatial)."""

    image: tuple[int, ...]
    made: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    channels_last: bool

    @classmethod
    def of(cls, case: Case, image: Sequence[int], made: Sequence[int]) -> "_Windows":
        """Translate a case with the shapes of the image and of the pooled result.

        Images with channels last are passed as (N, 1, *spatial, C), with windows of
        size 1 along the channels; any other image of that form is equivalent.
        """
        axes = [tuple(case[name]) for name in ("kernel", "stride", "padding")]
        shapes = [tuple(image), tuple(made)]
        last = len(image) > 3 and image[1] == 1 and [a[-1] for a in axes] == [1, 1, 0]
        if last:
            shapes = [(s[0], s[-1], *s[2:-1]) for s in shapes]
            axes = [a[:-1] for a in axes]
        if len(axes[0]) == 1:  # a line: an image of height 1
            shapes = [(*s[:2], 1, *s[2:]) for s in shapes]
            axes = [(n, *a) for n, a in zip((1, 1, 0), axes, strict=True)]
        (x, y), (kernel, stride, padding) = shapes, axes
        return cls(x, y, kernel, stride, padding, last)

    @property
    def even(self) -> bool:
        """Whether as many windows exist as fit between equal paddings at both ends."""
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
    case: Case, owner: Arguments, image: Sequence[int], made: Sequence[int]
) -> tuple[int, int, int]:
    windows = _Windows.of(case, image, made)
    axes = windows.kernel, windows.padding, windows.stride
    pooling = owner.descriptors.create(
        "Pooling",
        "PoolingNd",
        _mode(case),
        NanPropagation.PROPAGATE_NAN,
        len(windows.kernel),
        *map(ints, axes),
    )
    last = windows.channels_last
    x = owner.tensor(windows.image, channels_last=last)
    return pooling, x, owner.tensor(windows.made, channels_last=last)


def _forward(
    case: Case, owner: Arguments, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Any, ...]:
    shapes = case.inputs[0].shape, case.outputs[0].shape
    pooling, x, y = _described(case, owner, *shapes)
    return pooling, owner.one, x, inputs[0], owner.zero, y, outputs[0]


def _average_gradient(
    case: Case, owner: Arguments, inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Any, ...]:
    """Return the arguments; x and y do not matter, so dx and dy stand for them."""
    shapes = case.outputs[0].shape, case.inputs[0].shape
    pooling, x, y = _described(case, owner, *shapes)
    (dy,), (dx,) = inputs, outputs
    return pooling, owner.one, y, dy, y, dy, x, dx, owner.zero, x, dx


OPERATIONS: dict[str, LibraryOperation] = {
    "avg_pool": LibraryOperation("cudnnPoolingForward", _takes, _forward),
    "avg_pool_grad": LibraryOperation(
        "cudnnPoolingBackward", _takes, _average_gradient
    ),
    "max_pool": LibraryOperation("cudnnPoolingForward", _takes, _forward, (1,)),
}
