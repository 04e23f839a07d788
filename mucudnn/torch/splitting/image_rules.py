"""How PyTorch's operations are cut into strips: rows of images, and what windows reach.

What computes each row from the same row of all that it reads is cut as it is along the
batch; the rest has rules of its own, or stays whole.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from mucudnn.ir.strips import HEIGHT
from mucudnn.torch.lowering.lowered import Call
from mucudnn.torch.splitting.axes import Axis, Cut, Site
from mucudnn.torch.splitting.conv_strips import convolution, convolution_backward
from mucudnn.torch.splitting.norm_parts import NORMS
from mucudnn.torch.splitting.pool_strips import (
    avg_pool,
    avg_pool_backward,
    max_pool,
    max_pool_backward,
)
from mucudnn.torch.splitting.resize_strips import (
    bilinear,
    bilinear_backward,
    nearest,
    nearest_backward,
    pad,
    slice_backward,
)
from mucudnn.torch.splitting.rules import carried, cut_of

__all__ = ["IMAGE_RULES", "strip_carried", "strip_of"]

_HEIGHT = Axis(HEIGHT)


def strip_of(site: Site, call: Call) -> Cut | None:
    """How a call is cut into strips; None if it stays whole."""
    if site.op in NORMS:
        return NORMS[site.op](site)
    if (cut := cut_of(site, call)) is not None:  # each row by itself
        return cut
    rule = IMAGE_RULES.get(site.op)
    return None if rule is None else rule(site, call)


def strip_carried(site: Site, call: Call) -> tuple[Axis | None, ...]:
    """Where the height is in results of a call that stays whole.

    Images are taken to be made of images. Where that is wrong it is no harm: a rule
    holds along any axis.
    """
    if site.op == _CROPPED:
        return (site.axis(0),)
    imaged = any(axis == _HEIGHT for axis in site.axes)
    rank = max((len(layout.shape) for layout in site.inputs), default=0)
    return tuple(
        _HEIGHT if imaged and len(layout.shape) == rank > HEIGHT else axis
        for layout, axis in zip(site.outputs, carried(site, call), strict=True)
    )


_CROPPED = "aten.slice.Tensor"
"""What is a view of some rows: strips read theirs of it as one."""

IMAGE_RULES: Mapping[str, Callable[[Site, Call], Cut | None]] = MappingProxyType(
    {
        "aten.avg_pool2d.default": avg_pool,
        "aten.avg_pool2d_backward.default": avg_pool_backward,
        "aten.avg_pool3d.default": avg_pool,
        "aten.avg_pool3d_backward.default": avg_pool_backward,
        "aten.constant_pad_nd.default": pad,
        "aten.convolution.default": convolution,
        "aten.convolution_backward.default": convolution_backward,
        "aten.max_pool2d_with_indices.default": max_pool,
        "aten.max_pool2d_with_indices_backward.default": max_pool_backward,
        "aten.max_pool3d_with_indices.default": max_pool,
        "aten.max_pool3d_with_indices_backward.default": max_pool_backward,
        "aten.slice_backward.default": slice_backward,
        "aten.upsample_bilinear2d.default": bilinear,
        "aten.upsample_bilinear2d.vec": bilinear,
        "aten.upsample_bilinear2d_backward.default": bilinear_backward,
        "aten.upsample_nearest2d.default": nearest,
        "aten.upsample_nearest2d.vec": nearest,
        "aten.upsample_nearest2d_backward.default": nearest_backward,
        "aten.upsample_nearest3d.default": nearest,
        "aten.upsample_nearest3d.vec": nearest,
        "aten.upsample_nearest3d_backward.default": nearest_backward,
    }
)
"""Operation -> its rule."""
