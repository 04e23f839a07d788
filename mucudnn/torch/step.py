"""A whole training step of PyTorch's within a budget of bytes.

    step = mt.train_step(model, loss_fn, optimizer, budget="8GiB")
    loss = step(x, y)

Forward, backward and the optimizer's update are one program that is planned once for
each kind of batch. The budget counts parameters, buffers, the optimizer's state,
gradients, activations, the loss and scratch memory: everything on the device but the
batch, which is the caller's. Gradients live inside of the step: `grad` stays as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mucudnn.passes.planning.splitting.cutting import WHOLE, Split
from mucudnn.runtime.environment import USERS
from mucudnn.runtime.executor.tier_choice import TierChoice
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.torch.capture.batches import Batch
from mucudnn.torch.capture.exclusive import exclusive_capture
from mucudnn.torch.capture.kernel_results import KernelResults
from mucudnn.torch.capture.optimizers import UpdateNotRecordedError
from mucudnn.torch.capture.parts import LiveParts
from mucudnn.torch.capture.plain_values import PlainValues
from mucudnn.torch.capture.settings import PLAIN, StepSettings
from mucudnn.torch.capture.whole_step import CapturedStep, capture_step
from mucudnn.torch.conv.fronts import ConvolutionChoice
from mucudnn.torch.execution.bound_step import StepCommit
from mucudnn.torch.execution.lanes import DEVICES, check_devices
from mucudnn.torch.execution.own_update import own_update
from mucudnn.torch.execution.tiers import tiers_within
from mucudnn.torch.fusion.switch import fusing_of
from mucudnn.torch.measurement.own_updates import state_bytes
from mucudnn.torch.own_update_planning import OwnUpdate
from mucudnn.torch.plan_cache.store import PlanCacheChoice, open_plans
from mucudnn.torch.planned_steps import PlannedStep, PlannedSteps, StepKey
from mucudnn.torch.planning import as_budget
from mucudnn.torch.step_plan import TorchPlan
from mucudnn.torch.step_planning import StepPlanning

__all__ = ["TrainStep", "train_step"]


def train_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    *,
    budget: float | str | None = None,
    tuner: Tuner | None = None,
    cache: PlanCacheChoice = USERS,
    offload_state: bool = False,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    split: Split = WHOLE,
    max_plans: int = 32,
    inductor: bool = False,
    tiers: str | TierChoice | Sequence[str | TierChoice] = (),
) -> "TrainStep":
    """A function that trains a model by one step, within a budget.

    The first argument of a step is the model's input: a tensor, a tuple of its
    positional arguments, or a dict of those by name; `step(**batch)` gives them by name
    too. All other arguments are the loss function's, behind the model's result.

    What Python decides is decided when a kind of batch is first seen: the model's mode,
    hyperparameters and whatever branches there are. A change of the mode, of a
    hyperparameter, of types, or of which tensors there are is seen, and planned anew;
    so are other numbers, flags and texts in attributes of modules and in variables that
    the loss function reads, and other tensors in the latter. Learning rates and what is
    in tensors may change freely. What else changes in Python from step to step cannot
    be seen: attributes of modules and Python's own random numbers are refused when they
    change in a step, containers and other objects are not looked at. Hooks of
    parameters, modules and the optimizer run when a step is planned; what they do to
    tensors then is part of every step.

    Results are those of eager mode, bit for bit, with two exceptions: what is computed
    in place into a part of a tensor is computed into memory of its own, and kernels may
    round strided memory otherwise than dense one, as the sigmoids of `nn.GRU` do where
    its width is no multiple of their vectors (32 always is); and the gradient of a
    product (`prod`) is always computed as if there were zeros in it.

    Args:
        model: What is trained.
        loss_fn: Called with the model's result and the rest of a batch. Returns the
            scalar to minimise, or a pair of it and tensors, nested as you like, that
            come back with it; the budget counts them.
        optimizer: Of the model's parameters, and of the loss's if that is a module. One
            that decides by values, counts in Python or takes a closure makes its update
            itself, behind the planned passes: the budget holds all gradients then, and
            what a copy of it was measured to need, hooks left out.
        budget: Bytes, or a size such as "8GiB"; None plans without a limit.
        tuner: Measures other ways to run the convolutions, our algorithms and
            micro-batches, of which the plan takes what is fastest in the bytes that it
            has; results differ from eager ones by rounding then. What was measured is
            remembered, unless its batch policy is a function. Its backend is
            `mucudnn.torch.cpu_backend()`. None leaves them to PyTorch's kernels.
        cache: A folder to remember measurements and plans in, by default one in the
            user's cache directory; None remembers nothing.
        offload_state: Whether parameters, buffers and the optimizer's state may live
            in memory of the host that is not of PyTorch's allocator, where the budget
            asks for it: the budget does not count them there. They stay the tensors
            that they are, with other memory; on the CPU so far.
        accumulate: Parts that every batch is cut into along its first axis, each with
            a backward pass of its own: gradients are those of the mean of the parts'
            losses, each part weighed by its samples. What comes back with the loss
            is a tuple of every part's.
        clip_norm: As `torch.nn.utils.clip_grad_norm_` of all gradients.
        clip_value: As `torch.nn.utils.clip_grad_value_`; before `clip_norm`.
        scaler: As a loop with `scale`, `unscale_`, `step` and `update` uses it.
        split: Whether the step runs in slices of its batch, one behind the other, which
            need less at once: "none", "auto" for what is predicted to be fastest within
            the budget, or into how many parts its largest layers are cut; "height" for
            strips of its images, or the depth of its volumes, "height:4" for so many:
            where there are few and large ones. Gradients are those of the whole batch
            up to the order of sums.
        max_plans: Kinds of batches, modes and hyperparameters that are planned for.
        inductor: Whether neighbouring operations become kernels that PyTorch's Inductor
            compiles, where these are faster and the budget allows. They compute what
            the operations do, up to rounding.

        tiers: Where to what leaves for the budget goes, on the CPU: `host`,
            `disk:FOLDER`, `peer:1` (memory that another process owns), each with
            `=SIZE` behind it where that is not to be all there is; several are filled
            the fastest first. Host memory if none are given.

    Raises:
        ValueError: The budget is no size, the tuner has another backend, the split is
            none of these, or it is wanted with `inductor`, which takes whole steps; or
            a tier is none, or there is no budget for it.
        TypeError: It is no budget, or no tuner, or `inductor` is no bool.
    """
    settings = StepSettings(accumulate, clip_norm, clip_value, scaler)
    plans = open_plans(cache)
    limit = as_budget(budget)
    planning = StepPlanning(
        limit,
        plans=plans,
        offload_state=offload_state,
        choice=ConvolutionChoice(tuner),
        split=split,
        fusing=fusing_of(inductor, plans),
        tiers=tiers_within(limit, tiers, shared=True),
    )
    return TrainStep(
        model, loss_fn, optimizer, planning, settings=settings, max_plans=max_plans
    )


class TrainStep:
    """A step of one model, loss and optimizer.

    Args:
        model: Whose parameters are trained.
        loss_fn: Of its result and the rest of a batch.
        optimizer: Of its parameters.
        planning: How steps are planned.
        settings: What is done with gradients.
        max_plans: How many there may be.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        planning: StepPlanning,
        *,
        settings: StepSettings = PLAIN,
        max_plans: int = 32,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._planning = planning
        self._settings = settings
        self._results = KernelResults()
        self._planned = PlannedSteps(max_plans)
        self._live: LiveParts | None = None
        self._plain = PlainValues((), loss_fn)
        self._last: PlannedStep | None = None
        self._reason = ""
        self._commit = StepCommit(optimizer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train on one batch; its loss, or a pair of it and what came back with it.

        Whatever it raises, Ctrl-C included, the step was run in full or not at all,
        or the next call raises `BackendError`.

        Raises:
            PlanningError: The step does not fit; says the least budget that works.
            UnsupportedError: It cannot be captured; says why.
            BackendError: An error stopped the last step while it changed what is
                trained; load a checkpoint and call `reset`.
        """
        with self._commit.step():
            return self._step(args, kwargs)

    def reset(self) -> None:
        """Go on after a step that an error has left half done.

        What it trains has to be as it shall be: load a checkpoint before.
        """
        self._commit.reset()

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = Batch.of(args, kwargs)
        planned, given = self._ready(batch)
        captured = planned.captured
        if captured.gradients is not None:
            loss, *flat = self._with_own_update(planned, batch, given)
        else:
            loss, *flat = planned.bound.run(given, self._commit)
            self._optimizer._opt_called = True  # what schedulers look for
        for i, j, key in reversed(captured.made):
            parameter = self._optimizer.param_groups[i]["params"][j]
            self._optimizer.state[parameter][key] = flat.pop()
        form = captured.extras
        return loss if form is None else (loss, pytree.tree_unflatten(flat, form))

    @property
    def plan(self) -> TorchPlan:
        """What was decided for the last batch.

        Raises:
            RuntimeError: There was none yet; `prepare` plans without a step.
        """
        if self._last is None:
            raise RuntimeError("no batch was seen yet; prepare(*batch) plans for one")
        return self._last.plan

    def prepare(self, *args: Any, **kwargs: Any) -> TorchPlan:
        """Plan for batches like this one, without a step; nothing is changed."""
        with self._commit.planning():
            return self._ready(Batch.of(args, kwargs))[0].plan

    def _ready(self, batch: Batch) -> tuple[PlannedStep, list[torch.Tensor]]:
        """A plan for a batch, and what it is given.

        An update that cannot be recorded is the optimizer's own from then on.
        """
        while True:
            live = self._parts()
            given = [*live.tensors(), *batch.tensors]
            try:
                self._last = self._for(live, batch, given)
            except UpdateNotRecordedError as e:
                self._settings = replace(self._settings, recorded=False)
                self._reason, self._live = str(e), None
                self._commit.unused.withdraw()  # the optimizer makes its own
                self._commit.unused.keep()
            else:
                return self._last, given

    def _with_own_update(
        self, planned: PlannedStep, batch: Batch, given: list[torch.Tensor]
    ) -> list[Any]:
        """Forward and backward as planned, then the optimizer's own step."""
        live, names = self._parts(), planned.captured.gradients or ()
        of_name = live.parts.parameters
        inputs = [given]

        def passes() -> list[Any]:
            now = inputs.pop() if inputs else [*live.tensors(), *batch.tensors]
            return planned.bound.run(now, self._commit)

        own = planned.plan.own_update
        returned = own_update(
            self._optimizer,
            passes,
            [of_name[name] for name in names if name],
            begin=self._commit.begin,
            closure=own is not None and own.closure,
            scaled="" in names,
        )
        if own is not None and state_bytes(self._optimizer) > own.state:
            self._live = None  # more than was measured: measure and plan again
        return returned

    def _parts(self) -> LiveParts:
        """What the step is made of; plans for other tensors than those are dropped."""
        if self._live is None or not self._live.current():
            self._planned.clear()
            self._commit.unused.note()
            self._live = LiveParts(
                self._model, self._optimizer, self._loss_fn, self._settings
            )
            self._plain = PlainValues(self._live.modules, self._loss_fn)
        return self._live

    def _for(
        self, live: LiveParts, batch: Batch, given: Sequence[torch.Tensor]
    ) -> PlannedStep:
        check_devices(given)
        key = self._key(live, batch, given)
        planned = self._planned.find(key, given)
        if planned is None:
            self._planned.make_room(key, self._plain)
            # What is drawn while a step is measured is drawn again by the step.
            devices = {t.device.index for t in given if t.is_cuda}
            with exclusive_capture(), torch.random.fork_rng(devices=sorted(devices)):
                planned = self._plan(live, batch)
            # What the loss counts when it is called is now as it stays.
            self._planned.add(self._key(live, batch, given), planned)
        return planned

    def _plan(self, live: LiveParts, batch: Batch) -> PlannedStep:
        def captured() -> CapturedStep:
            return capture_step(
                self._model,
                self._loss_fn,
                self._optimizer,
                batch,
                settings=self._settings,
                results=self._results,
            )

        def planned(step: CapturedStep) -> PlannedStep:
            of_name = live.parts.parameters
            own = OwnUpdate.of(self._optimizer, step, of_name, self._reason)
            plan, bound = self._planning.plan(step, live.parts, own)
            return PlannedStep(plan, bound, step)

        return self._results.settled(captured, planned)

    def _key(
        self, live: LiveParts, batch: Batch, given: Sequence[torch.Tensor]
    ) -> StepKey:
        """What a plan was made for."""
        kinds = tuple([(t.dtype, t.device, t.requires_grad, t.shape) for t in given])
        modes = tuple([module.training for module in live.modules])
        fixed = tuple(
            (key, repr(value))
            for group in self._optimizer.param_groups
            for key, value in group.items()
            if key not in ("params", "lr") and self._settings.recorded
        )
        cast = tuple(
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
            for kind in DEVICES
        )
        others = kinds, modes, fixed, cast, self._settings.key
        return StepKey(batch.key, others, self._plain.now())
