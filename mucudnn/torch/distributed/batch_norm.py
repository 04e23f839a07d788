"""Batch norm over all ranks, whatever each one's share: the function of one device.

PyTorch's own takes CUDA tensors only and weighs every rank's gradient the same. Here
the moments are those of all samples, and gradients that cross ranks are weighted as the
parameters' are afterwards. With G = n_i dL_i/dy on rank i, of M values a channel,

    n_j dL/dx = w r (G - sum(G) / M - x^ sum(G x^) / M)      sums over all ranks
"""

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from mucudnn.torch.distributed.collectives import SampleWeights, begin_sum


def has_batch_norm(model: torch.nn.Module) -> bool:
    """Whether any of its layers normalises by a mini-batch."""
    return any(isinstance(m, _BatchNorm) for m in model.modules())


def synchronise(model: torch.nn.Module, weights: SampleWeights) -> torch.nn.Module:
    """The model with its batch norms over all ranks; parameters stay the tensors."""
    if isinstance(model, _BatchNorm):
        return _converted(model, weights)
    for name, child in model.named_children():
        setattr(model, name, synchronise(child, weights))
    return model


def _converted(layer: _BatchNorm, weights: SampleWeights) -> "SynchronisedBatchNorm":
    made = SynchronisedBatchNorm(
        layer.num_features,
        weights,
        eps=layer.eps,
        momentum=layer.momentum,
        affine=False,
        track_running_stats=False,
    )
    made.affine, made.track_running_stats = layer.affine, layer.track_running_stats
    made.training = layer.training
    for name, parameter in layer.named_parameters(recurse=False):
        setattr(made, name, parameter)
    for name, buffer in layer.named_buffers(recurse=False):
        made.register_buffer(name, buffer)
    return made


class SynchronisedBatchNorm(_BatchNorm):  # type: ignore[misc]
    """Batch norm by the moments of all ranks while it is trained.

    Args:
        num_features: Channels.
        weights: How much each rank's gradients count.
        eps: As of PyTorch's.
        momentum: As of PyTorch's.
        affine: As of PyTorch's.
        track_running_stats: As of PyTorch's.
    """

    def __init__(
        self,
        num_features: int,
        weights: SampleWeights,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._weights = weights

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise; all ranks call it together while it is trained."""
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        y, mean, variance, count = _Normalise.apply(
            input, self.weight, self.bias, self.eps, self._weights
        )
        if self.track_running_stats:
            self._track(mean, variance * (count / (count - 1)))
        return y

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"batch norm takes (N, C, ...), got {input.ndim} axes")

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _Normalise(torch.autograd.Function):  # type: ignore[misc]
    """Values by the moments of all ranks, and those moments."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        weights: SampleWeights,
    ) -> tuple[torch.Tensor, ...]:
        axes = [axis for axis in range(x.ndim) if axis != 1]
        wide = x if x.dtype == torch.float64 else x.float()
        count = wide.new_tensor([x.numel() // x.shape[1]])
        total = _summed(torch.cat([wide.sum(axes), count]), weights)
        count = total[-1]
        mean = total[:-1] / count
        centred = wide - _spread(mean, x)
        variance = _summed((centred * centred).sum(axes), weights) / count
        scale = torch.rsqrt(variance + eps)
        normal = centred.mul_(_spread(scale, x))
        if weight is None or bias is None:
            y = normal.clone()
        else:
            y = normal * _spread(weight.to(wide.dtype), x)
            y += _spread(bias.to(wide.dtype), x)
        ctx.save_for_backward(normal, scale, weight, count)
        ctx.weights, ctx.own, ctx.dtype = weights, weights.current, x.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        normal, scale, weight, count = ctx.saved_tensors
        axes = [axis for axis in range(dy.ndim) if axis != 1]
        wide = dy.to(normal.dtype)
        sums = torch.stack([wide.sum(axes), (wide * normal).sum(axes)])
        both = _summed(sums * ctx.own, ctx.weights) / (ctx.own * count)
        dx = wide - _spread(both[0], dy) - normal * _spread(both[1], dy)
        scale = scale if weight is None else scale * weight.to(scale.dtype)
        dx = dx.mul_(_spread(scale, dy)).to(ctx.dtype)
        if weight is None:
            return dx, None, None, None, None
        dbias, dweight = sums.to(weight.dtype)
        return dx, dweight, dbias, None, None


def _summed(values: torch.Tensor, weights: SampleWeights) -> torch.Tensor:
    with weights.clock.waiting():
        begin_sum(values, weights.group).wait()
    return values


def _spread(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One value a channel, to be used with every value of it."""
    return values.view(1, -1, *[1] * (like.ndim - 2))
