"""Windows that slide over an image and leave one number each."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from mucudnn.arguments import a_flag
from mucudnn.ir.shapes import Ints, Window

if TYPE_CHECKING:
    from mucudnn.ir.builder import GraphBuilder

__all__ = ["avg_pool", "global_avg_pool", "global_max_pool", "max_pool"]

_MOST_WINDOW = 255
"""Values of a max-pooling window: where the largest was is saved in one byte."""


def max_pool(
    g: "GraphBuilder",
    x: str,
    kernel: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    *,
    ceil_mode: bool = False,
) -> str:
    """The largest value of each window; by default it steps by the kernel."""
    a_flag("ceil_mode", ceil_mode)
    shape = g.shape(x)
    window = Window.over(shape[2:], kernel, stride, padding, ceil_mode)
    if math.prod(window.kernel) > _MOST_WINDOW:
        raise ValueError(
            f"a max-pooling window of {window.kernel} has more than "
            f"{_MOST_WINDOW} values"
        )
    out = (*shape[:2], *window.out(shape[2:]))
    saved = (("index", out, "uint8"),)
    return g.append("max_pool", (x,), out, saved, **asdict(window))


def avg_pool(
    g: "GraphBuilder",
    x: str,
    kernel: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    *,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> str:
    """The mean of each window; padding counts as zeros or not at all."""
    a_flag("ceil_mode", ceil_mode)
    a_flag("count_include_pad", count_include_pad)
    shape = g.shape(x)
    window = Window.over(shape[2:], kernel, stride, padding, ceil_mode)
    out = (*shape[:2], *window.out(shape[2:]))
    return g.append(
        "avg_pool", (x,), out, count_include_pad=count_include_pad, **asdict(window)
    )


def global_avg_pool(g: "GraphBuilder", x: str) -> str:
    """The mean of each channel: (N, C, *spatial) to (N, C, 1, …)."""
    return avg_pool(g, x, g.shape(x)[2:])


def global_max_pool(g: "GraphBuilder", x: str) -> str:
    """The largest value of each channel."""
    return max_pool(g, x, g.shape(x)[2:])
