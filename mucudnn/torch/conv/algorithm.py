"""PyTorch's own kernel as one more algorithm of the CPU library.

Its result is an array of PyTorch's, which is copied to where the caller wants it: the
copy is part of its time. What it uses as workspace it does not tell: it counts as none.
"""

from collections.abc import Callable
from typing import Any

import torch

from mucudnn.backends.cpu.conv.algorithm import Algorithm
from mucudnn.backends.cpu.threads import Workers
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.torch.conv.dispatch import overrides

__all__ = ["ALGORITHM", "TORCH"]

TORCH = "torch"
"""Name of the algorithm: oneDNN's kernel, or what PyTorch takes where that has none."""

_Compute = Callable[[Any, Any, Any], Any]


class _Native:
    """PyTorch's kernel, below autograd and whatever is in its place; see `Kernel`.

    Args:
        compute: Of two operands, and a tensor like the result.
    """

    nbytes = 0

    def __init__(self, compute: _Compute) -> None:
        self._compute = compute

    def run(
        self,
        a: Any,
        b: Any,
        out: Any,
        workspace: Any,
        workers: Workers,
        accumulate: bool,
    ) -> None:
        """With PyTorch's threads, not `workers`."""
        one, two, three = map(torch.from_numpy, (a, b, out))
        with torch.inference_mode():
            result = self._compute(one, two, three)
            if accumulate:
                three.add_(result)
            else:
                three.copy_(result)


def _kernel(problem: ConvProblem, workers: int) -> _Native:
    return _Native(_COMPUTE[problem.direction](problem))


def _forward(problem: ConvProblem) -> _Compute:
    run, options = overrides("CPU").native_forward, _options(problem)
    return lambda x, w, y: run(x, w, None, *options)


def _backward_data(problem: ConvProblem) -> _Compute:
    run, options = overrides("CPU").native_backward, _options(problem)
    mask = [True, False, False]
    return lambda dy, w, dx: run(dy, dx, w, None, *options, mask)[0]


def _backward_filter(problem: ConvProblem) -> _Compute:
    run, options = overrides("CPU").native_backward, _options(problem)
    mask = [False, True, False]
    return lambda x, dy, dw: run(dy, x, dw, None, *options, mask)[1]


_COMPUTE: dict[Direction, Callable[[ConvProblem], _Compute]] = {
    Direction.FORWARD: _forward,
    Direction.BACKWARD_DATA: _backward_data,
    Direction.BACKWARD_FILTER: _backward_filter,
}


def _options(problem: ConvProblem) -> tuple[Any, ...]:
    """Stride to groups, as the operators' schemas order them."""
    no_output_padding = [0] * len(problem.stride)
    return (
        list(problem.stride),
        list(problem.padding),
        list(problem.dilation),
        False,
        no_output_padding,
        problem.groups,
    )


ALGORITHM = Algorithm(TORCH, _kernel, notes=("workspace_not_counted",))
