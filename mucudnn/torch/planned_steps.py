"""The plans of one training step, and what each was captured for."""

import hashlib
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mucudnn.torch.capture.batches import Batch
from mucudnn.torch.capture.guards import StepGuards
from mucudnn.torch.capture.parts import LiveParts
from mucudnn.torch.capture.python_state import Read
from mucudnn.torch.capture.whole_step import CapturedStep
from mucudnn.torch.execution.bound_step import BoundStep
from mucudnn.torch.lowering.lowered import Layout
from mucudnn.torch.step_plan import TorchPlan

__all__ = ["PlannedStep", "PlannedSteps", "Variant", "graph_key"]

_VARIANTS_A_PLAN = 4
"""Captures that are kept for every plan there may be: several may share a plan."""


@dataclass(frozen=True)
class PlannedStep:
    """A plan of one graph, and what runs it.

    Attributes:
        key: The graph, by `graph_key`.
        plan: What was decided.
        bound: The program.
        constants: Tensors of the graph, whose identity is part of the key.
    """

    key: Hashable
    plan: TorchPlan
    bound: BoundStep
    constants: Sequence[torch.Tensor]


@dataclass(frozen=True, eq=False)
class Variant:
    """One capture of the step, with all that must hold for it to be used.

    Attributes:
        form: How the batch is nested, and what in it is no tensor.
        live: Where the step's tensors are found.
        guards: What else must be as it was.
        captured: The graph.
        planned: Its plan.
    """

    form: tuple[Any, Any]
    live: LiveParts
    guards: StepGuards
    captured: CapturedStep
    planned: PlannedStep

    def inputs_for(self, batch: Batch) -> tuple[list[torch.Tensor], str]:
        """Return the graph's inputs for a batch, or why it cannot be used for it."""
        if (batch.leaves, batch.form) != self.form:
            return [], f"the batch is nested in another way: {batch.form}"
        try:
            given = [*self.live.tensors(), *batch.tensors]
        except LookupError as e:
            return [], f"a tensor of the model or the optimizer is gone: {e}"
        reason = self.guards.failed(given)
        return given, reason


def graph_key(captured: CapturedStep) -> Hashable:
    """Return what is equal for graphs that one plan serves."""
    lines, constants = [repr(captured.names)], []
    for node in captured.module.graph.nodes:
        target = str(node.target)
        if node.op == "get_attr":
            value = getattr(captured.module, target)
            constants.append(id(value))
            target = ""
        phase = node.name in captured.forward, node.name in captured.backward
        layouts = _layouts(node.meta.get("val"))
        words = (node.name, node.op, target, node.args, node.kwargs, layouts, phase)
        lines.append(repr(words))
    lines.append(repr((captured.made, captured.gradients)))
    return hashlib.sha256("\n".join(lines).encode()).digest(), tuple(constants)


def _layouts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Layout.of(value)
    if isinstance(value, tuple | list):
        return [_layouts(v) for v in value]
    return type(value)


class PlannedSteps:
    """Captured and planned steps, the most recently used first.

    Args:
        most: How many plans are kept.

    Attributes:
        changed: The Python state for which the last used capture did not hold.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._variants: list[Variant] = []
        self._warned = False
        self.changed: Read | None = None

    def find(self, batch: Batch) -> tuple[Variant | None, list[torch.Tensor], str]:
        """Return a capture that holds for a batch and its inputs, or why none does."""
        first, self.changed = "no step was planned yet", None
        for i, variant in enumerate(self._variants):
            given, reason = variant.inputs_for(batch)
            if not reason:
                if i:
                    self._variants.insert(0, self._variants.pop(i))
                return variant, given, ""
            if i == 0:
                first, self.changed = reason, variant.guards.state.changed
        return None, [], first

    def plan_of(self, key: Hashable) -> PlannedStep | None:
        """Return the plan of an equal graph, if there is one."""
        found = (v.planned for v in self._variants if v.planned.key == key)
        return next(found, None)

    def add(self, variant: Variant, reason: str) -> None:
        """Keep a capture; drop the plan that was not used for the longest time.

        Args:
            variant: The capture.
            reason: Why none of the others could be used.
        """
        self._variants.insert(0, variant)
        plans = list(dict.fromkeys(v.planned.key for v in self._variants))
        if len(plans) > self._most:
            if not self._warned:
                warnings.warn(
                    f"more than max_plans={self._most} plans are needed, so the least "
                    f"recently used one is dropped and may be made again; the last was "
                    f"needed because of {reason}. Pad batches to a few sizes, keep a "
                    "number that changes from step to step in a tensor, or raise "
                    "max_plans",
                    stacklevel=5,
                )
                self._warned = True
            self._variants = [v for v in self._variants if v.planned.key != plans[-1]]
        del self._variants[_VARIANTS_A_PLAN * self._most :]

    def drop(self, variant: Variant) -> None:
        """Forget the plan of a capture."""
        key = variant.planned.key
        self._variants = [v for v in self._variants if v.planned.key != key]
