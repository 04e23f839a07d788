"""Batch normalisation in parts: what a strip adds to statistics, and what it is given.

Statistics of strips are merged (Chan, Golub and LeVeque, 1979); each strip is then
normalised by those of all. Gradients of parameters are sums over strips, and a strip's
own gradient follows from them. Kernels are PyTorch's for given statistics.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.torch.splitting.axes import Cut, Rule, Site

__all__ = [
    "APPLY",
    "GRAD_APPLY",
    "GRAD_SUMS",
    "MERGE",
    "NORMS",
    "SUMS",
    "grad_applied",
    "grad_sums",
    "merged",
    "normalised",
    "sums",
]

SUMS = "batch_norm:sums"
MERGE = "batch_norm:merge"
APPLY = "batch_norm:apply"
GRAD_SUMS = "batch_norm:grad_sums"
GRAD_APPLY = "batch_norm:grad_apply"


def sums(x: torch.Tensor) -> torch.Tensor:
    """Of each channel the mean, the squares beside it, and how many there are."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    variance, mean = torch.var_mean(x, axes, correction=0)
    count = x.numel() // x.shape[1]
    return torch.stack([mean, variance.mul_(count), torch.full_like(mean, count)])


def merged(
    momentum: float,
    eps: float,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    parts: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """Statistics of all parts together.

    Returns:
        The mean, one over the deviation, the variance, and both running statistics.
    """
    means, squares, counts = torch.stack(list(parts)).unbind(1)
    count = counts.sum(0)
    mean = (means * counts).sum(0).div_(count)
    beside = (means - mean).square_().mul_(counts).add_(squares).sum(0)
    variance = beside / count
    inverse = (variance + eps).rsqrt_()
    if running_mean is None or running_var is None:
        return mean, inverse, variance, None, None
    ran = (
        running_mean.lerp(mean, momentum),
        running_var.lerp(beside / (count - 1), momentum),
    )
    return mean, inverse, variance, *ran


def normalised(
    eps: float,
    x: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """A strip, by the statistics of all."""
    found: torch.Tensor = torch.ops.aten._native_batch_norm_legit_no_training(
        x, weight, bias, mean, variance, 0.0, eps
    )[0]
    return found


def grad_sums(
    eps: float,
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a strip adds to the gradients of weights and biases."""
    _, weight, bias = torch.ops.aten.native_batch_norm_backward(
        *(gradient, x, None, mean, variance, None, None, False, eps),
        [False, True, True],
    )
    return weight, bias


def grad_applied(
    count: int,
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    of_weight: torch.Tensor,
    of_bias: torch.Tensor,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of a strip, of so many elements of each channel in all."""
    sizes = [1, -1, *[1] * (x.dim() - 2)]
    slope = inverse if weight is None else inverse * weight
    along = (inverse * of_weight).div_(-count)
    offset = (slope * of_bias).div_(-count)
    found = x - mean.view(sizes)
    torch.addcmul(gradient, found, along.view(sizes), out=found)
    result: torch.Tensor = torch.addcmul(
        offset.view(sizes), found, slope.view(sizes), out=found
    )
    return result


def _by_rows(*positions: int, **more: Any) -> Rule:
    """Images at some positions, whose channels are not what is cut."""

    def rule(site: Site) -> Cut | None:
        axis = site.axis(positions[0])
        if axis is None or axis.index == 1:
            return None
        summed = more.get("gathered") or len(site.outputs[0].shape) <= axis.index
        outputs = (None if summed else axis,) * len(site.outputs)
        return Cut(site.at(dict.fromkeys(positions, axis)), outputs, **more)

    return rule


NORMS: Mapping[str, Rule] = MappingProxyType(
    {
        SUMS: _by_rows(0, gathered=True),
        APPLY: _by_rows(1),
        GRAD_SUMS: _by_rows(1, 2),
        GRAD_APPLY: _by_rows(1, 2),
    }
)
"""Operation -> how it is cut."""
