"""Random numbers that fall where eager PyTorch's do.

What is drawn in place is drawn in the order in which a tensor lies in memory. The
functional form of `bernoulli_` forgets that order: it draws for a contiguous tensor.
Dropout behind attention, for one, is of tensors that are not contiguous.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["as_in_place"]


def as_in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """What draws the numbers that the same operation draws in place."""
    return _bernoulli if function is torch.ops.aten.bernoulli.p else function


def _bernoulli(
    like: torch.Tensor, p: float, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    drawn = torch.empty_like(like).bernoulli_(p, generator=generator)
    return drawn.contiguous()  # as the functional form returns it
