"""`train_step`: a whole PyTorch training step within a memory budget.

    step = mt.train_step(model, loss_fn, optimizer, budget="8GiB")
    loss = step(x, y)

Forward, backward and the optimizer's update are one program that is planned once for
each kind of batch. The budget counts parameters, buffers, the optimizer's state,
gradients, activations, the loss and scratch memory: everything on the device but the
batch, which is the caller's. Gradients live inside of the step: `grad` stays as it is.
"""

import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from mucudnn.arguments import check_bool, check_choice, check_integer
from mucudnn.errors import MucudnnError, PlanningError, UnsupportedError
from mucudnn.ir.sizes import format_bytes, format_count
from mucudnn.passes.liveness import rounded
from mucudnn.passes.planning.cutting import WHOLE, Split
from mucudnn.runtime.environment import USERS
from mucudnn.runtime.executor.tiers import TierChoice
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.torch.automatic_budget import AutomaticBudget
from mucudnn.torch.capture.exclusive import exclusive_capture
from mucudnn.torch.capture.fake_tensors import KernelResults
from mucudnn.torch.capture.guards import (
    OTHER_VALUES,
    Overlaps,
    Settings,
    StepGuards,
    overlaps_of,
)
from mucudnn.torch.capture.known_values import known_values
from mucudnn.torch.capture.optimizers import UpdateNotRecordedError, with_state
from mucudnn.torch.capture.python_state import Kind, Read
from mucudnn.torch.capture.reads import UnsoundCaptureError
from mucudnn.torch.capture.step import CapturedStep, capture_step, pair_of
from mucudnn.torch.capture.step_tensors import (
    PLAIN,
    Batch,
    LiveParts,
    StepSettings,
    check_parts,
    scheduled_floats,
)
from mucudnn.torch.conv.backend import untraced
from mucudnn.torch.distributed.collectives import lost_ranks_told
from mucudnn.torch.distributed.distribute import described
from mucudnn.torch.distributed.sharding import Sharding, as_sharded, groups_of, release
from mucudnn.torch.distributed.step_ranks import (
    StepRanks,
    inner_model,
    sharding_of_step,
)
from mucudnn.torch.eager_step import run_eager_step
from mucudnn.torch.execution.bound_step import BoundStep, StepCommit, bind_step
from mucudnn.torch.execution.cuda_memory import watching_reserved
from mucudnn.torch.execution.devices import check_devices, forked_generators
from mucudnn.torch.lowering.lowered import NotCompiledError
from mucudnn.torch.optimizer_update import EagerUpdate, own_update, state_bytes
from mucudnn.torch.plan import TorchPlan
from mucudnn.torch.plan_program import (
    LoweredStep,
    PlannedProgram,
    PlanOptions,
    plan_program,
)
from mucudnn.torch.plan_store import PlanCacheChoice, graph_key
from mucudnn.torch.planning import parse_budget
from mucudnn.torch.verification import VerifiedStep

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedStep:
    """The plan of one graph, bound to an executable program.

    Attributes:
        key: Identifies the graph.
    """

    key: Hashable
    plan: TorchPlan
    bound: BoundStep


@dataclass(frozen=True, eq=False)
class Variant:
    """One capture of the step, and the conditions under which it is valid.

    Attributes:
        kind: Nesting of the batch, its elements that are not tensors, and whether its
            tensors have attributes.
        live: Finds the step's tensors in the model and the optimizer.
        guards: All other conditions.
        captured: The graph.
        planned: The plan of the graph; several captures may share it.
        number: Number of the capture, by which ranks compare what they run.
    """

    kind: tuple[Any, Any, bool]
    live: LiveParts
    guards: StepGuards
    captured: CapturedStep
    planned: PlannedStep
    number: int = 0

    def inputs_for(self, batch: Batch) -> tuple[list[torch.Tensor], str]:
        """Return the graph's inputs for a batch, or why it cannot be used for it."""
        if batch.kind != self.kind:
            if (batch.leaves, batch.form) == self.kind[:2]:
                return [], "tensors of the batch gained or lost attributes"
            return [], f"the batch is nested in another way: {batch.form}"
        try:
            given = [*self.live.tensors(), *batch.tensors]
        except LookupError as e:
            return [], f"a tensor or number of the step is gone: {e}"
        return self.guards.inputs(given)


FALLBACKS = ("refuse", "eager")


_TRANSIENT_STEPS = 3
"""Captures in a row that may be valid for one run only before eager mode is tried."""


_OTHER_VALUES = 8
"""Captures in a row, each for other values of its batch, before eager mode is used."""


_ALLOW = "fallback='eager' runs such steps in eager mode, in whatever memory they take"


_REPLANS_LOGGED = 3
"""Captures behind the first one, the last of which is logged with its reason."""


_COMPILATIONS = 4
"""Graphs compiled by Inductor, the last of which comes with a warning."""


_CHANGES_OF_INPUTS = 2
"""Changes of a Python number after which it is an input of the graph."""


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
    fallback: str = "refuse",
    inductor: bool = False,
    tiers: str | TierChoice | Sequence[str | TierChoice] = (),
    verify: int | None = None,
    exact: bool | None = None,
) -> "TrainStep":
    """Compile a model's whole training step under a memory budget.

    The step is called with the model's input, a tensor, a tuple of positional arguments
    or a dict of arguments by name, followed by the loss function's other arguments;
    `step(**batch)` passes the model's arguments by name too.

    Python control flow is frozen when a batch signature is first captured; what it
    decides by values of the batch is computed before every step, and each outcome, such
    as the number of elements that a mask selects, has a plan of its own. A plan is
    used only while everything that the capture read is unchanged: attributes of modules
    and other objects, globals, free variables, containers, hooks, PyTorch's settings,
    layouts and shared memory of tensors. After a change the step is captured again, and
    planned again if its graph differs. Learning rates and the contents of tensors may
    change freely. State that a step only writes is written at every call. A step that
    changes what it also reads, such as a counter, is captured anew for every call, or
    runs in eager mode where `fallback` or the budget allow it; a warning announces
    either. Prints and log lines appear when a step is captured.

    Under `torch.autocast` the model and the loss are cast; gradients and the update are
    computed outside of it, as PyTorch recommends. Results equal those of eager mode,
    bit for bit, with three exceptions: in-place operations on a part of a tensor write
    to memory of their own, and kernels may round strided memory differently from dense
    memory (the sigmoids of `nn.GRU` and `nn.GRUCell` do, unless their width is a
    multiple of 32); the gradient of a product (`prod`) is always computed as if the
    product had zeros; and the function of a checkpoint runs once, so that running
    statistics within it change once, too, where eager mode changes them twice.

    Args:
        model: The model to train. Under `fully_shard` or `DistributedDataParallel` all
            ranks make each step together, and the budget is that of each rank.
        loss_fn: Called with the model's result and the rest of the batch. Returns the
            scalar to minimize, or a pair of the scalar and nested tensors that the step
            returns with it; the budget counts these tensors.
        optimizer: Of the model's parameters, and of the loss's if it is a module. An
            optimizer that branches on values, counts in Python or takes a closure
            updates eagerly after the planned passes: the budget then holds all
            gradients and the memory measured for a copy of the update, without hooks.
        budget: Bytes, or a size such as "8GiB"; None plans without a limit. A share
            such as "50%" of what the step needs without a limit, "device" for the
            memory that is free, or "auto" for the least memory at a predicted slowdown
            of at most 5 %; these three choose `offload_state` and, as `exact` allows,
            `split` or `inductor` where they are needed, and `print(step.plan)` says so.
        tuner: Measures further algorithms and micro-batches for the convolutions; the
            plan uses the fastest that fit. Results then differ from eager mode by
            rounding. Measurements are stored unless the batch policy is a function. The
            tuner's backend must be `mucudnn.torch.cpu_backend()`. None uses PyTorch's
            convolutions.
        cache: Folder of the file `plans.sqlite` with measurements and plans, by default
            the cache in the user's cache directory; None stores nothing.
        offload_state: Whether parameters, buffers and optimizer state may be moved to
            host memory that the budget does not count. The tensor objects stay the
            same. CPU models only.
        accumulate: Number of parts that a batch is divided into along its first axis,
            each with its own backward pass. Gradients are those of the mean loss,
            weighted by the samples of each part. Extra results become a tuple over
            parts.
        clip_norm: As `torch.nn.utils.clip_grad_norm_` over all gradients.
        clip_value: As `torch.nn.utils.clip_grad_value_`; applied before `clip_norm`.
        scaler: Used as a loop with `scale`, `unscale_`, `step` and `update` uses it.
        split: Whether the step runs in parts, one after another, to lower the peak:
            "none"; "auto" for the fastest predicted number; a number of micro-batches
            of the largest layers; "height" for spatial tiles of images or volumes, or
            "height:4" for four. Gradients are those of the whole batch, up to the order
            of sums.
        max_plans: Number of plans to keep; the least recently used plan is dropped.
        fallback: "refuse" raises an error for a step that cannot be captured, "eager"
            runs it in eager mode with a warning, in whatever memory that takes. If the
            budget holds eager mode too, a step whose Python state cannot be guarded
            runs in eager mode with either.
        inductor: Whether both passes are compiled by PyTorch's Inductor, once for all
            budgets, and planned kernel by kernel. Results are those of `torch.compile`,
            bit for bit, but up to rounding with a tuner, or where the update has square
            roots. Where a step cannot be compiled, a warning says why, and it runs
            operation by operation.
        tiers: Offload targets on the CPU: `host`, `disk:FOLDER`, `peer:1` (shared
            memory); append `=SIZE` to limit one. Several are filled fastest first. Host
            memory by default.
        verify: Compare the first step and every `verify`-th step with the same step in
            eager mode, which runs first, on the same objects, and is undone. Loss,
            extra results, parameters, buffers, the states of optimizer and scaler, and
            the batch must be equal, or within rounding with a tuner, a split,
            `inductor` or a GRU. With `inductor`, all steps then draw eager mode's
            random numbers, not those of `torch.compile`. A compared step exceeds the
            budget: it takes what eager mode needs and a copy of parameters, buffers and
            optimizer state, then the planned peak and two such copies. None and 0
            compare nothing.
        exact: Whether options that a share, "device" or "auto" chooses must leave
            results bit for bit as they are. By default, a share or "device" divides the
            step, or at last compiles it, only where nothing else fits; both change
            results by rounding.

    Raises:
        ValueError: The budget is not a size, the tuner has another backend, `split` is
            unknown, `split` is combined with `inductor`, a tier is unknown, or tiers
            are given without a budget.
        TypeError: An argument has the wrong type.
        UnsupportedError: The model is wrapped for several devices in another way, or an
            option is not supported for several ranks.
    """
    inner = inner_model(model)
    check_parts(inner, loss_fn, optimizer)
    check_integer("max_plans", max_plans, 1)
    settings = StepSettings(accumulate, clip_norm, clip_value, scaler)
    automatic = AutomaticBudget.parse(
        budget, exact=None if exact is None else check_bool("exact", exact)
    )
    limit = parse_budget(budget) if automatic is None else 0.0
    options = PlanOptions.of(
        "train_step",
        limit,
        tuner=tuner,
        cache=cache,
        offload_state=offload_state,
        split=split,
        inductor=inductor,
        tiers=tiers,
    )
    check_choice("fallback", fallback, FALLBACKS)
    check_integer("verify", verify or 0, 0)
    sharding = sharding_of_step(model, loss_fn)
    grouped = dist.is_available() and dist.is_initialized()
    ranks = dist.get_world_size() if grouped else 1
    if sharding is not None:
        given = {
            "tuner": tuner,
            # FSDP2 has further references to the memory of shards.
            "offload_state": options.offload_state and sharding.kind == "fsdp",
            "split": split != WHOLE and split,
            "tiers": tiers,
            "verify": verify,
            "fallback": fallback != "refuse" and fallback,
        }
        for name, value in given.items():
            if value:
                raise UnsupportedError(
                    f"{name}={value!r} is not supported for a model of several ranks; "
                    "without it, activations are kept, offloaded or recomputed, and "
                    "parameters kept or gathered again, within the budget of each rank"
                )
        options = replace(options, alone=sharding.size == 1)
    elif ranks > 1:
        warnings.warn(
            f"this is one of {ranks} ranks, and gradients of a planned step stay on "
            "its rank; pass DistributedDataParallel(model), or shard the model by "
            "fully_shard, to sum them over the ranks",
            stacklevel=2,
        )
    return TrainStep(
        inner,
        loss_fn,
        optimizer,
        limit,
        options,
        settings=settings,
        max_plans=max_plans,
        fallback=fallback,
        verify=verify,
        exact=tuner is None and split == WHOLE and not inductor,
        automatic=automatic,
        sharding=sharding,
    )


class TrainStep:
    """A planned training step of one model, loss and optimizer; see `train_step`."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        budget: float = math.inf,
        options: PlanOptions | None = None,
        *,
        settings: StepSettings = PLAIN,
        max_plans: int = 32,
        fallback: str = "refuse",
        verify: int | None = None,
        exact: bool = True,
        automatic: AutomaticBudget | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self._model = model
        self._sharding = sharding
        self._groups = groups_of(model)
        self._ranks: StepRanks | None = None
        if sharding is not None and sharding.size > 1:
            self._ranks = StepRanks(sharding, next(model.parameters()).device)
        self._shared_captures = 0
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._budget, self._automatic = budget, automatic
        self._options = PlanOptions() if options is None else options
        self._inductor = self._options.inductor
        self._settings = settings
        self._fallback = fallback
        self._results = KernelResults()
        self._planned = PlannedSteps(max_plans)
        self._verify, self._exact = verify or 0, exact
        self._steps = 0
        self._last: PlannedStep | None = None
        self._update_reason = ""
        self._changes: Counter[Any] = Counter()  # of Python numbers, by place
        self._fixed: set[Any] = set()  # numbers that cannot be inputs of the graph
        self._transient_steps = 0  # in a row
        self._eager_steps = 0  # since a step was last captured
        self._other_values = 0  # captures in a row for other values of a batch
        self._captures = 0
        self._compilations = 0
        self._fits: bool | None = None  # the budget holds eager mode, once known
        self._warned: set[str] = set()
        self._commit = StepCommit(optimizer)

    def __repr__(self) -> str:
        """Return `<TrainStep of ResNet, Adam, budget 2.0 GiB: 9 steps, peak …>`."""
        limit, peak = "no budget", "not planned"
        if self._automatic is not None:
            limit = f"budget {self._automatic.text}"
        elif math.isfinite(self._budget):
            limit = f"budget {format_bytes(int(self._budget))}"
        if self._last is not None:
            peak = f"peak {format_bytes(self._last.plan.peak_bytes)}"
        names = f"{type(self._model).__name__}, {type(self._optimizer).__name__}"
        steps = format_count(self._steps, "step")
        return f"<TrainStep of {names}, {limit}: {steps}, {peak}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a planned step cannot be copied or pickled, as it belongs to its model "
            "and optimizer; copy or save their state_dict(), and call "
            "train_step(...) again: plans are read from the cache"
        )

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train on one batch; return the loss, or a pair of the loss and extra results.

        After any exception, Ctrl-C included, the step has run completely or not at all,
        or the next call raises `BackendError`. An exception in eager mode leaves the
        state that eager mode leaves.

        Raises:
            PlanningError: The step does not fit; reports the minimum feasible budget.
            UnsupportedError: The step cannot be captured; reports the reason.
            BackendError: The last step was interrupted while it updated parameters;
                load a checkpoint and call `reset`.
            VerificationError: Results differ from those of eager mode.
        """
        with self._commit.step():
            return self._step(args, kwargs)

    def reset(self) -> None:
        """Allow further steps after one that was interrupted during its update.

        Load a checkpoint first: the interrupted step left parameters half updated.
        """
        self._commit.reset()

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = Batch.of(args, kwargs)
        if any(t.grad_fn is not None for t in batch.tensors):
            self._warn(
                "batch",
                "a tensor of the batch was computed with gradients, but a step has "
                "none for what is outside of its model; make that part of the model, "
                "or detach the tensor",
            )
        variant, given, reason = self._find(batch)
        self._steps += 1
        try:
            if variant is None:
                if self._waits():
                    return self._eager(batch)
                self._count_values(reason)
                variant, given = self._capture(batch, reason)
            else:
                self._other_values = 0
        except Exception as e:
            if not self._may_run_eagerly(e):
                refused = isinstance(e, UnsupportedError) and self._ranks is None
                if refused and torch.is_grad_enabled():
                    e.args = (f"{e}. {_ALLOW}",)
                raise
            return self._eager(batch, e)
        if self._ranks is not None:
            with lost_ranks_told():
                return self._run(variant, batch, given)
        if not self._verify or (self._steps > 1 and self._steps % self._verify):
            return self._run(variant, batch, given)
        parts = self._model, self._loss_fn, self._optimizer, batch, self._settings
        plan = variant.planned.plan
        equal = self._exact and plan.splitting is None and not plan.kernels
        checked = VerifiedStep(*parts, exact=equal)
        return checked.run(partial(self._run, variant, batch, given), self._steps)

    def _find(self, batch: Batch) -> tuple[Variant | None, list[torch.Tensor], str]:
        """Return a capture that holds for a batch, on all ranks, or why none does."""
        release(self._groups)
        variant, given, reason = self._planned.find(batch)
        if self._ranks is not None:
            number = None if variant is None else variant.number
            if not self._ranks.agree(number):
                return None, [], reason or "another rank needs a new plan"
        return variant, given, reason

    @property
    def plan(self) -> TorchPlan:
        """The plan of the last batch.

        Raises:
            RuntimeError: No batch was seen yet (`prepare` plans without a step), or all
                steps ran in eager mode.
        """
        if self._last is None:
            raise RuntimeError(
                "all steps so far ran in eager mode, as a warning said, and have no "
                "plan"
                if self._steps
                else "nothing is planned before the first batch; prepare(*batch) plans "
                "for one"
            )
        return self._last.plan

    def prepare(self, *args: Any, **kwargs: Any) -> TorchPlan:
        """Plan for batches like this one without running a step."""
        batch = Batch.of(args, kwargs)
        with self._commit.planning():
            variant, _, reason = self._find(batch)
            if variant is None:
                variant, _ = self._capture(batch, reason)
        self._last = variant.planned
        return variant.planned.plan

    def _run(self, variant: Variant, batch: Batch, given: list[torch.Tensor]) -> Any:
        """Run a planned step; return the loss, or the loss and extra results."""
        captured = variant.captured
        self._last = variant.planned
        stored = [given[i] for i in captured.stored]
        if captured.gradients is not None:
            loss, *flat = self._with_own_update(variant, given)
        else:
            loss, *flat = variant.planned.bound.run(given, self._commit)
            self._optimizer._opt_called = True  # what schedulers look for
        for i, j, key in reversed(captured.made):
            parameter = self._optimizer.param_groups[i]["params"][j]
            made = as_sharded(flat.pop(), parameter)
            self._optimizer.state[parameter][key] = made
        extras, changed = captured.extras.filled(flat, stored)
        for effect, value in zip(captured.reads.effects, changed, strict=True):
            effect.place.put(value)
        if self._sharding is not None:
            later = self._sharding.after_first
            if later is not self._sharding:
                self._sharding = later
                self._planned.clear()
        return pair_of(loss, extras, captured.returned)

    def _with_own_update(
        self, variant: Variant, given: list[torch.Tensor]
    ) -> list[Any]:
        """Run the planned passes, then the optimizer's own step."""
        names = variant.captured.gradients or ()
        live, planned = variant.live, variant.planned
        of_name = live.parts.parameters
        # A run empties its list, and the optimizer may replace its own tensors.
        inputs, rest = [given], given[len(live.tensors()) :]

        def passes() -> list[Any]:
            now = inputs.pop() if inputs else [*live.tensors(), *rest]
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
            self._planned.drop(variant)  # more than was measured: measure again
        return returned

    # -- capture

    def _capture(self, batch: Batch, reason: str) -> tuple[Variant, list[torch.Tensor]]:
        """Capture and plan the step for a batch; return the capture and its inputs.

        If the update cannot be recorded, the optimizer makes it itself from then on.

        Raises:
            UnsoundCaptureError: The capture is valid for one run only, and so were the
                ones before it, so that eager mode is the better way.
        """
        if not torch.is_grad_enabled():
            raise UnsupportedError(
                "the step was called with gradients disabled, as within "
                "torch.no_grad(); call it outside"
            )
        if any(tensor.is_nested for tensor in batch.tensors):
            raise UnsoundCaptureError(
                "the batch has a nested tensor, which is not captured; use padding and "
                "a mask"
            )
        if any(map(is_lazy, self._model.parameters())):
            raise UnsoundCaptureError(
                "the model has uninitialized lazy parameters; call the model once on "
                "a batch before the first step"
            )
        self._take_floats()
        if self._compilations:  # though another batch may have been refused
            self._options = replace(self._options, inductor=self._inductor)
        while True:
            self._commit.note_state()
            live = LiveParts(
                self._model, self._optimizer, self._loss_fn, self._settings
            )
            given = [*live.tensors(), *batch.tensors]
            check_devices(given)
            self._warn_if_not_updated(live.parts.parameters)
            try:
                with exclusive_capture(), forked_generators(given):
                    captured, planned = self._plan(live, batch)
            except PlanningError:
                raise
            except NotCompiledError as e:
                self._options = replace(self._options, inductor=False)
                what = "the step"
                if self._compilations:
                    what += f" of {batch.signature}"
                self._warn("inductor", f"{what} runs operation by operation: {e}")
            except Exception as e:
                if floats := self._settings.floats:
                    # Some argument must be a plain number, as a dropout's share must.
                    self._fixed.update(map(_place, floats))
                    self._settings = replace(self._settings, floats=())
                elif isinstance(e, UpdateNotRecordedError):
                    self._settings = replace(self._settings, recorded=False)
                    self._update_reason = str(e)
                    _log.warning(
                        "the optimizer updates in eager mode, after the planned "
                        "passes, which takes memory for all gradients: %s",
                        e,
                    )
                    self._commit.withdraw_state()  # the optimizer makes its own
                    self._commit.keep_state()
                else:
                    raise
            else:
                break
        self._eager_steps = 0
        parts = live.parts
        outer = len(parts.parameters) + len(parts.buffers)
        guards = StepGuards(
            given,
            slice(outer, len(given) - len(batch.tensors)),
            replace(captured.reads, reads=(*live.reads, *captured.reads.reads)),
            captured.known,
            _checked_overlaps(captured, given),
            Settings(),
        )
        inputs = known_values(captured.known, given)
        if inputs is None:
            raise UnsoundCaptureError(
                "the step decides by a value that differs when it is computed again"
            )
        self._shared_captures += 1
        number = self._shared_captures
        variant = Variant(batch.kind, live, guards, captured, planned, number)
        if repeats := captured.reads.repeats:
            self._warn(
                "repeats",
                f"the function of a checkpoint changes {repeats}: eager mode does so "
                "twice, as it computes the function again for the backward pass, and "
                "planned steps once, as without the checkpoint",
            )
        if captured.reads.transient:
            self._count_transient(captured, live)
        else:
            if writes := captured.reads.writes:
                self._warn(
                    "writes",
                    f"the step prints or logs{writes}, which planned steps do only "
                    "when they are captured; do so outside, with what the step returns",
                )
            self._transient_steps = 0
            self._planned.add(variant, reason)
            self._captures += 1
            if self._captures == 1 + _REPLANS_LOGGED:
                _log.warning(
                    "the step was captured again for the 3rd time, because of %s; "
                    "every capture takes as long as many steps",
                    reason,
                )
        return variant, inputs

    def _take_floats(self) -> None:
        """Have numbers that change from step to step be inputs of the graph.

        A hyperparameter of the optimizer is one in all groups once it has changed, any
        other number once it has changed several times.
        """
        read = self._planned.changed
        keys = {r.key for r in self._settings.floats if self._is_group(r.holder)}
        if read is not None and self._is_group(read.holder):
            keys.add(read.key)
        others = [r for r in self._settings.floats if not self._is_group(r.holder)]
        found = (
            scheduled_floats(self._optimizer, keys) if self._settings.recorded else ()
        )
        free = (r for r in found if _place(r) not in self._fixed)
        self._settings = replace(self._settings, floats=(*free, *others))
        if read is None or read.kind not in (Kind.ENTRY, Kind.CELL):
            return
        place = _place(read)
        if any(place == _place(taken) for taken in self._settings.floats):
            return
        if type(read.value) is type(read.now()) is float and place not in self._fixed:
            self._changes[place] += 1
            if self._changes[place] >= _CHANGES_OF_INPUTS:
                floats = (*self._settings.floats, read)
                self._settings = replace(self._settings, floats=floats)
                del self._changes[place]

    def _captured(self, batch: Batch) -> CapturedStep:
        with self._together(batch):
            return capture_step(
                self._model,
                self._loss_fn,
                self._optimizer,
                batch,
                settings=self._settings,
                results=self._results,
                keeps_effects=not self._eager_is_free,
                # Steps compared with eager mode draw its random numbers.
                as_compiled=self._options.inductor and not self._verify,
                sharding=self._sharding,
            )

    def _with_update(
        self, lowered: LoweredStep, step: CapturedStep, live: LiveParts
    ) -> LoweredStep:
        own = EagerUpdate.of(self._optimizer, step, live.parts, self._update_reason)
        return replace(lowered, update=own)

    def _plan(self, live: LiveParts, batch: Batch) -> tuple[CapturedStep, PlannedStep]:
        def planned(step: CapturedStep) -> tuple[CapturedStep, PlannedStep]:
            lowered = LoweredStep.of_captured(step, live.parts)
            ends = tuple(step.names), tuple(step.made), step.gradients
            nbytes = lowered.together, lowered.known_bytes
            key = graph_key(lowered.lowered), ends, nbytes
            found = self._planned.plan_of(key)
            if self._ranks is not None and not self._ranks.agree(
                int(found is not None)
            ):
                found = None
            if found is None:
                lowered = self._with_update(lowered, step, live)
                before = self._options.compiled.count
                try:
                    if self._ranks is None:
                        program = self._program(lowered)
                    else:
                        own = lowered.lowered
                        if self._options.inductor and lowered.compiled is not None:
                            of_sizes = self._options.compiled
                            own = self._ranks.compiled(
                                partial(lowered.compiled, of_sizes, tuned=False)
                            )
                        self._ranks.measure(own, lowered.known)
                        plan = self._ranks.decided(lambda: self._program(lowered).plan)
                        program = PlannedProgram(lowered.finish(own), plan, None)
                    if self._automatic is not None:
                        self._budget = program.plan.budget
                except PlanningError as e:
                    e.args = (f"{e}; this is for {batch.signature}", *e.args[1:])
                    self._check_later_steps(step, batch, e.least_bytes or 0)
                    raise
                self._check_later_steps(step, batch, program.plan.peak_bytes)
                schedule = program.plan.plan.schedule
                bound = bind_step(program.lowered, schedule, program.copies)
                plan = replace(program.plan, source=bound.segment.source)
                if plan.device is not None:
                    report = partial(self._warn_if_reserved, plan)
                    run = watching_reserved(plan.device, report)(bound.segment.run)
                    bound = replace(bound, segment=replace(bound.segment, run=run))
                found = PlannedStep(key, plan, bound)
                self._compilations += self._options.compiled.count > before
                if self._compilations == _COMPILATIONS:
                    why = self._options.compiled.reason
                    why = why and f", as each size is compiled for itself: {why}"
                    self._warn(
                        "compiled",
                        f"the step was compiled for the {_COMPILATIONS}th time, for "
                        f"{batch.signature}, which takes as long as many steps{why}"
                        "; pad batches to a few sizes",
                    )
            return step, found

        return self._results.settled(partial(self._captured, batch), planned)

    def _check_later_steps(self, first: CapturedStep, batch: Batch, least: int) -> None:
        """Check that the budget holds the state that an optimizer's first step makes.

        `least` has the bytes of a plan of the first step, which makes the state in its
        update. All later steps have it in memory during their passes as well.

        Raises:
            PlanningError: Later steps do not fit, or need more than the first one.
        """
        if not first.made or self._automatic is not None or self._ranks is not None:
            return
        (output,) = first.module.graph.find_nodes(op="output")
        values = output.args[0][-len(first.names) - len(first.made) :]
        made = [node.meta["val"] for node in values[: len(first.made)]]
        if least + sum(rounded(tensor.nbytes) for tensor in made) <= self._budget:
            return
        with with_state(self._optimizer, dict(zip(first.made, made, strict=True))):
            live = LiveParts(
                self._model, self._optimizer, self._loss_fn, self._settings
            )

            def planned(step: CapturedStep) -> PlannedProgram:
                lowered = LoweredStep.of_captured(step, live.parts)
                return self._program(self._with_update(lowered, step, live))

            try:
                self._results.settled(partial(self._captured, batch), planned)
            except PlanningError as e:
                if (e.least_bytes or 0) > least:
                    words = f"{e}; this is for {batch.signature}, after the first step"
                    e.args = (words, *e.args[1:])
                    raise e from None
            except Exception as e:  # a later step may be refused, or run eagerly
                _log.debug("the second step was not planned: %s", e)

    def _program(self, lowered: LoweredStep) -> PlannedProgram:
        """Plan a lowered step within the budget."""
        if self._automatic is None:
            program = plan_program(lowered, self._options, self._budget)
        else:
            program = self._automatic.plan(lowered, self._options)
        self._warn_if_reserved(program.plan)
        return program

    def _warn_if_reserved(self, plan: TorchPlan, unforeseen: int = 0) -> None:
        """Warn, once, if more is reserved than the budget: as planned, or in a run."""
        if message := replace(plan, unforeseen_bytes=unforeseen).reserved_warning:
            # A run is deeper in the stack than planning.
            self._warn(f"reserved {unforeseen > 0}", message, 8 if unforeseen else 4)

    def _warn_if_not_updated(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Warn, once, if the model has other parameters than the optimizer."""
        groups = self._optimizer.param_groups
        updated = {id(p) for group in groups for p in group["params"]}
        others = len(updated.difference(map(id, parameters.values())))
        missing = sum(
            p.requires_grad and id(p) not in updated for p in parameters.values()
        )
        if others and missing:
            self._warn(
                "not updated",
                f"steps do not update {missing} parameters of the model, nor would a "
                f"loop of PyTorch: the optimizer has {others} that are not in the "
                "model, which replaced them, as load_state_dict(assign=True) does; "
                "create a new optimizer and a new step",
            )

    def _together(self, batch: Batch) -> AbstractContextManager[None]:
        """Have all ranks capture one step, or none; an error of one ends all."""
        if self._ranks is None:
            return nullcontext()
        return self._ranks.capturing(
            {
                **described(self._model),
                "the input of the step": batch.signature,
                "budget": self._automatic or self._budget,
                "accumulate": self._settings.accumulate,
                "clip_norm": self._settings.clip_norm,
                "clip_value": self._settings.clip_value,
                "the scaler's settings": self._settings.key,
                "the optimizer": repr(self._optimizer),
            }
        )

    def _count_transient(self, captured: CapturedStep, live: LiveParts) -> None:
        """Note a capture that is valid for one run only."""
        self._transient_steps += 1
        if self._transient_steps <= _TRANSIENT_STEPS:
            return
        why = captured.reads.transient
        if self._fits_eagerly(captured, live):
            raise UnsoundCaptureError(f"{why}, at every step")
        self._warn(
            "transient",
            f"the step is captured anew every time, which is slow: {why}; keep what "
            "changes from step to step in a tensor (register_buffer) or do it outside "
            f"of the step. {_ALLOW}",
        )

    def _count_values(self, reason: str) -> None:
        """Note a capture for other values of a batch, if that is why it is needed.

        Raises:
            UnsoundCaptureError: No plan has served two batches for long, so that eager
                mode is the better way.
        """
        if reason == OTHER_VALUES and self._eager_is_free:
            self._other_values += 1
            if self._other_values > _OTHER_VALUES:
                raise UnsoundCaptureError(
                    "each batch needs a plan of its own, because of "
                    f"{OTHER_VALUES}; pad what varies, or multiply by a mask"
                )

    def _is_group(self, holder: Any) -> bool:
        """Return whether something is one of the optimizer's groups of parameters."""
        return any(holder is group for group in self._optimizer.param_groups)

    # -- eager mode

    def _waits(self) -> bool:
        """Return whether the step runs eagerly for now, without another capture.

        A capture is tried again behind 1, 2, 4, 8, ... eager steps: what changed in
        the first steps, as caches do, may have settled.
        """
        count = self._eager_steps
        return count > 0 and count & (count - 1) != 0

    @property
    def _eager_is_free(self) -> bool:
        """True if eager mode is allowed regardless of its memory."""
        return self._fallback == "eager" or math.isinf(self._budget)

    def _may_run_eagerly(self, error: Exception) -> bool:
        """Return whether a step that was not captured runs in eager mode instead.

        It does not where its graph was refused for what it computes: then a capture
        would be refused at every step, and eager mode is the user's choice.
        """
        if self._ranks is not None:
            return False  # the other ranks may not run eagerly
        if isinstance(error, UnsoundCaptureError):
            return self._eager_is_free or self._transient_steps > 0
        if isinstance(error, MucudnnError):
            return self._fallback == "eager" and isinstance(error, UnsupportedError)
        # PyTorch's tracing may fail where eager mode works; an error of the user's own
        # comes from either.
        return self._eager_is_free

    def _fits_eagerly(self, captured: CapturedStep, live: LiveParts) -> bool:
        """Return whether eager mode is allowed for a step that was captured."""
        if self._ranks is not None:
            return False
        if self._eager_is_free:
            return True
        if self._fits is not None:
            return self._fits
        own = EagerUpdate.of(self._optimizer, captured, live.parts, self._update_reason)
        with forked_generators(live.tensors()):
            step = LoweredStep.of_captured(captured, live.parts, own)
            plan = plan_program(step, self._options).plan
        # Eager mode keeps all gradients, and copies of them for a fused update.
        gradients = sum(p.nbytes for p in live.parts.parameters.values())
        self._fits = bool(plan.peak_bytes + 2 * gradients <= self._budget)
        return self._fits

    def _eager(self, batch: Batch, error: Exception | None = None) -> Any:
        """Run one step in eager mode, and say why the first time."""
        self._commit.withdraw_state()  # the optimizer makes its own
        result = run_eager_step(
            self._model, self._loss_fn, self._optimizer, batch, self._settings
        )
        if error is not None:
            kind = (
                "" if isinstance(error, MucudnnError) else f"{type(error).__name__}: "
            )
            self._warn("eager", f"the step runs in eager mode: {kind}{error}")
        self._eager_steps += 1
        return result

    def _warn(self, kind: str, message: str, stacklevel: int = 4) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, stacklevel=stacklevel)


def _place(read: Read) -> Any:
    return read.kind, id(read.holder), read.key


def _checked_overlaps(
    captured: CapturedStep, given: Sequence[torch.Tensor]
) -> Overlaps:
    """Return which inputs of a step share memory.

    Raises:
        UnsoundCaptureError: The step changes one of them: the graph has each input for
            itself, so that the other would not change with it.
    """
    overlaps = overlaps_of(given)
    (output,) = captured.module.graph.find_nodes(op="output")
    inputs = captured.module.graph.find_nodes(op="placeholder")
    results = output.args[0][-len(inputs) :]
    for pair in overlaps:
        if any(results[i] not in inputs for i in pair):
            first, second = (captured.names[i] for i in pair)
            raise UnsoundCaptureError(
                f"{first} and {second} share memory that the step modifies; give each "
                "its own copy (clone), or use one parameter for both"
            )
    return overlaps


# The plans of one training step, and what each was captured for.


_VARIANTS_A_PLAN = 4
"""Captures that are kept for every plan there may be: several may share a plan."""


class PlannedSteps:
    """Captured and planned steps, the most recently used first; at most `most` plans.

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
        """Keep a capture, needed for a reason; drop the least recently used plan."""
        self._variants.insert(0, variant)
        plans = list(dict.fromkeys(v.planned.key for v in self._variants))
        if len(plans) > self._most:
            if not self._warned:
                warnings.warn(
                    f"more than max_plans={self._most} plans are needed, so the least "
                    "recently used one is dropped; the last one was needed because "
                    f"of {reason}. Pad batches to a few sizes, keep numbers that "
                    "change between steps in tensors, or raise max_plans",
                    stacklevel=5,
                )
                self._warned = True
            self._variants = [v for v in self._variants if v.planned.key != plans[-1]]
        del self._variants[_VARIANTS_A_PLAN * self._most :]

    def clear(self) -> None:
        """Forget all captures."""
        self._variants.clear()

    def drop(self, variant: Variant) -> None:
        """Forget the plan of a capture."""
        key = variant.planned.key
        self._variants = [v for v in self._variants if v.planned.key != key]
