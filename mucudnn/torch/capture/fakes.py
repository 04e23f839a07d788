"""Tensors without data that lie as PyTorch's kernels really lay out their results."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from mucudnn.torch.capture.ctc import ctc_results
from mucudnn.torch.capture.kernel_results import KernelResults

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


class StepFakes(FakeTensorMode):  # type: ignore[misc]  # PyTorch has no types here
    """PyTorch's tensors without data, where its model of a kernel misses or is wrong.

    Args:
        shape_env: What symbols are made in.
        results: What kernels were seen to return.
    """

    def __init__(self, shape_env: Any, results: KernelResults) -> None:
        super().__init__(shape_env=shape_env, allow_non_fake_inputs=True)
        self._results = results
        self.allow_scalar_outputs = True

    def dispatch(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What an operation gives."""
        if func is _aten.bernoulli.p:
            with self:  # of `bernoulli_`, which leaves a tensor as it lies
                return torch.empty_like(args[0])
        with self:
            found = ctc_results(func, args)
        if found is not None:
            return found
        args, kwargs = _without_symbols_of_complex(args, kwargs or {})
        found = super().dispatch(func, types, args, kwargs)
        if func in _CONTIGUOUS and not found.is_contiguous():
            return self._contiguous(found)
        return self._results.corrected(self, func, (args, kwargs), found)

    def _contiguous(self, like: torch.Tensor) -> torch.Tensor:
        with self:
            return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _without_symbols_of_complex(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Numbers beside complex tensors, such as learning rates, as ones.

    PyTorch's models of kernels make them complex there, which a symbol cannot be. What
    a result is like does not depend on them.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    if not any(isinstance(v, torch.Tensor) and v.is_complex() for v in leaves):
        return args, kwargs
    found: tuple[Any, Any] = pytree.tree_map_only(
        torch.SymFloat, lambda _: 1.0, (args, kwargs)
    )
    return found
