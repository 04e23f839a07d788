"""Tensors without data that lie as PyTorch's kernels really lay out their results."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["StepFakes"]

_aten = torch.ops.aten

_CONTIGUOUS = frozenset(
    {
        _aten.huber_loss_backward.default,
        _aten.mse_loss_backward.default,
        _aten.smooth_l1_loss_backward.default,
    }
)
"""Whose results are contiguous, whatever PyTorch's own model of them says."""


class StepFakes(FakeTensorMode):
    """PyTorch's tensors without data, where its model of a kernel misses or is wrong.

    Args:
        shape_env: What symbols are made in.
    """

    def __init__(self, shape_env: Any) -> None:
        super().__init__(shape_env=shape_env, allow_non_fake_inputs=True)
        self.allow_scalar_outputs = True

    def dispatch(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What an operation gives."""
        if func is _aten._ctc_loss.default:
            return self._ctc_loss(*args, **(kwargs or {}))
        if func is _aten._ctc_loss_backward.default:
            return self._contiguous(args[1])
        found = super().dispatch(func, types, args, kwargs)
        if func in _CONTIGUOUS and not found.is_contiguous():
            return self._contiguous(found)
        return found

    def _contiguous(self, like: torch.Tensor) -> torch.Tensor:
        with self:
            return torch.empty(like.shape, dtype=like.dtype, device=like.device)

    def _ctc_loss(
        self,
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        zero_infinity: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses, and the forward variables of the alignments.

        With lengths that are numbers their sizes are known.
        """
        del targets, input_lengths, blank, zero_infinity
        steps, samples, _ = log_probs.shape
        states = 2 * max(target_lengths, default=0) + 1
        with self:
            return (
                log_probs.new_empty((samples,)),
                log_probs.new_empty((samples, steps, states)),
            )
