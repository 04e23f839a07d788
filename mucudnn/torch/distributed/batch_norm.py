"""Batch norm over the samples of all ranks, with unequal shares.

It computes the function of one device. PyTorch's `SyncBatchNorm` takes CUDA tensors
only and gives every rank's gradient the same weight. Here the moments are those of all
samples, and gradients that cross ranks have the weights that the parameters' gradients
get afterwards. With G = n_i dL_i/dy on rank i, and M values per channel,

    n_j dL/dx = w r (G - sum(G) / M - x^ sum(G x^) / M)      sums over all ranks
"""

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from mucudnn.torch.distributed.collectives import SampleWeights, begin_sum


def has_batch_norm(model: torch.nn.Module) -> bool:
    """Return whether a model has batch norms."""
    return any(isinstance(m, _BatchNorm) for m in model.modules())


def synchronise(model: torch.nn.Module, weights: SampleWeights) -> torch.nn.Module:
    """Replace a model's batch norms by synchronised ones with the same parameters."""
    if isinstance(model, _BatchNorm):
        return SynchronisedBatchNorm(model, weights)
    for name, child in model.named_children():
        setattr(model, name, synchronise(child, weights))
    return model


class SynchronisedBatchNorm(_BatchNorm):  # type: ignore[misc]
    """Batch norm by the moments of all ranks in training; shares a layer's tensors."""

    def __init__(self, layer: _BatchNorm, weights: SampleWeights) -> None:
        super().__init__(
            layer.num_features,
            layer.eps,
            layer.momentum,
            affine=False,
            track_running_stats=False,
        )
        self._weights = weights
        self.affine = layer.affine
        self.track_running_stats = layer.track_running_stats
        self.training = layer.training
        for name, parameter in layer.named_parameters(recurse=False):
            setattr(self, name, parameter)
        for name, buffer in layer.named_buffers(recurse=False):
            self.register_buffer(name, buffer)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise; in training all ranks call it together."""
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        y, mean, variance, count = _Normalise.apply(
            input, self.weight, self.bias, self.eps, self._weights
        )
        if self.track_running_stats:
            self.num_batches_tracked.add_(1)
            share = self.momentum
            if share is None:
                share = 1.0 / float(self.num_batches_tracked)
            unbiased = variance * (count / (count - 1))
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        return y

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"batch norm takes (N, C, ...), got {input.ndim} axes")


class _Normalise(torch.autograd.Function):  # type: ignore[misc]
    """Normalization by the moments of all ranks; returns the moments as well."""

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
        # One collective sums everything: the values and their count.
        total = _summed(torch.cat([wide.sum(axes), count]), weights)
        count = total[-1]
        mean = total[:-1] / count
        # Squares of deviations, as E[x²] - E[x]² would cancel.
        centred = wide - _spread(mean, x)
        variance = _summed((centred * centred).sum(axes), weights) / count
        scale = torch.rsqrt(variance + eps)
        normal = centred.mul_(_spread(scale, x))
        if weight is None or bias is None:
            # A copy: `normal` is saved, and the result may be overwritten.
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
    """Return one value per channel in a shape that broadcasts over `like`."""
    return values.view(1, -1, *[1] * (like.ndim - 2))
