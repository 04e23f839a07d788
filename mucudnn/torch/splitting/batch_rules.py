"""Rules that cut PyTorch's operations along the batch.

A rule tells what a slice of a call reads and writes. It holds for whatever axis is the
split axis, so strips use these rules as well. Operations without a rule stay whole;
pointwise operations share one rule and are found by their tag.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.torch.lowering.lowered import Call, Operand
from mucudnn.torch.splitting.axes import Axis, Cut, Rule, Site

# Operations that only rearrange elements: the split axis moves to another index.


def along(
    index_of: Callable[[Site, int], int | None],
    *positions: int,
    sums: Sequence[int | None] = (),
    **more: Any,
) -> Rule:
    """Return the rule of an operation whose results have the split axis of arguments.

    Args:
        index_of: Takes the call and the index of the axis, and returns its index in
            every result; None if the call works along the split axis.
        positions: Arguments that have the axis.
        sums: Results that are sums over the rows.
        more: Further fields of `Cut`.
    """

    def rule(site: Site) -> Cut | None:
        axis = site.axis(positions[0])
        index = None if axis is None else index_of(site, axis.index)
        if axis is None or index is None:
            return None
        moved = Axis(index, axis.each)
        outputs = tuple(None if path in sums else moved for path in site.results)
        return Cut(site.at(dict.fromkeys(positions, axis)), outputs, **more)

    return rule


_samples = partial(along, lambda site, axis: None if axis else 0)
"""Returns the rule of an operation on samples along axis 0; see `along`."""


def _same(site: Site, axis: int) -> int:
    return axis


def _permuted(site: Site, axis: int) -> int:
    rank = len(site.shape(0))
    return [int(d) % rank for d in site.args[1]].index(axis)


def _transposed(site: Site, axis: int) -> int:
    first, second = _dim(site, 1), int(site.arg(2, 1)) % len(site.shape(0))
    return {first: second, second: first}.get(axis, axis)


def _matrix_transposed(site: Site, axis: int) -> int:
    return 1 - axis if len(site.shape(0)) == 2 else axis


def _unsqueezed(site: Site, axis: int) -> int:
    new = int(site.args[1]) % (len(site.shape(0)) + 1)
    return axis + (new <= axis)


def _squeezed(site: Site, axis: int) -> int | None:
    # A slice of one sample would lose the split axis.
    sizes, given = site.shape(0), site.arg(1)
    several = given if isinstance(given, Sequence) else (given,)
    named = {int(d) % len(sizes) for d in several}
    if axis in named:
        return None
    return axis - sum(d < axis and sizes[d] == 1 for d in named)


def _expanded(site: Site, axis: int) -> int:
    return axis + len(site.outputs[0].shape) - len(site.shape(0))


def _selected(site: Site, axis: int) -> int | None:
    d = _dim(site, 1)
    return None if d == axis else axis - (d < axis)


def _select_gradient(site: Site, axis: int) -> int:
    d = int(site.arg(2, 0)) % len(site.outputs[0].shape)
    return axis + (d <= axis)


def _unless_along(position: int) -> Callable[[Site, int], int | None]:
    """Keep the index, unless the call works along the split axis itself."""
    return lambda site, axis: None if _dim(site, position) == axis else axis


def _before_last(position: int, each: int = 1) -> Callable[[Site, int], int | None]:
    """Keep the index, unless it is one of the last axes, which an argument lists.

    The argument has `each` numbers for every axis.
    """

    def index_of(site: Site, axis: int) -> int | None:
        listed = len(site.args[position]) // each
        return axis if axis < len(site.shape(0)) - listed else None

    return index_of


def _dim(site: Site, position: int) -> int:
    """Return the axis of the first argument that another argument names."""
    return int(site.arg(position, 0)) % len(site.shape(0))


def _view(site: Site) -> Cut | None:
    """Cut a view if the axes before the split axis have as many elements as before."""
    axis = site.axis(0)
    if axis is None:
        return None
    before = math.prod(site.shape(0)[: axis.index])
    sizes = site.outputs[0].shape
    for index, size in enumerate(sizes):
        if math.prod(sizes[:index]) == before and size and size % site.batch == 0:
            found = Axis(index, size // site.batch)
            return Cut(site.at({0: axis}), (found,), shaped=(1,))
    return None


def _joined(site: Site, new: int) -> Cut | None:
    """Cut a concatenation along another axis; `new` if it adds that axis."""
    tensors = site.args[0]
    if not all(isinstance(tensor, Operand) for tensor in tensors):
        return None
    found = [site.axes[tensor.index] for tensor in tensors]
    axis = next((a for a in found if a is not None), None)
    if axis is None:
        return None
    d = site.arg(1, 0) % len(site.outputs[0].shape)
    if not new and d == axis.index:
        return None
    moved = Axis(axis.index + (new and d <= axis.index), axis.each)
    return Cut({tensor.index: axis for tensor in tensors}, (moved,))


def _gather(site: Site) -> Cut | None:
    axis = site.axis(0) or site.axis(2)
    if axis is None or _dim(site, 1) == axis.index:
        return None
    if site.shape(0)[axis.index] != site.shape(2)[axis.index]:
        return None
    return Cut(site.at({0: axis, 2: axis}), (axis,))


# Losses: means over the batch divide by the count of the whole batch.


NONE, MEAN, SUM = 0, 1, 2
"""PyTorch's codes of a loss's reduction."""


def _pair(reduction: int, *more: int, backward: bool = False) -> Rule:
    """Return the rule of a pointwise loss of two tensors, or of its gradient.

    Args:
        reduction: Position of the argument `reduction`.
        more: Positions of further tensors of the same shape.
        backward: Whether the tensors come behind the gradient of the loss.
    """
    first = int(backward)

    def rule(site: Site) -> Cut | None:
        axis = site.axis(first) or site.axis(first + 1)
        how = site.arg(reduction, MEAN)
        # A gradient of a loss with a reduction is a scalar, and has no samples.
        gradient = (0,) if backward and how == NONE else ()
        tensors = (*gradient, first, first + 1, *more)
        given = [p for p in tensors if site.operand(p) is not None]
        if axis is None or len({site.shape(p) for p in given}) != 1:
            return None
        output = axis if backward or how == NONE else None
        return Cut(site.at(dict.fromkeys(given, axis)), (output,), averaged=how == MEAN)

    return rule


def _classes(site: Site, scores: int, labels: int) -> tuple[Axis, Axis] | None:
    """Return the split axis of scores, (N, classes, ...), and of labels, (N, ...)."""
    axis, of_labels = site.axis(scores), site.axis(labels)
    if axis is None and of_labels is not None:
        behind = of_labels.index > 0
        axis = Axis(of_labels.index + behind, of_labels.each)
    if axis is None or axis.index == 1:
        return None
    return axis, Axis(max(0, axis.index - 1), axis.each)


def _nll(site: Site) -> Cut | None:
    """Cut a loss of classes; `prepare` rewrites means, which need the batch's count."""
    found = _classes(site, 0, 1)
    how = site.arg(3, MEAN)
    if found is None or how == MEAN:
        return None
    scores, labels = found
    output = labels if how == NONE else None
    paths = [output if path == 0 else None for path in site.results]
    return Cut(site.at({0: scores, 1: labels}), tuple(paths))


def _nll_backward(site: Site) -> Cut | None:
    found = _classes(site, 1, 2)
    if found is None:
        return None
    scores, labels = found
    read = {1: scores, 2: labels}
    if site.arg(4, MEAN) == NONE:
        read[0] = labels
    return Cut(site.at(read), (scores,))


COUNTED_LOSSES = frozenset(
    {"aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"}
)
"""Losses whose mean divides by a count over the whole batch."""


def cut_of(site: Site, call: Call) -> Cut | None:
    """Return how a call is cut; None if it stays whole."""
    if call.random and site.op not in UNDRAWN:
        return None
    rule = RULES.get(site.op)
    if rule is None and torch.Tag.pointwise in getattr(call.function, "tags", ()):
        rule = _pointwise
    cut = None if rule is None else rule(site)
    return cut if cut is not None and _fits(site, cut) else None


def carried(site: Site, call: Call) -> tuple[Axis | None, ...]:
    """Return the split axes of the results of a call that stays whole."""
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
    """Return whether all operands and results have the expected number of rows."""
    outputs = zip(site.outputs, cut.outputs, strict=True)
    read = ((site.inputs[i], axis) for i, axis in cut.inputs.items())
    return bool(cut.inputs) and all(
        axis.fits(layout, site.batch)
        for layout, axis in (*read, *outputs)
        if axis is not None
    )


def _pointwise(site: Site) -> Cut | None:
    """Cut a pointwise operation; shapes broadcast from the last axis on."""
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
        # An operand without the axis, or with one row, is broadcast: read as a whole.
        if index >= 0 and shape[index] != 1:
            inputs[i] = Axis(index, axis.each)
    return Cut(inputs, (axis,) * len(site.outputs))


def _reduced(linear: bool, averaged: bool = False) -> Rule:
    """Return the rule of a reduction; only `linear` ones reduce the split axis."""

    def rule(site: Site) -> Cut | None:
        axis, rank = site.axis(0), len(site.shape(0))
        if axis is None:
            return None
        dim = site.arg(1, site.kwargs.get("dim"))
        several = dim if isinstance(dim, Sequence) else (dim,)
        # Without dimensions all of them are reduced.
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


def _product(first: int, added: bool) -> Rule:
    """Return the rule of a matrix product, of rows or summed over rows."""

    def rule(site: Site) -> Cut | None:
        a, b = site.axis(first), site.axis(first + 1)
        # Rows of the first operand give rows of the result.
        if a is not None and a.index == 0:
            inputs = {first: a}
            if added and len(site.shape(0)) == 2 and site.shape(0)[0] != 1:
                inputs[0] = a
            return Cut(site.at(inputs), (a,))
        # Summed over the samples, as in a weight's gradient, slices add up.
        each = a.each if a is not None else b.each if b is not None else 0
        summed = (a is not None and a.index == 1) or (b is not None and b.index == 0)
        if not summed or added:
            return None
        both = {first: Axis(1, each), first + 1: Axis(0, each)}
        return Cut(site.at(both), (None,))

    return rule


def _embedding_backward(site: Site) -> Cut | None:
    axis = site.axis(0) or site.axis(1)
    if axis is None or site.arg(4, False) or axis.index >= len(site.shape(1)):
        return None
    return Cut(site.at({0: axis, 1: axis}), (None,))


def _attention(backward: bool) -> Rule:
    """Return the rule of attention without dropout, with samples along axis 0."""

    def rule(site: Site) -> Cut | None:
        count = 6 if backward else 3
        axis = site.axis(1 if backward else 0) or site.axis(0)
        dropped, mask = site.arg(count, 0.0), site.kwargs.get("attn_mask")
        if axis is None or axis.index != 0 or dropped:
            return None
        read = site.at(dict.fromkeys(range(count), axis))
        # A mask with one sample, or without an axis of samples, is read as a whole.
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
"""Operations on all samples at once, whose first result has the split axis."""

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
    for kind in ("nearest2d", "bilinear2d", "bicubic2d")
    for name, rule in (
        (f"aten.upsample_{kind}.default", _samples(0)),
        (f"aten.upsample_{kind}.vec", _samples(0)),
        (f"aten.upsample_{kind}_backward.default", _samples(0, shaped=(2,))),
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
"""Random operations that draw no numbers in the cases that their rule cuts."""

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten.clone.default": along(_same, 0),
        "aten._to_copy.default": along(_same, 0),
        "aten.view.default": _view,
        "aten._unsafe_view.default": _view,
        "aten.permute.default": along(_permuted, 0),
        "aten.transpose.int": along(_transposed, 0),
        "aten.t.default": along(_matrix_transposed, 0),
        "aten.unsqueeze.default": along(_unsqueezed, 0),
        "aten.squeeze.dim": along(_squeezed, 0),
        "aten.squeeze.dims": along(_squeezed, 0),
        "aten.expand.default": along(_expanded, 0, shaped=(1,)),
        "aten.select.int": along(_selected, 0),
        "aten.unbind.int": along(_selected, 0),
        "aten.slice.Tensor": along(_unless_along(1), 0),
        "aten.split.Tensor": along(_unless_along(2), 0),
        "aten.split_with_sizes.default": along(_unless_along(2), 0),
        "aten.cumsum.default": along(_unless_along(1), 0),
        "aten.cat.default": lambda site: _joined(site, 0),
        "aten.stack.default": lambda site: _joined(site, 1),
        "aten.select_backward.default": along(_select_gradient, 0, shaped=(1,)),
        "aten.slice_backward.default": along(_unless_along(2), 0, shaped=(1,)),
        "aten.constant_pad_nd.default": along(_before_last(1, each=2), 0),
        "aten.gather.default": _gather,
        **_POOLS,
        **_RESIZED,
        **_REDUCED,
        "aten.mse_loss.default": _pair(2),
        "aten.mse_loss_backward.default": _pair(3, backward=True),
        "aten.smooth_l1_loss.default": _pair(2),
        "aten.smooth_l1_loss_backward.default": _pair(3, backward=True),
        "aten.huber_loss.default": _pair(2),
        "aten.huber_loss_backward.default": _pair(3, backward=True),
        "aten.binary_cross_entropy.default": _pair(3, 2),
        "aten.binary_cross_entropy_backward.default": _pair(4, 3, backward=True),
        "aten.nll_loss_forward.default": _nll,
        "aten.nll_loss2d_forward.default": _nll,
        "aten.nll_loss_backward.default": _nll_backward,
        "aten.nll_loss2d_backward.default": _nll_backward,
        "aten._softmax.default": along(_unless_along(1), 0),
        "aten._log_softmax.default": along(_unless_along(1), 0),
        "aten._softmax_backward_data.default": along(_unless_along(2), 0, 1),
        "aten._log_softmax_backward_data.default": along(_unless_along(2), 0, 1),
        "aten.mm.default": _product(0, added=False),
        "aten.addmm.default": _product(1, added=True),
        "aten.bmm.default": _samples(0, 1),
        "aten.convolution.default": _samples(0),
        "aten.convolution_backward.default": _samples(0, 1, sums=(1, 2)),
        "aten.native_layer_norm.default": along(_before_last(1), 0),
        "aten.native_layer_norm_backward.default": along(
            _before_last(2), *(0, 1, 3, 4), sums=(1, 2)
        ),
        "aten.native_group_norm.default": _samples(0, counted=(3,)),
        "aten.native_group_norm_backward.default": _samples(
            *(0, 1, 2, 3), sums=(1, 2), counted=(5,)
        ),
        "aten.embedding.default": along(_same, 1),
        "aten.embedding_dense_backward.default": _embedding_backward,
        f"{_FLASH}.default": _attention(backward=False),
        f"{_FLASH}_backward.default": _attention(backward=True),
    }
)
"""Operation -> its rule; pointwise operations need none."""
