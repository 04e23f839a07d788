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

from mucudnn.errors import UnsupportedError
from mucudnn.ir.graph import Phase
from mucudnn.ir.profile import Profile
from mucudnn.runtime.environment import USERS
from mucudnn.torch.capture.updates import with_updates
from mucudnn.torch.capture.whole_step import (
    CapturedStep,
    StepParts,
    as_tensor,
    capture_step,
)
from mucudnn.torch.execution.bound_step import BoundStep, bind_step
from mucudnn.torch.execution.lanes import DEVICES
from mucudnn.torch.fusion.switch import fusing_of
from mucudnn.torch.lowering.lower import lower
from mucudnn.torch.lowering.lowered import Lowered
from mucudnn.torch.measure import measured
from mucudnn.torch.plan_cache.store import PlanCacheChoice, PlanStore, open_plans
from mucudnn.torch.planning import Planner, as_budget
from mucudnn.torch.step_plan import TorchPlan

__all__ = ["TrainStep", "lowered_step", "planner_of", "train_step"]


def train_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    budget: float | str | None = None,
    cache: PlanCacheChoice = USERS,
    offload_state: bool = False,
    inductor: bool = False,
) -> "TrainStep":
    """A function that trains a model by one step, within a budget.

    What Python decides is decided when a kind of batch is first seen: the model's mode,
    hyperparameters and whatever branches there are. A change of the mode or of a
    hyperparameter is seen, and planned anew; learning rates may change freely. Hooks of
    the optimizer run when a step is planned; what they do to tensors then, such as to
    clip gradients, is part of every step.

    Args:
        model: Called with the first tensor of a batch.
        loss_fn: Called with the model's result and the rest of the batch; a scalar.
        optimizer: Of the model's parameters; any that only changes tensors in place.
        budget: Bytes, or a size such as "8GiB"; None plans without a limit.
        cache: A folder to remember measurements and plans in, by default one in the
            user's cache directory; None remembers nothing.
        offload_state: Whether parameters, buffers and the optimizer's state may live
            in memory of the host that is not of PyTorch's allocator, where the budget
            asks for it: the budget does not count them there. They stay the tensors
            that they are, with other memory; on the CPU so far.
        inductor: Whether neighbouring operations become kernels that PyTorch's Inductor
            compiles, where these are faster and the budget allows. They compute what
            the operations do, up to rounding.

    Raises:
        TypeError: `inductor` is no bool, or the budget neither a number nor text.
        ValueError: The budget is no size.
    """
    return TrainStep(
        model,
        loss_fn,
        optimizer,
        as_budget(budget),
        plans=open_plans(cache),
        offload_state=offload_state,
        inductor=inductor,
    )


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
    bound: BoundStep


class TrainStep:
    """A step of one model, loss and optimizer.

    Args:
        model: Whose parameters are trained.
        loss_fn: Of its result and the rest of a batch.
        optimizer: Of its parameters.
        budget: Bytes for everything but the batch.
        costs: What tells times and scratch memory of a graph's nodes.
        plans: What was measured and planned before; None remembers nothing.
        offload_state: Whether parameters and state may be host-resident.
        inductor: Whether operations are fused.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        budget: float,
        costs: Callable[[Lowered], Profile] = measured,
        plans: PlanStore | None = None,
        *,
        offload_state: bool = False,
        inductor: bool = False,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._budget = budget
        self._costs = costs
        self._offload_state = offload_state
        self._plans = plans or PlanStore()
        self._fusing = fusing_of(inductor, self._plans)
        self._planned: dict[Any, _Planned] = {}
        self._last: _Planned | None = None

    def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
        """Train on one batch; its loss.

        Raises:
            PlanningError: The step does not fit; says the least budget that works.
            UnsupportedError: It cannot be captured; says why.
        """
        given = [*self._tensors(), *batch]
        self._last = self._for(batch, given)
        return self._last.bound.run(given)[0]

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
        self._last = self._for(batch, [*self._tensors(), *batch])
        return self._last.plan

    @cached_property
    def _parts(self) -> StepParts:
        """What the step is made of; which tensors those are may change."""
        return StepParts.of(self._model, self._optimizer)

    @cached_property
    def _places(self) -> list[tuple[dict[str, Any], str]]:
        """Where the model's tensors are: in which of its modules, by which name."""
        modules = dict(self._model.named_modules())

        def place(name: str, kind: str) -> tuple[dict[str, Any], str]:
            module, _, own = name.rpartition(".")
            return getattr(modules[module], kind), own

        parameters = [place(name, "_parameters") for name in self._parts.parameters]
        return parameters + [place(name, "_buffers") for name in self._parts.buffers]

    def _tensors(self) -> list[torch.Tensor]:
        """The tensors of now: checkpoints replace those of buffers and of state."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        of_state = [
            state[groups[i]["params"][j]][key] for i, j, key in self._parts.state
        ]
        rates = [as_tensor(group["lr"]) for group in groups]
        return [*(found[name] for found, name in self._places), *of_state, *rates]

    def _for(
        self, batch: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
    ) -> _Planned:
        _check_tensors(given)
        key = self._key(batch, given)
        if key not in self._planned:
            self._planned[key] = self._plan(batch)
        return self._planned[key]

    def _plan(self, batch: Sequence[torch.Tensor]) -> _Planned:
        captured = capture_step(self._model, self._loss_fn, self._optimizer, batch)
        planner = planner_of(captured, self._parts, self._profile)
        planner = replace(planner, offload=self._offload_state)
        if self._fusing is None:
            plan = planner.plan(self._budget, self._plans)
        else:
            planner, plan = self._fusing.plan(planner, self._budget)
        bound = bind_step(planner.lowered, plan.plan.schedule)
        return _Planned(replace(plan, source=bound.source), bound)

    def _profile(self, lowered: Lowered) -> Profile:
        return self._plans.profile(lowered, self._costs)

    @cached_property
    def _modules(self) -> tuple[torch.nn.Module, ...]:
        return tuple(self._model.modules())

    def _key(self, batch: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Any:
        """What a plan was made for."""
        layouts = tuple((t.shape, t.stride()) for t in batch)
        types = tuple([(tensor.dtype, tensor.device) for tensor in given])
        modes = tuple([module.training for module in self._modules])
        fixed = tuple(
            (key, repr(value))
            for group in self._optimizer.param_groups
            for key, value in group.items()
            if key not in ("params", "lr")
        )
        autocast = tuple(torch.is_autocast_enabled(kind) for kind in DEVICES)
        return layouts, types, modes, fixed, autocast


def _check_tensors(given: Sequence[Any]) -> None:
    """Refuse what cannot be planned for.

    Raises:
        TypeError: Something is no tensor.
        UnsupportedError: A tensor is on a device on which nothing is run yet.
    """
    for value in given:
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"a batch has a {type(value).__name__}; tensors are wanted, such as "
                "step(x, y)"
            )
        if not (value.is_cpu or value.is_cuda):
            raise UnsupportedError(
                f"a tensor is on {value.device}; steps run on the CPU and on CUDA "
                "devices"
            )
