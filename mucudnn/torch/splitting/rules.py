"""How PyTorch's operations are cut along the batch: by kind, from their arguments.

A rule says what a slice of the call reads and writes; that holds whatever the axis is
that is called the batch. What has no rule stays whole.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.torch.lowering.lowered import Call, Operand
from mucudnn.torch.splitting.axes import Axis, Cut, Rule, Site
from mucudnn.torch.splitting.losses import LOSSES
from mucudnn.torch.splitting.shape_rules import SHAPES

__all__ = ["RULES", "UNDRAWN", "carried", "cut_of"]


def cut_of(site: Site, call: Call) -> Cut | None:
    """How a call is cut; None if it stays whole."""
    if call.random and site.op not in UNDRAWN:
        return None
    rule = RULES.get(site.op)
    if rule is None and torch.Tag.pointwise in getattr(call.function, "tags", ()):
        rule = _pointwise
    cut = None if rule is None else rule(site)
    return cut if cut is not None and _fits(site, cut) else None


def carried(site: Site, call: Call) -> tuple[Axis | None, ...]:
    """Where the batch is in results of a call that stays whole."""
    nowhere = (None,) * len(site.outputs)
    if site.op in _COUPLED:
        found = tuple(site.axis(0) if path == 0 else None for path in site.results)
        pairs = zip(site.outputs, found, strict=True)
        fits = all(a is None or a.fits(o, site.batch) for o, a in pairs)
        return found if fits else nowhere
    if call.random and site.outputs:
        cut = _pointwise(site)
        return cut.outputs if cut is not None and _fits(site, cut) else nowhere
    return nowhere


def _fits(site: Site, cut: Cut) -> bool:
    """Whether there are as many samples as a rule says, wherever it says so."""
    outputs = zip(site.outputs, cut.outputs, strict=True)
    read = ((site.inputs[i], axis) for i, axis in cut.inputs.items())
    return bool(cut.inputs) and all(
        axis.fits(layout, site.batch)
        for layout, axis in (*read, *outputs)
        if axis is not None
    )


def _pointwise(site: Site) -> Cut | None:
    """Element by element; sizes are matched from the last axis on."""
    given = [*site.args, *site.kwargs.values()]
    direct = {leaf.index for leaf in given if isinstance(leaf, Operand)}
    if direct != set(range(len(site.inputs))):
        return None
    rank = len(site.outputs[0].shape)
    shapes = [layout.shape for layout in site.inputs]
    known = zip(shapes, site.axes, strict=True)
    axis = next(
        (Axis(rank - len(s) + a.index, a.each) for s, a in known if a is not None), None
    )
    if axis is None:
        return None
    inputs = {}
    for i, shape in enumerate(shapes):
        index = axis.index - (rank - len(shape))
        if index >= 0 and shape[index] != 1:
            inputs[i] = Axis(index, axis.each)
    return Cut(inputs, (axis,) * len(site.outputs))


def _samples(*positions: int, sums: Sequence[int] = (), **more: Any) -> Rule:
    """Tensors at some positions, all with samples along the first's axis 0.

    Args:
        positions: Of arguments with samples.
        sums: Places of results that are sums over the samples.
        more: What else a cut has.
    """

    def rule(site: Site) -> Cut | None:
        axis = site.axis(positions[0])
        if axis is None or axis.index != 0:
            return None
        outputs = tuple(None if path in sums else axis for path in site.results)
        return Cut(site.at(dict.fromkeys(positions, axis)), outputs, **more)

    return rule


def _reduced(linear: bool, averaged: bool = False) -> Rule:
    """Reduced over some axes; over the batch's only what sums up."""

    def rule(site: Site) -> Cut | None:
        axis, rank = site.axis(0), len(site.shape(0))
        if axis is None:
            return None
        asked = site.arg(1, site.kwargs.get("dim"))
        several = asked if isinstance(asked, Sequence) else (asked,)
        gone = {d % rank for d in several if d is not None} or set(range(rank))
        read = site.at({0: axis})
        if axis.index in gone:
            nowhere = (None,) * len(site.outputs)
            return Cut(read, nowhere, averaged=averaged) if linear else None
        kept = len(site.outputs[0].shape) == rank
        before = 0 if kept else sum(d < axis.index for d in gone)
        found = Axis(axis.index - before, axis.each)
        return Cut(read, (found,) * len(site.outputs))

    return rule


def _softmax(*positions: int) -> Rule:
    """Along an axis, which is the argument behind the tensors."""

    def rule(site: Site) -> Cut | None:
        axis = site.axis(positions[0])
        if axis is None:
            return None
        if site.args[len(positions)] % len(site.shape(0)) == axis.index:
            return None
        return Cut(site.at(dict.fromkeys(positions, axis)), (axis,))

    return rule


def _product(first: int, added: bool) -> Rule:
    """A product of matrices, of rows or summed over them."""

    def rule(site: Site) -> Cut | None:
        a, b = site.axis(first), site.axis(first + 1)
        if a is not None and a.index == 0:
            inputs = {first: a}
            if added and len(site.shape(0)) == 2 and site.shape(0)[0] != 1:
                inputs[0] = a
            return Cut(site.at(inputs), (a,))
        each = a.each if a is not None else b.each if b is not None else 0
        summed = (a is not None and a.index == 1) or (b is not None and b.index == 0)
        if not summed or added:
            return None
        both = {first: Axis(1, each), first + 1: Axis(0, each)}
        return Cut(site.at(both), (None,))

    return rule


def _layer_norm(*positions: int, sizes: int) -> Rule:
    """Normalised over the last axes; gradients of parameters are sums."""

    def rule(site: Site) -> Cut | None:
        axis = site.axis(positions[0])
        trailing = len(site.args[sizes])
        if axis is None or axis.index >= len(site.shape(positions[0])) - trailing:
            return None
        backward = len(positions) > 1
        outputs = tuple(None if backward and path else axis for path in site.results)
        return Cut(site.at(dict.fromkeys(positions, axis)), outputs)

    return rule


def _embedding(site: Site) -> Cut | None:
    axis = site.axis(1)
    return None if axis is None else Cut(site.at({1: axis}), (axis,))


def _embedding_backward(site: Site) -> Cut | None:
    axis = site.axis(0) or site.axis(1)
    by_frequency = site.arg(4, False)
    if axis is None or by_frequency or axis.index >= len(site.shape(1)):
        return None
    return Cut(site.at({0: axis, 1: axis}), (None,))


def _attention(backward: bool) -> Rule:
    """Samples on the first axis; no mask but one that is every sample's."""

    def rule(site: Site) -> Cut | None:
        count = 6 if backward else 3
        axis = site.axis(1 if backward else 0) or site.axis(0)
        dropped, mask = site.arg(count, 0.0), site.kwargs.get("attn_mask")
        if axis is None or axis.index != 0 or dropped:
            return None
        read = site.at(dict.fromkeys(range(count), axis))
        if isinstance(mask, Operand):
            sizes = site.inputs[mask.index].shape
            if len(sizes) == 4 and sizes[0] != 1:
                read[mask.index] = axis
        return Cut(read, (axis,) * len(site.outputs))

    return rule


_COUPLED = frozenset(
    {
        "aten._native_batch_norm_legit_functional.default",
        "aten.native_batch_norm.default",
        "aten.native_batch_norm_backward.default",
    }
)
"""Operations whose first result has the batch, and which see all of it."""

_POOLS = {
    f"aten.{name}.default": _samples(0)
    for name in (
        *("avg_pool1d", "avg_pool2d", "avg_pool3d"),
        *("max_pool2d_with_indices", "max_pool3d_with_indices"),
        *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
        *("adaptive_max_pool2d", "adaptive_max_pool3d"),
    )
} | {
    "aten.avg_pool2d_backward.default": _samples(0, 1),
    "aten.avg_pool3d_backward.default": _samples(0, 1),
    "aten._adaptive_avg_pool2d_backward.default": _samples(0, 1),
    "aten._adaptive_avg_pool3d_backward.default": _samples(0, 1),
    "aten.adaptive_max_pool2d_backward.default": _samples(0, 1, 2),
    "aten.max_pool2d_with_indices_backward.default": _samples(0, 1, 7),
}

_RESIZED = {
    name: rule
    for kind, at in (("nearest2d", 2), ("bilinear2d", 2), ("bicubic2d", 2))
    for name, rule in (
        (f"aten.upsample_{kind}.default", _samples(0)),
        (f"aten.upsample_{kind}.vec", _samples(0)),
        (f"aten.upsample_{kind}_backward.default", _samples(0, shaped=(at,))),
    )
}

_REDUCED: dict[str, Rule] = {
    "aten.sum.default": _reduced(linear=True),
    "aten.sum.dim_IntList": _reduced(linear=True),
    "aten.mean.default": _reduced(linear=True, averaged=True),
    "aten.mean.dim": _reduced(linear=True, averaged=True),
} | {
    f"aten.{name}": _reduced(linear=False)
    for name in (
        *("amax.default", "amin.default", "argmax.default", "argmin.default"),
        *("max.dim", "min.dim", "var.correction", "logsumexp.default"),
        *("var_mean.correction", "prod.dim_int", "any.dim", "all.dim"),
    )
}

_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"

UNDRAWN = frozenset({f"{_FLASH}.default", f"{_FLASH}_backward.default"})
"""Operations that draw no random numbers where their rule cuts them."""

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **SHAPES,
        **LOSSES,
        **_POOLS,
        **_RESIZED,
        **_REDUCED,
        "aten._softmax.default": _softmax(0),
        "aten._log_softmax.default": _softmax(0),
        "aten._softmax_backward_data.default": _softmax(0, 1),
        "aten._log_softmax_backward_data.default": _softmax(0, 1),
        "aten.mm.default": _product(0, added=False),
        "aten.addmm.default": _product(1, added=True),
        "aten.bmm.default": _samples(0, 1),
        "aten.convolution.default": _samples(0),
        "aten.convolution_backward.default": _samples(0, 1, sums=(1, 2)),
        "aten.native_layer_norm.default": _layer_norm(0, sizes=1),
        "aten.native_layer_norm_backward.default": _layer_norm(0, 1, 3, 4, sizes=2),
        "aten.native_group_norm.default": _samples(0, counted=(3,)),
        "aten.native_group_norm_backward.default": _samples(
            *(0, 1, 2, 3), sums=(1, 2), counted=(5,)
        ),
        "aten.embedding.default": _embedding,
        "aten.embedding_dense_backward.default": _embedding_backward,
        f"{_FLASH}.default": _attention(backward=False),
        f"{_FLASH}_backward.default": _attention(backward=True),
    }
)
"""Operation -> its rule; what is computed element by element needs none."""
