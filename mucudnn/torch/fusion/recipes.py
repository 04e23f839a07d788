"""What a fused node computes, without names: equal for nodes that can share a kernel.

Values are numbered: first the inputs, then what the steps make, each in order.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from mucudnn.torch.lowering.lowered import Call, Layout
from mucudnn.torch.measure import evaluate

__all__ = ["Recipe", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """One of the operations that were fused.

    Attributes:
        call: How it is run.
        operands: The values of its operands; any for one that the call has no use of.
    """

    call: Call
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """A function of tensors.

    Attributes:
        inputs: How they lie.
        steps: What is computed.
        outputs: Values that it returns.
        layouts: How these lie.
        stores: Inputs that it changes, and the values that they have then.
    """

    inputs: tuple[Layout, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    layouts: tuple[Layout, ...]
    stores: tuple[tuple[int, int], ...]

    @cached_property
    def digest(self) -> str:
        """A hash of all that it says."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def into(self, taken: int) -> "Recipe":
        """The same with the first result in the place of an input."""
        stores = (*self.stores, (taken, self.outputs[0]))
        return replace(
            self, outputs=self.outputs[1:], layouts=self.layouts[1:], stores=stores
        )

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """It, operation by operation, to be traced."""

        def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values = list(given)
            for step in self.steps:
                values += evaluate(step.call, [values[i] for i in step.operands])
            found = tuple(values[i] for i in self.outputs)
            for place, value in self.stores:
                torch.ops.aten.copy_.default(given[place], values[value])
            return found

        return run
