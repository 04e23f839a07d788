"""Pooling layers over sliding windows."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from mucudnn.arguments import a_flag
from mucudnn.ir.shapes import Ints, Window

if TYPE_CHECKING:
    from mucudnn.ir.builder import GraphBuilder

__all__ = ["avg_pool", "global_avg_pool", "global_max_pool", "max_pool"]

_MOST_WINDOW = 255
"""Maximum size of a max-pooling window: the index of the maximum is one byte."""


def max_pool(
    g: "GraphBuilder",
    x: str,
    kernel: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    *,
    ceil_mode: bool = False,
) -> str:
    """Return the maximum of each window; the default stride is the kernel."""
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
    """Average each window; padding counts as zeros unless excluded."""
    a_flag("ceil_mode", ceil_mode)
    a_flag("count_include_pad", count_include_pad)
    shape = g.shape(x)
    window = Window.over(shape[2:], kernel, stride, padding, ceil_mode)
    out = (*shape[:2], *window.out(shape[2:]))
    return g.append(
        "avg_pool", (x,), out, count_include_pad=count_include_pad, **asdict(window)
    )


def global_avg_pool(g: "GraphBuilder", x: str) -> str:
    """Average each channel: (N, C, *spatial) to (N, C, 1, …)."""
    return avg_pool(g, x, g.shape(x)[2:])


def global_max_pool(g: "GraphBuilder", x: str) -> str:
    """Return the maximum of each channel."""
    return max_pool(g, x, g.shape(x)[2:])
