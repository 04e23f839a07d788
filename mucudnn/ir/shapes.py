"""Sizes of what sliding windows leave, checked."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Ints", "Window", "per_axis"]

Ints = int | Sequence[int]


def per_axis(name: str, value: Ints, rank: int, least: int) -> tuple[int, ...]:
    """One integer for every spatial axis, from one for all or one each.

    Raises:
        ValueError: There are too few or too many, or one is too small.
    """
    sizes = (value,) * rank if isinstance(value, int) else tuple(value)
    if len(sizes) != rank:
        raise ValueError(f"{name} {sizes} has {len(sizes)} entries for {rank} axes")
    if any(size < least for size in sizes):
        raise ValueError(f"{name} must be at least {least}, got {sizes}")
    return sizes


@dataclass(frozen=True, slots=True)
class Window:
    """A pooling window over spatial axes.

    Attributes:
        kernel: Its sizes.
        stride: Its steps.
        padding: Of the image, at both ends.
        extra: More padding at the end, so that a last, partial window fits.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    extra: tuple[int, ...]

    @classmethod
    def over(
        cls,
        spatial: Sequence[int],
        kernel: Ints,
        stride: Ints | None,
        padding: Ints,
        ceil_mode: bool,
    ) -> "Window":
        """Check a window against an image; `ceil_mode` keeps partial windows.

        A partial window must begin inside the image or its padding at the front, as in
        PyTorch.

        Raises:
            ValueError: A size is wrong, or no window fits.
        """
        rank = len(spatial)
        kernels = per_axis("kernel", kernel, rank, 1)
        strides = kernels if stride is None else per_axis("stride", stride, rank, 1)
        pads = per_axis("padding", padding, rank, 0)
        extra = []
        for size, k, step, pad in zip(spatial, kernels, strides, pads, strict=True):
            if 2 * pad > k:
                raise ValueError(f"padding {pad} is more than half the kernel {k}")
            span = size + 2 * pad - k
            if span < 0:
                raise ValueError(
                    f"a window of {k} does not fit an image of {size} padded by {pad}"
                )
            over = -span % step
            starts_inside = (span + over) // step * step < size + pad
            extra.append(over if ceil_mode and starts_inside else 0)
        return cls(kernels, strides, pads, tuple(extra))

    def out(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """Spatial sizes of the result."""
        return tuple(
            (size + 2 * pad + more - k) // step + 1
            for size, k, step, pad, more in zip(
                spatial, self.kernel, self.stride, self.padding, self.extra, strict=True
            )
        )
