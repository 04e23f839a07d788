"""The Gaussian's negative log likelihood with its check in the graph.

PyTorch's function asks the variances whether one is negative, which only a run can
answer. Here the step itself asks, and raises.
"""

import math

import torch

__all__ = ["gaussian_nll"]

_REDUCTIONS = ("mean", "sum", "none")


def gaussian_nll(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """What `torch.nn.functional.gaussian_nll_loss` gives, bit for bit.

    Args:
        input: Means.
        target: What was seen.
        var: A variance for each mean, or one for all along one axis of size one or
            along the last axis, which it is without; or a number.
        full: Whether a constant is added.
        eps: What a variance is taken for that is less.
        reduction: "mean", "sum" or "none".

    Raises:
        ValueError: A number is negative, or the shape or the reduction is none of
            these. A step with a negative entry raises RuntimeError when it runs.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{reduction} is not valid; one of {list(_REDUCTIONS)} is")
    if isinstance(var, float):
        if var < 0:
            raise ValueError(f"var is {var}; a variance is not negative")
        var = torch.full_like(input, var)
    else:
        fine = torch.logical_not(torch.any(var < 0))
        torch._assert_async(fine, "var has negative entry/entries")
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    _check_shape(var, input)
    variance = var.clone()
    with torch.no_grad():
        variance.clamp_(min=eps)
    loss = 0.5 * (torch.log(variance) + (input - target) ** 2 / variance)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def _check_shape(var: torch.Tensor, mean: torch.Tensor) -> None:
    other = [v for v, m in zip(var.shape, mean.shape, strict=False) if v != m]
    if var.dim() != mean.dim() or other not in ([], [1]):
        raise ValueError(
            f"var is of incorrect size {tuple(var.shape)} for means of "
            f"{tuple(mean.shape)}"
        )
