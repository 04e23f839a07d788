"""From a loss to what an optimizer is given: scaled, unscaled, clipped.

What PyTorch's scaler decides by a value is decided in tensors here: a step whose
gradients are not finite puts back what was there, bit for bit.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mucudnn.torch.capture.reads import UnsoundCaptureError
from mucudnn.torch.capture.settings import StepSettings

__all__ = ["added", "clipped", "leaf_of", "loss_of", "rescaled", "unscaled"]

Gradients = dict[str, torch.Tensor | None]


def loss_of(result: Any) -> tuple[torch.Tensor, Any]:
    """The scalar to minimise, and what the loss function gives beside it.

    Raises:
        ValueError: It is no tensor of one element that depends on parameters.
        TypeError: What is beside it has numbers.
    """
    loss, extras = result, None
    if isinstance(result, tuple) and len(result) == 2:
        loss, extras = result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else f"{type(loss).__name__}"
        )
        raise ValueError(
            f"loss_fn returned {found}; a tensor of one element is wanted, or a pair "
            "of one and whatever else is to come back"
        )
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on any parameter that is trained")
    for leaf in pytree.tree_leaves(extras):
        if not isinstance(leaf, (torch.Tensor, str, type(None))):
            raise TypeError(
                f"what comes back with the loss has a {type(leaf).__name__}, which "
                "would be the same in every step; tensors are wanted"
            )
    return loss, extras


def leaf_of(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor that stands for a parameter, with its hooks.

    Raises:
        UnsoundCaptureError: It has hooks that run when its gradient is stored.
    """
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise UnsoundCaptureError(
            "a parameter has a hook that runs when its gradient is stored "
            "(register_post_accumulate_grad_hook); gradients are not stored here: use "
            "register_hook, or a hook of the optimizer"
        )
    leaf = tensor.detach().requires_grad_(parameter.requires_grad)
    vars(leaf).update(vars(parameter))  # attributes that a user has given it
    hooks = parameter._backward_hooks if parameter.requires_grad else None
    for hook in (hooks or {}).values():
        leaf.register_hook(hook)
    return leaf


def unscaled(
    gradients: Gradients, scale: torch.Tensor
) -> tuple[Gradients, torch.Tensor]:
    """Gradients of the loss itself, and whether some entry was not finite."""
    inverse = scale.double().reciprocal().float()
    found = torch.zeros((), dtype=torch.bool)
    true: Gradients = {}
    for name, gradient in gradients.items():
        true[name] = None
        if gradient is not None:
            found = found | ~torch.isfinite(gradient).all()
            true[name] = gradient * inverse
    return true, found


def rescaled(
    scale: torch.Tensor,
    count: torch.Tensor,
    found: torch.Tensor,
    settings: StepSettings,
) -> None:
    """Change a scaler's factor, and its count of steps, as its `update` does."""
    growth, backoff, interval = settings.key
    more = count + 1
    grown = (scale.double() * growth).float()
    due = more == interval
    higher = torch.where(due & torch.isfinite(grown), grown, scale)
    lower = (scale.double() * backoff).float()
    none = torch.zeros_like(count)
    scale.copy_(torch.where(found, lower, higher))
    count.copy_(torch.where(found | due, none, more))


def clipped(gradients: Gradients, settings: StepSettings) -> Gradients:
    """Gradients within the limits, as PyTorch's `clip_grad_*` leave them."""
    present = {name: g for name, g in gradients.items() if g is not None}
    if (limit := settings.clip_value) is not None:
        present = {n: g.clamp(min=-limit, max=limit) for n, g in present.items()}
    if settings.clip_norm is not None and present:
        norms = [torch.linalg.vector_norm(g) for g in present.values()]
        total = torch.linalg.vector_norm(torch.stack(norms))
        factor = torch.clamp(settings.clip_norm / (total + 1e-6), max=1.0)
        present = {name: g * factor for name, g in present.items()}
    return {**gradients, **present}


def added(totals: Gradients, found: Mapping[str, torch.Tensor | None]) -> Gradients:
    """Sums of gradients of several passes."""
    sums: Gradients = dict(totals)
    for name, gradient in found.items():
        before = sums.get(name)
        if before is None or gradient is None:
            sums[name] = gradient if before is None else before
        else:
            sums[name] = before + gradient
    return sums
