"""Losses by slices: what is averaged over the batch is so by the whole's count."""

from collections.abc import Mapping
from types import MappingProxyType

from mucudnn.torch.splitting.axes import Axis, Cut, Rule, Site

__all__ = ["LOSSES", "MEAN", "SUM", "nll_counted"]

NONE, MEAN, SUM = 0, 1, 2
"""PyTorch's numbers of how a loss is reduced."""


def _pair(reduction: int, *more: int) -> Rule:
    """A loss of two tensors, element by element.

    Args:
        reduction: Position of the argument that says how it is reduced.
        more: Positions of further tensors of the same sizes.
    """

    def rule(site: Site) -> Cut | None:
        axis = site.axis(0) or site.axis(1)
        read = _alike(site, (0, 1, *more), axis)
        how = site.arg(reduction, MEAN)
        if axis is None or read is None:
            return None
        output = axis if how == NONE else None
        return Cut(read, (output,), averaged=how == MEAN)

    return rule


def _pair_backward(reduction: int, *more: int) -> Rule:
    """Its gradient, of which the first argument is that of the loss."""

    def rule(site: Site) -> Cut | None:
        axis = site.axis(1) or site.axis(2)
        how = site.arg(reduction, MEAN)
        tensors = (0, 1, 2, *more) if how == NONE else (1, 2, *more)
        read = _alike(site, tensors, axis)
        if axis is None or read is None:
            return None
        return Cut(read, (axis,), averaged=how == MEAN)

    return rule


def _alike(
    site: Site, positions: tuple[int, ...], axis: Axis | None
) -> dict[int, Axis] | None:
    """Tensors of one shape, those that are given; None if one has another."""
    if axis is None:
        return None
    given = [p for p in positions if site.operand(p) is not None]
    if len({site.shape(p) for p in given}) != 1:
        return None
    return site.at(dict.fromkeys(given, axis))


def _classes(site: Site, scores: int, labels: int) -> tuple[Axis, Axis] | None:
    """Where the batch, or the height, is in scores of classes and in their labels."""
    axis, of_labels = site.axis(scores), site.axis(labels)
    if axis is None and of_labels is not None:
        behind = of_labels.index > 0
        axis = Axis(of_labels.index + behind, of_labels.each)
    if axis is None or axis.index == 1:
        return None
    return axis, Axis(max(0, axis.index - 1), axis.each)


def _nll(site: Site) -> Cut | None:
    """Of classes; a mean needs the whole batch's count and is taken apart before."""
    found = _classes(site, 0, 1)
    how = site.arg(3, MEAN)
    if found is None or how == MEAN:
        return None
    scores, labels = found
    output = labels if how == NONE else None
    paths = [output if path == 0 else None for path in site.results]
    return Cut(site.at({0: scores, 1: labels}), tuple(paths))


def _nll_backward(site: Site) -> Cut | None:
    """It divides by the count that it is given."""
    found = _classes(site, 1, 2)
    if found is None:
        return None
    scores, labels = found
    read = {1: scores, 2: labels}
    if site.arg(4, MEAN) == NONE:
        read[0] = labels
    return Cut(site.at(read), (scores,))


nll_counted = frozenset(
    {"aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"}
)
"""Losses that divide by a count of the whole batch."""

LOSSES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten.mse_loss.default": _pair(2),
        "aten.mse_loss_backward.default": _pair_backward(3),
        "aten.smooth_l1_loss.default": _pair(2),
        "aten.smooth_l1_loss_backward.default": _pair_backward(3),
        "aten.huber_loss.default": _pair(2),
        "aten.huber_loss_backward.default": _pair_backward(3),
        "aten.binary_cross_entropy.default": _pair(3, 2),
        "aten.binary_cross_entropy_backward.default": _pair_backward(4, 3),
        "aten.nll_loss_forward.default": _nll,
        "aten.nll_loss2d_forward.default": _nll,
        "aten.nll_loss_backward.default": _nll_backward,
        "aten.nll_loss2d_backward.default": _nll_backward,
    }
)
"""Operation -> its rule."""
