"""A whole training step of PyTorch's within a budget of bytes.

    step = mt.train_step(model, loss_fn, optimizer, budget="8GiB")
    loss = step(x, y)

Forward, backward and the optimizer's update are one program that is planned once for
each kind of batch. The budget counts parameters, buffers, the optimizer's state,
gradients, activations, the loss and scratch memory: everything on the device but the
batch, which is the caller's. Gradients live inside of the step: `grad` stays as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from mucudnn.ir.graph import Phase
from mucudnn.ir.profile import Profile
from mucudnn.torch.capture import CapturedStep, StepParts, capture_step
from mucudnn.torch.copies import ThreadCopies
from mucudnn.torch.lower import Lowered, lower
from mucudnn.torch.measure import measured
from mucudnn.torch.planning import Planner, as_budget
from mucudnn.torch.program import Segment, bind
from mucudnn.torch.step_plan import TorchPlan
from mucudnn.torch.updates import with_updates

__all__ = ["TrainStep", "lowered_step", "planner_of", "train_step"]


def train_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    budget: float | str | None = None,
) -> "TrainStep":
    """A function that trains a model by one step, within a budget.

    What Python decides is decided when a kind of batch is first seen: the model's mode,
    hyperparameters and whatever branches there are. A change of the mode or of a
    hyperparameter is seen, and planned anew; learning rates may change freely. Hooks of
    the optimizer run when a step is planned, not when it runs.

    Args:
        model: Called with the first tensor of a batch.
        loss_fn: Called with the model's result and the rest of the batch; a scalar.
        optimizer: Of the model's parameters; any that only changes tensors in place.
        budget: Bytes, or a size such as "8GiB"; None plans without a limit.
    """
    return TrainStep(model, loss_fn, optimizer, as_budget(budget))


def lowered_step(captured: CapturedStep) -> Lowered:
    """The graph of a captured step, what it changes for good changed in place."""

    def phase_of(node: str) -> Phase:
        if node in captured.forward:
            return Phase.FORWARD
        return Phase.BACKWARD if node in captured.backward else Phase.UPDATE

    return lower(captured.module, phase_of)


def planner_of(
    captured: CapturedStep, parts: StepParts, profiled: Callable[[Lowered], Profile]
) -> Planner:
    """What plans a captured step.

    Args:
        captured: The step.
        parts: What it is made of.
        profiled: What measures or estimates it.
    """
    plain = lowered_step(captured)
    of_name = dict(zip(captured.names, plain.inputs, strict=True))
    late = frozenset(t for name in parts.buffers if (t := of_name[name]) is not None)
    lowered = with_updates(plain, late)
    given = [t for n, t in of_name.items() if t is not None and n.startswith("batch.")]
    return Planner(lowered, profiled(lowered), given)


@dataclass(frozen=True)
class _Planned:
    plan: TorchPlan
    segment: Segment


class TrainStep:
    """A step of one model, loss and optimizer.

    Args:
        model: Whose parameters are trained.
        loss_fn: Of its result and the rest of a batch.
        optimizer: Of its parameters.
        budget: Bytes for everything but the batch.
        costs: What tells times and scratch memory of a graph's nodes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        budget: float,
        costs: Callable[[Lowered], Profile] = measured,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._budget = budget
        self._costs = costs
        self._planned: dict[Any, _Planned] = {}
        self._last: _Planned | None = None

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        """Train on one batch; its loss.

        Raises:
            PlanningError: The step does not fit; says the least budget that works.
            UnsupportedError: It cannot be captured; says why.
        """
        self._last = self._for(batch)
        with torch.no_grad():
            given = [*self._parts.tensors(), *(t.detach() for t in batch)]
            return self._last.segment.run(given)[0]

    @property
    def plan(self) -> TorchPlan:
        """What was decided for the last batch.

        Raises:
            RuntimeError: There was none yet; `prepare` plans without a step.
        """
        if self._last is None:
            raise RuntimeError("no batch was seen yet; prepare(*batch) plans for one")
        return self._last.plan

    def prepare(self, *batch: torch.Tensor) -> TorchPlan:
        """Plan for batches like this one, without a step."""
        self._last = self._for(batch)
        return self._last.plan

    @cached_property
    def _static(self) -> StepParts:
        return StepParts.of(self._model, self._optimizer)

    @property
    def _parts(self) -> StepParts:
        """The tensors of now; what they are called does not change."""
        groups = self._optimizer.param_groups
        return replace(self._static, rates=tuple(group["lr"] for group in groups))

    def _for(self, batch: Sequence[torch.Tensor]) -> _Planned:
        key = self._key(batch)
        if key not in self._planned:
            self._planned[key] = self._plan(batch)
        return self._planned[key]

    def _plan(self, batch: Sequence[torch.Tensor]) -> _Planned:
        captured = capture_step(self._model, self._loss_fn, self._optimizer, batch)
        planner = planner_of(captured, self._parts, self._costs)
        plan = planner.plan(self._budget)
        copies = ThreadCopies(reuse=True)
        segment = bind(planner.lowered, plan.plan.schedule, copies)
        return _Planned(replace(plan, source=segment.source), segment)

    def _key(self, batch: Sequence[torch.Tensor]) -> Any:
        """What a plan was made for."""
        layouts = tuple((tuple(t.shape), t.stride(), t.dtype, t.device) for t in batch)
        modes = tuple(module.training for module in self._model.modules())
        fixed = tuple(
            (key, repr(value))
            for group in self._optimizer.param_groups
            for key, value in group.items()
            if key not in ("params", "lr")
        )
        return layouts, modes, fixed, torch.is_autocast_enabled("cpu")
