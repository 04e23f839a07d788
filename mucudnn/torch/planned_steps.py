"""The plans of one training step, by what each was made for."""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mucudnn.errors import UnsupportedError
from mucudnn.torch.capture.decisions import all_hold
from mucudnn.torch.capture.plain_values import PlainValues
from mucudnn.torch.capture.whole_step import CapturedStep
from mucudnn.torch.execution.bound_step import BoundStep
from mucudnn.torch.step_plan import TorchPlan

__all__ = ["PlannedStep", "PlannedSteps", "StepKey"]


@dataclass(frozen=True)
class PlannedStep:
    """A plan, and what runs it."""

    plan: TorchPlan
    bound: BoundStep
    captured: CapturedStep


@dataclass(frozen=True)
class StepKey:
    """What a plan was made for.

    Attributes:
        layouts: How the tensors of the batch lie.
        others: Modes, types and hyperparameters.
        plain: Values of Python's.
    """

    layouts: Any
    others: Hashable
    plain: tuple[Any, ...]


class PlannedSteps:
    """Plans for as many kinds of steps as there may be.

    Args:
        most: How many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[StepKey, list[PlannedStep]] = {}

    def clear(self) -> None:
        """Forget them all."""
        self._of.clear()

    def find(self, key: StepKey, given: Sequence[torch.Tensor]) -> PlannedStep | None:
        """One that was made for a step like this, if there is one."""
        for planned in self._of.get(key, ()):
            if all_hold(planned.captured.decisions, given):
                return planned
        return None

    def add(self, key: StepKey, planned: PlannedStep) -> None:
        """Keep one."""
        self._of.setdefault(key, []).append(planned)

    def make_room(self, key: StepKey, plain: PlainValues) -> None:
        """See that there may be one more: of too many, those for other values go.

        Args:
            key: What it will be made for.
            plain: Where values of Python's come from.

        Raises:
            UnsupportedError: There are too many for the values that there are now.
        """
        others = [known for known in self._of if known.plain != key.plain]
        if self._full and others:
            changed = ", ".join(plain.changed(key.plain, others[0].plain))
            warnings.warn(
                f"{len(others)} plans were made while {changed} changed, and every "
                "change is planned for anew; keep such a value in a tensor that is "
                "changed in place, or give it as part of the batch",
                stacklevel=2,
            )
            for known in others:
                del self._of[known]
        if self._full:
            raise UnsupportedError(self._too_many())

    @property
    def _full(self) -> bool:
        return sum(map(len, self._of.values())) >= self._most

    def _too_many(self) -> str:
        shapes = {
            tuple(tuple(shape) for shape, _, _ in key.layouts[0]) for key in self._of
        }
        few = ", ".join(str(list(found)) for found in list(shapes)[:3])
        return (
            f"there are {self._most} plans, for batches of {len(shapes)} shapes "
            f"such as {few}; every shape, mode and hyperparameter has a plan of its "
            "own: pad batches to a few sizes, or give train_step(max_plans=...) more"
        )
