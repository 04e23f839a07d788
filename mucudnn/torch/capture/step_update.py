"""The part of a step behind its gradients: an optimizer's update, or what it is given.

An update is recorded as any other part of a step. Where it cannot be, as it decides by
values or counts in Python, the step ends with the gradients, and the optimizer makes
its update itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun

from mucudnn.errors import UnsupportedError
from mucudnn.torch.capture.gradients import Gradients, clipped, rescaled, unscaled
from mucudnn.torch.capture.optimizers import (
    StateKey,
    UpdateNotRecordedError,
    swapped,
)
from mucudnn.torch.capture.parts import StepParts
from mucudnn.torch.capture.refusals import saying_where
from mucudnn.torch.capture.settings import StepSettings

__all__ = ["StepUpdate", "Tensors"]


@dataclass(frozen=True)
class Tensors:
    """What stands for a step's tensors while it is recorded.

    Attributes:
        parameters: By name.
        state: Of the optimizer.
        rates: The learning rate of each group.
        scale: A scaler's factor and count, if there is one.
    """

    parameters: Mapping[str, torch.Tensor]
    state: Mapping[StateKey, torch.Tensor]
    rates: Sequence[Any]
    scale: Sequence[torch.Tensor]


@dataclass(frozen=True)
class StepUpdate:
    """What is done with the gradients of a step.

    Attributes:
        optimizer: Has them.
        parts: What the step is made of.
        settings: How gradients are treated before.
    """

    optimizer: torch.optim.Optimizer
    parts: StepParts
    settings: StepSettings

    def recorded(
        self, tensors: Tensors, gradients: Gradients
    ) -> Mapping[StateKey, torch.Tensor]:
        """Have the optimizer make its update; what it adds to its state.

        Raises:
            UpdateNotRecordedError: It cannot be recorded; says why.
        """
        if not tensors.scale:
            return self._made(tensors, gradients)
        gradients, found = unscaled(gradients, tensors.scale[0])
        made = self._made_unless(found, tensors, gradients)
        rescaled(tensors.scale[0], tensors.scale[1], found, self.settings)
        return made

    def left(
        self, tensors: Tensors, gradients: Gradients
    ) -> Mapping[str, torch.Tensor]:
        """The gradients that the optimizer is to be given, by parameter.

        With a scaler the last one, of no name, is whether some entry is not finite.
        """
        last: dict[str, torch.Tensor] = {}
        if tensors.scale:
            gradients, found = unscaled(gradients, tensors.scale[0])
            rescaled(tensors.scale[0], tensors.scale[1], found, self.settings)
            last = {"": found}
        given = clipped(gradients, self.settings)
        return {name: g for name, g in given.items() if g is not None} | last

    def _made(
        self, tensors: Tensors, gradients: Gradients
    ) -> Mapping[StateKey, torch.Tensor]:
        by_id = {id(tensor): name for name, tensor in self.parts.parameters.items()}
        given = clipped(gradients, self.settings)
        lent = tensors.parameters, given, tensors.state, tensors.rates
        with swapped(self.optimizer, by_id, *lent) as made:
            try:
                with saying_where():
                    self.optimizer.step()
            except UnsupportedError as e:
                raise UpdateNotRecordedError(str(e)) from e
            except Exception as e:  # of what kind is the optimizer's own affair
                raise UpdateNotRecordedError(f"{type(e).__name__}: {e}") from e
        return made

    def _made_unless(
        self, found: torch.Tensor, tensors: Tensors, gradients: Gradients
    ) -> Mapping[StateKey, torch.Tensor]:
        """Update, and take it back where gradients were not finite."""
        changed = [*tensors.parameters.values(), *tensors.state.values()]
        before = [from_fun(tensor) for tensor in changed]
        made = self._made(tensors, gradients)
        for tensor, old in zip(changed, before, strict=True):
            if from_fun(tensor) is not old:
                tensor.copy_(torch.where(found, to_fun(old), tensor))
        return made
