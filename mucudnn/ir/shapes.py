"""Validated sizes of sliding windows and their results."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.arguments import an_integer, integers

__all__ = ["Ints", "Window", "channels", "named_padding", "per_axis"]

Ints = int | Sequence[int]


def channels(name: str, shape: Sequence[int]) -> int:
    """Return the number of channels of a tensor, its axis 1."""
    if len(shape) < 2:
        raise ValueError(f"{name!r} has shape {tuple(shape)}; it must be (N, C, …)")
    return shape[1]


def per_axis(name: str, value: Any, rank: int, least: int) -> tuple[int, ...]:
    """Return one integer per spatial axis, from one for all or one for each."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (an_integer(name, value, least),) * rank
    sizes = integers(name, value, least)
    if len(sizes) != rank:
        raise ValueError(
            f"{name} {sizes} has {len(sizes)} entries for {rank} axes; give one for "
            f"all, or one for each of the {rank} spatial axes"
        )
    return sizes


def named_padding(
    name: str, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Return the padding for "same" or "valid", as in PyTorch.

    Raises:
        ValueError: The word is unknown, or "same" would need another stride than 1 or
            more zeros at one end than at the other.
    """
    if name not in ("same", "valid"):
        raise ValueError(
            f"unknown padding {name!r}; choose numbers, or one of: same, valid"
        )
    if name == "valid":
        return (0,) * len(kernel)
    if any(step != 1 for step in stride):
        raise ValueError(
            f"padding 'same' is for stride 1, got stride {tuple(stride)}; give the "
            "padding in numbers"
        )
    spans = tuple(gap * (k - 1) for k, gap in zip(kernel, dilation, strict=True))
    if any(span % 2 for span in spans):
        raise ValueError(
            f"padding 'same' of a filter of {tuple(kernel)} with dilation "
            f"{tuple(dilation)} takes {spans} zeros along the axes, an odd number "
            "somewhere: more at one end than at the other; pad the input first, or "
            "use an odd filter"
        )
    return tuple(span // 2 for span in spans)


@dataclass(frozen=True, slots=True)
class Window:
    """A pooling window over spatial axes.

    `extra` is additional padding at the end of each axis, for a last, partial window.
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
        """Validate a window for an image; `ceil_mode` keeps partial windows.

        A partial window must begin inside the image or its leading padding, as in
        PyTorch.

        Raises:
            ValueError: A size is out of range, or no window fits.
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
        """Return the spatial sizes of the result."""
        return tuple(
            (size + 2 * pad + more - k) // step + 1
            for size, k, step, pad, more in zip(
                spatial, self.kernel, self.stride, self.padding, self.extra, strict=True
            )
        )
