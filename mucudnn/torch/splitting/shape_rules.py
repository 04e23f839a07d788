"""Where the batch goes in operations that move and join elements."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mucudnn.torch.lowering.lowered import Operand
from mucudnn.torch.splitting.axes import Axis, Cut, Rule, Site

__all__ = ["SHAPES"]


def _moved(site: Site, index: int, *, shaped: tuple[int, ...] = ()) -> Cut | None:
    """The first argument's samples along another axis of every result."""
    axis = site.axis(0)
    if axis is None:
        return None
    outputs = (Axis(index, axis.each),) * len(site.outputs)
    return Cut(site.at({0: axis}), outputs, shaped)


def _same(site: Site) -> Cut | None:
    axis = site.axis(0)
    return None if axis is None else _moved(site, axis.index)


def _view(site: Site) -> Cut | None:
    """Other sizes of the same elements: what is before the batch must be as much."""
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


def _permute(site: Site) -> Cut | None:
    axis, rank = site.axis(0), len(site.shape(0))
    if axis is None:
        return None
    return _moved(site, [d % rank for d in site.args[1]].index(axis.index))


def _transpose(site: Site) -> Cut | None:
    axis, rank = site.axis(0), len(site.shape(0))
    if axis is None:
        return None
    first, second = site.arg(1, 0) % rank, site.arg(2, 1) % rank
    return _moved(site, {first: second, second: first}.get(axis.index, axis.index))


def _t(site: Site) -> Cut | None:
    axis = site.axis(0)
    if axis is None:
        return None
    return _moved(site, 1 - axis.index if len(site.shape(0)) == 2 else axis.index)


def _unsqueeze(site: Site) -> Cut | None:
    axis = site.axis(0)
    if axis is None:
        return None
    new = site.args[1] % (len(site.shape(0)) + 1)
    return _moved(site, axis.index + (new <= axis.index))


def _squeeze(site: Site) -> Cut | None:
    """Of one sample it would take away the batch's axis, where that is among them."""
    axis, sizes = site.axis(0), site.shape(0)
    if axis is None:
        return None
    asked = site.arg(1)
    several = asked if isinstance(asked, Sequence) else (asked,)
    named = {d % len(sizes) for d in several}
    if axis.index in named:
        return None
    gone = {d for d in named if sizes[d] == 1}
    return _moved(site, axis.index - sum(d < axis.index for d in gone))


def _expand(site: Site) -> Cut | None:
    axis = site.axis(0)
    if axis is None:
        return None
    more = len(site.outputs[0].shape) - len(site.shape(0))
    return _moved(site, axis.index + more, shaped=(1,))


def _along(site: Site, position: int, rank: int) -> int:
    return int(site.arg(position, 0)) % rank


def _select(site: Site) -> Cut | None:
    axis = site.axis(0)
    if axis is None or (d := _along(site, 1, len(site.shape(0)))) == axis.index:
        return None
    return _moved(site, axis.index - (d < axis.index))


def _beside(position: int) -> Rule:
    """Each sample alone, unless it works along the batch itself."""

    def rule(site: Site) -> Cut | None:
        axis = site.axis(0)
        rank = len(site.shape(0))
        if axis is None or _along(site, position, rank) == axis.index:
            return None
        return _moved(site, axis.index)

    return rule


def _joined(site: Site, new: int) -> Cut | None:
    """Tensors joined along an axis that is not the batch's, new or one of theirs."""
    tensors = site.args[0]
    if not all(isinstance(tensor, Operand) for tensor in tensors):
        return None
    found = [site.axes[tensor.index] for tensor in tensors]
    axis = next((a for a in found if a is not None), None)
    if axis is None:
        return None
    d = _along(site, 1, len(site.outputs[0].shape))
    if not new and d == axis.index:
        return None
    moved = Axis(axis.index + (new and d <= axis.index), axis.each)
    return Cut({tensor.index: axis for tensor in tensors}, (moved,))


def _select_backward(site: Site) -> Cut | None:
    axis = site.axis(0)
    if axis is None:
        return None
    d = _along(site, 2, len(site.outputs[0].shape))
    return _moved(site, axis.index + (d <= axis.index), shaped=(1,))


def _slice_backward(site: Site) -> Cut | None:
    axis = site.axis(0)
    if axis is None or _along(site, 2, len(site.shape(0))) == axis.index:
        return None
    return _moved(site, axis.index, shaped=(1,))


def _pad(site: Site) -> Cut | None:
    axis = site.axis(0)
    if axis is None or axis.index >= len(site.shape(0)) - len(site.args[1]) // 2:
        return None
    return _moved(site, axis.index)


def _gather(site: Site) -> Cut | None:
    axis = site.axis(0) or site.axis(2)
    if axis is None or _along(site, 1, len(site.shape(0))) == axis.index:
        return None
    if site.shape(0)[axis.index] != site.shape(2)[axis.index]:
        return None
    return Cut(site.at({0: axis, 2: axis}), (axis,))


SHAPES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten.clone.default": _same,
        "aten._to_copy.default": _same,
        "aten.view.default": _view,
        "aten._unsafe_view.default": _view,
        "aten.permute.default": _permute,
        "aten.transpose.int": _transpose,
        "aten.t.default": _t,
        "aten.unsqueeze.default": _unsqueeze,
        "aten.squeeze.dim": _squeeze,
        "aten.squeeze.dims": _squeeze,
        "aten.expand.default": _expand,
        "aten.select.int": _select,
        "aten.unbind.int": _select,
        "aten.slice.Tensor": _beside(1),
        "aten.split.Tensor": _beside(2),
        "aten.split_with_sizes.default": _beside(2),
        "aten.cumsum.default": _beside(1),
        "aten.cat.default": lambda site: _joined(site, 0),
        "aten.stack.default": lambda site: _joined(site, 1),
        "aten.select_backward.default": _select_backward,
        "aten.slice_backward.default": _slice_backward,
        "aten.constant_pad_nd.default": _pad,
        "aten.gather.default": _gather,
    }
)
"""Operation -> its rule."""
