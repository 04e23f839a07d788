"""Recipes: computations of fused nodes without names, so that nodes share kernels.

Values are numbered: first the inputs, then the results of the steps, each in order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from mucudnn.torch.lowering.lowered import Call, Layout, Number, Operand
from mucudnn.torch.plan_store import described, digest_of


@dataclass(frozen=True, slots=True)
class Step:
    """One of the fused operations.

    Attributes:
        call: How it is run.
        operands: The values of its operands; arbitrary for one that it does not use.
    """

    call: Call
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """A function of tensors.

    Attributes:
        inputs: Layouts of its inputs.
        steps: Its operations, in order.
        outputs: Values that it returns.
        layouts: Layouts of these.
        stores: Inputs that it mutates, and their new values.
    """

    inputs: tuple[Layout, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    layouts: tuple[Layout, ...]
    stores: tuple[tuple[int, int], ...]

    @cached_property
    def digest(self) -> str:
        """A hash of the whole recipe."""
        return digest_of(described(self))

    def into(self, taken: int) -> "Recipe":
        """Return the same recipe with the first result in place of an input."""
        stores = (*self.stores, (taken, self.outputs[0]))
        return replace(
            self, outputs=self.outputs[1:], layouts=self.layouts[1:], stores=stores
        )

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return a function that runs operation by operation, to be traced."""

        def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values = list(given)
            numbers: dict[Any, Any] = {}
            for step in self.steps:
                values += _results(step, values, numbers)
            found = tuple(values[i] for i in self.outputs)
            for place, value in self.stores:
                torch.ops.aten.copy_.default(given[place], values[value])
            return found

        return run


def _results(
    step: Step, values: Sequence[torch.Tensor], numbers: dict[Any, Any]
) -> list[torch.Tensor]:
    """Run a step; a number that two steps need is computed once."""
    call = step.call
    args = [_argument(a, step, values, numbers) for a in call.args]
    kwargs = {k: _argument(a, step, values, numbers) for k, a in call.kwargs.items()}
    found = call.function(*args, **kwargs)
    return [found if path is None else found[path] for path in call.results]


def _argument(
    leaf: Any, step: Step, values: Sequence[torch.Tensor], numbers: dict[Any, Any]
) -> Any:
    match leaf:
        case Operand(index):
            return values[step.operands[index]]
        case Number(function, args):
            key = repr((function, [_numbered(a, step) for a in args]))
            if key not in numbers:
                given = [_argument(a, step, values, numbers) for a in args]
                numbers[key] = function(*given)
            return numbers[key]
        case list() | tuple():
            return type(leaf)([_argument(a, step, values, numbers) for a in leaf])
        case _:
            return leaf


def _numbered(leaf: Any, step: Step) -> Any:
    """Return an argument with the numbers of values for those of operands."""
    match leaf:
        case Operand(index):
            return Operand(step.operands[index])
        case Number(function, args):
            return Number(function, tuple(_numbered(a, step) for a in args))
        case _:
            return leaf
