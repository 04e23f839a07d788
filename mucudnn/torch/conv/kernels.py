"""Planned kernels of ours on PyTorch's tensors, as its two operators are called."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mucudnn.backends.base import Buffer, Runner
from mucudnn.ir.conv import ConvProblem
from mucudnn.torch.conv.geometry import Role, operands

__all__ = ["Backward", "Forward", "Kernel", "Run", "result_form"]

Run = Callable[..., Any]


def result_form(problem: ConvProblem) -> tuple[tuple[int, ...], torch.memory_format]:
    """Shape of a problem's result as PyTorch counts axes, and how it lies."""
    *_, out = problem.operands()
    if problem.layout == "NCHW":
        return out.shape, torch.contiguous_format
    last = (None, None, torch.channels_last, torch.channels_last_3d)
    first, *spatial, channels = out.shape
    return (first, channels, *spatial), last[len(spatial)]


class Kernel:
    """One planned kernel on tensors.

    Args:
        role: What it computes.
        runner: Runs its plan.
        nbytes: The workspace that it runs in.
        workspace: Makes that.
    """

    def __init__(
        self,
        role: Role,
        runner: Runner,
        nbytes: int,
        workspace: Callable[[int], Buffer],
    ) -> None:
        self.role = role
        self.problem = problem = runner.plan.problem
        self._run = runner.run
        self._nbytes = nbytes
        self._workspace = workspace
        self._shape, self._format = result_form(problem)

    def __call__(self, a: Any, b: Any) -> Any:
        """The result, of its two inputs in the order of the problem's operands."""
        form = self._format
        a = a.detach().contiguous(memory_format=form)
        b = b.detach().contiguous(memory_format=form)
        out = torch.empty(  # on the CPU, whatever `torch.set_default_device` says
            self._shape, dtype=a.dtype, device=a.device, memory_format=form
        )
        workspace = self._workspace(self._nbytes)
        self._run(a.numpy(), b.numpy(), out.numpy(), workspace, False)
        return out


class Forward:
    """Output and bias.

    Args:
        kernel: Computes the output.
        biased: Whether there is a bias.
        axes: Of the output.
    """

    def __init__(self, kernel: Kernel, biased: bool, axes: int) -> None:
        self._kernel = kernel
        self._bias = (-1, *[1] * (axes - 2)) if biased else None

    def __call__(self, x: Any, w: Any, b: Any) -> Any:
        """See `aten::convolution`."""
        y = self._kernel(x, w)
        if self._bias is not None:
            y.add_(b.detach().view(self._bias))
        return y


class Backward:
    """Up to three gradients: by our kernels, the others by one call of PyTorch's.

    Args:
        kernels: Of the input's gradient and of the filters'; None where PyTorch's is.
        transposed: Whether the convolution is.
        mask: Which gradients are wanted.
    """

    def __init__(
        self, kernels: Sequence[Kernel | None], transposed: bool, mask: Sequence[bool]
    ) -> None:
        self._kernels = kernels
        self._transposed = transposed
        dx, dw, self._db = mask
        self._native = [dx and kernels[0] is None, dw and kernels[1] is None, False]
        if any(self._native):  # which has them at hand
            self._native[2], self._db = self._db, False

    def __call__(self, native: Run, gy: Any, x: Any, w: Any) -> Any:
        """See `aten::convolution_backward`; `native` takes a mask."""
        theirs = native(self._native) if any(self._native) else (None, None, None)
        found = list(theirs)
        for i, kernel in enumerate(self._kernels):
            if kernel is not None:
                found[i] = kernel(*operands(kernel.role, self._transposed, gy, x, w))
        if self._db:
            found[2] = gy.detach().sum([0, *range(2, gy.dim())])
        return tuple(found)
