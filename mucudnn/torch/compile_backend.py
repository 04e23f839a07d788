"""`backend`: a memory budget for models compiled with `torch.compile`.

    model = torch.compile(model, backend=mt.backend(budget="8GiB"))

AOTAutograd hands over forward and backward as one graph. It is planned as one and cut
where the forward pass has ended. What the second half still needs are ordinary tensors,
which autograd keeps: those on the device, those on the host, and states of the random
generator. So a forward pass without a backward pass leaves nothing behind, several may
be under way at once, and autograd sees what has been changed between the halves.

Errors are raised by the first call of a graph, not while it is compiled: Dynamo would
wrap them in its own, or with `suppress_errors` run the model without a budget.
"""

import copy
import functools
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from mucudnn.arguments import a_flag
from mucudnn.errors import MucudnnError, PlanningError
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import exact_bytes, format_bytes
from mucudnn.runtime.environment import USERS
from mucudnn.runtime.executor.tiers import TierChoice, parse_tiers
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.torch.capture.exclusive import exclusive_capture
from mucudnn.torch.capture.fake_tensors import KernelResults
from mucudnn.torch.capture.joint import BySize, Joint, has_symbols
from mucudnn.torch.conv.fronts import ConvolutionChoice
from mucudnn.torch.costs.measure import WrongResultsError, measured
from mucudnn.torch.execution.bound_step import Halves, bind_halves, runner_of
from mucudnn.torch.execution.devices import device_of
from mucudnn.torch.execution.tiers import StepTiers, tiers_within
from mucudnn.torch.fusion.switch import fusing_of
from mucudnn.torch.internals import (
    aot_compiled,
    break_reasons,
    breaks_of,
    bucket_bytes,
    examples_of,
    kernels_corrected,
    name_of_graph,
    outside_of_tracing,
    refresh_values,
    while_compiling,
)
from mucudnn.torch.lowering.lowered import Lowered
from mucudnn.torch.plan import TorchPlan
from mucudnn.torch.plan_store import PlanCacheChoice, PlanStore, open_plans
from mucudnn.torch.planning import Planner, as_budget
from mucudnn.torch.source_lines import line_of_stack

_SHARE = 1 / 3
"""How much of what is left a graph takes that ends in a break."""


@dataclass(frozen=True)
class GraphSource:
    """Where a graph comes from.

    Attributes:
        name: What it is called.
        function: The function that it is part of; another version of it is the same.
        ends: The user's line where a break ends it; None if none does.
        resumes: Whether it begins behind a break.
        share: How much of what is left it takes if it ends in a break.
    """

    name: str
    function: str
    ends: str | None = None
    resumes: bool = False
    share: float = _SHARE


_BUCKET = (
    "the buckets of DistributedDataParallel (with torch._dynamo.config.optimize_ddp = "
    "False there is one graph)"
)


_log = logging.getLogger(__name__)


def backend(
    *,
    budget: float | str | None = None,
    tuner: Tuner | None = None,
    cache: PlanCacheChoice = USERS,
    inductor: bool = False,
    tiers: str | TierChoice | Sequence[str | TierChoice] = (),
) -> "CompileBackend":
    """A backend for `torch.compile` that keeps a budget in training.

    The budget counts what one compiled graph has in use, forward to backward: its
    parameters and buffers, activations, gradients, results and scratch memory. The
    other inputs, the gradients that come in, and the optimizer's state are the
    caller's. Without gradients nothing is planned.

    A model with graph breaks is several graphs, and they share the budget: one that
    ends in a break takes a third of what is left, or what it cannot do without, and
    the last one the rest. Models that are compiled apart with one backend keep it each
    for itself; a warning says so, once, if all together may need more. In
    DistributedDataParallel, around or inside of it, Dynamo cuts a graph at the gradient
    buckets: the parts share the budget by the bytes of their tensors. What Dynamo runs
    eagerly is in no graph and keeps nothing: after a break in a loop, beyond
    `torch._dynamo.config.recompile_limit` versions of one function (8), modules with
    full backward hooks, recurrent ones, or what `torch.compiler.disable` marks.
    `fullgraph=True` refuses breaks, and `left_eager` has Dynamo's reasons; reading
    `plans` or `peak_bytes` warns if nothing was planned for them.

    Every size of a batch has a plan of its own, made when it is first seen; sizes do
    not count as versions, unless `dynamic=False` makes them. With `retain_graph=True`
    gradients are right, but what the first backward pass would let go of stays, beyond
    the plan.

    What a graph returns may be changed in place before the backward pass. Where that
    pass reads it, autograd raises, as in eager mode. One case PyTorch 2.13 itself does
    not see, with any backend: a view that is returned without what it is a view of,
    such as a linear layer's result of three dimensions.

    Operations that draw random numbers draw them in eager's order from PyTorch's
    generator; one that runs again gets the numbers it had, unless another thread draws
    at that moment.

    Args:
        budget: Bytes, or a size such as "8GiB"; None plans without a limit.
        tuner: As `train_step` takes it.
        cache: Folder of the file `plans.sqlite` that remembers measurements and plans;
            by default the cache in the user's cache directory; None remembers nothing.
        inductor: As `train_step` takes it.
        tiers: As `train_step` takes it; sizes hold for every graph that is under way.

    Raises:
        ValueError: The budget is no size, the tuner has another backend, or a tier is
            none.
        TypeError: It is no budget, or no tuner, or `inductor` is no bool.
    """
    limit = as_budget(budget)
    return CompileBackend(
        limit,
        plans=open_plans(cache),
        tuner=tuner,
        inductor=inductor,
        tiers=tiers_within(limit, tiers, shared=False),
    )


def compile_graph(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """What `torch.compile(backend="mucudnn", options={"budget": ...})` calls.

    Plans are logged by `mucudnn.torch.compile_backend`, as information.

    Raises:
        ValueError: By the first call: an option is not known, or its value no size.
        TypeError: By the first call: the budget is neither a number nor text.
    """
    given = dict(options or {})
    budget, tuner = given.pop("budget", None), given.pop("tuner", None)
    inductor, tiers = given.pop("inductor", False), given.pop("tiers", ())
    if given:
        unknown = ", ".join(map(repr, given))
        wrong = ValueError(
            f"unknown option {unknown}; there are 'budget', 'tuner', 'inductor' and "
            "'tiers'"
        )
        return _refusal(wrong)
    try:
        limit, _ = as_budget(budget), ConvolutionChoice(tuner)  # which checks it
        named = _named(limit, tuner, a_flag("inductor", inductor), parse_tiers(tiers))
    except (TypeError, ValueError) as e:
        return _refusal(e)
    return named(module, inputs)


@functools.cache
def _named(
    budget: float,
    tuner: Tuner | None,
    inductor: bool,
    tiers: tuple[TierChoice, ...],
) -> "CompileBackend":
    """One backend a budget, so that graphs of one model know of each other."""
    away = tiers_within(budget, tiers, shared=False)
    plans = open_plans(USERS)
    return CompileBackend(
        budget, plans=plans, tuner=tuner, inductor=inductor, tiers=away
    )


class CompileBackend:
    """Plans every graph that it is given.

    Args:
        budget: Bytes for all graphs of one model.
        costs: What tells times and scratch memory of a graph's nodes.
        plans: What was measured and planned before; None remembers nothing.
        tuner: Measures other ways to run the convolutions, if they are wanted.
        inductor: Whether operations are fused.
        tiers: Where to what leaves goes; None means the host's memory.
    """

    def __init__(
        self,
        budget: float,
        costs: Callable[[Lowered], Profile] = measured,
        *,
        plans: PlanStore | None = None,
        tuner: Tuner | None = None,
        inductor: bool = False,
        tiers: StepTiers | None = None,
    ) -> None:
        self._budget = SharedBudget(budget)
        self._costs = costs
        self._tuner = tuner
        self._choice = ConvolutionChoice(tuner)
        self._store = plans or PlanStore()
        self._fusing = fusing_of(inductor, self._store)
        self._tiers = tiers
        self._results = KernelResults()
        self._planned: dict[Any, Halves] = {}
        self._split: tuple[Any, list[int]] = None, []
        self._warned = False
        self._eager = LeftEager()
        self._plans: list[TorchPlan] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the budget, and plans for itself."""
        build = functools.partial(
            CompileBackend,
            plans=self._store,
            tuner=self._tuner,
            inductor=self._fusing is not None,
            tiers=self._tiers,
        )
        return build, (self._budget.budget, self._costs)

    @property
    def plans(self) -> list[TorchPlan]:
        """What was decided, in the order in which graphs were first seen.

        Each names its graph, where that begins in the user's code, and sizes.
        """
        if not self._plans:
            self._eager.warn()
        return self._plans

    @property
    def peak_bytes(self) -> int:
        """The most in use while every graph is under way once, at its largest size."""
        if not self._plans:
            self._eager.warn()
        return self._budget.peak_bytes

    @property
    def left_eager(self) -> tuple[str, ...]:
        """Why Dynamo left something eager, of all functions since this was made."""
        return self._eager.reasons

    def __call__(
        self, module: torch.fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Compile one graph."""
        function, number = name_of_graph(module)
        stacks = (node.meta.get("stack_trace") for node in module.graph.nodes)
        line = next(filter(None, map(line_of_stack, stacks)), "")
        name = f"graph {number}".rstrip() + line
        plain = GraphSource(name, function + line, *breaks_of(module))
        parts: list[int] = []
        at = -1
        if (nbytes := bucket_bytes(module)) is not None:
            # The parts of one graph share its metadata and come in their order.
            if self._split[0] is not module.meta:
                self._split = module.meta, []
            parts = self._split[1]
            at = len(parts)
            parts.append(nbytes)

        def at_sizes(given: Sequence[Any], sizes: str) -> Callable[..., Any]:
            source = _part(plain, parts, at) if parts else plain
            source = replace(
                source, name=f"{source.name}, at {sizes}" if sizes else source.name
            )
            with while_compiling():
                examples = examples_of(given)
                return self._compiled_whole(module, examples, source, static=True)

        # A part is planned when it is first called: all others are known then.
        if parts or has_symbols(inputs):
            return BySize(inputs, at_sizes)
        return self._compiled_whole(module, inputs, plain, static=False)

    @exclusive_capture()
    def _compiled_whole(
        self,
        module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        source: GraphSource,
        *,
        static: bool,
    ) -> Callable[..., Any]:
        """Compile it, and once more while kernels return what PyTorch does not say."""
        partition = functools.partial(self._partitioned, source)
        results = self._results
        while True:
            known = len(results)
            with kernels_corrected(inputs, results.corrected):
                run = aot_compiled(module, inputs, partition, runner_of, static=static)
            if len(results) == known:
                return run

    def _partitioned(
        self,
        source: GraphSource,
        joint: torch.fx.GraphModule,
        joint_inputs: Sequence[Any],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Two graphs of one node each: the halves of one planned program."""
        del joint_inputs
        own = tuple(static_lifetime_input_indices or ())
        refresh_values(joint)
        parts = Joint.of(joint, num_fwd_outputs)
        try:
            halves = self._halves(source, parts, own)
        except (MucudnnError, ValueError) as e:  # the latter of a tier's folder
            if isinstance(e, WrongResultsError):
                self._results.learn(joint, e)
            return parts.refused(_refusal(e))
        return parts.split(halves)

    def _halves(self, source: GraphSource, parts: Joint, own: Sequence[int]) -> Halves:
        """Two halves of a program; the same graph of a function is planned once."""
        parts.check()
        key = source.function, parts.key(own)
        if key not in self._planned:
            with outside_of_tracing():
                lowered = parts.lowered()
                mine = {lowered.inputs[i] for i in own}
                given = {t for t in lowered.inputs if t is not None} - mine
                store = self._store
                profile = self._choice.profile(lowered, self._costs, store)
                away = self._tiers
                device = device_of(lowered.layouts)
                tiers = away.measured(device) if away else ()
                whole = Planner(lowered, profile, given, tiers=tiers)
                fusing = self._fusing

                def planned(budget: float) -> tuple[Planner, TorchPlan]:
                    if fusing is not None:
                        return fusing.plan(whole, budget, store)
                    return whole, whole.plan(budget, store)

                planner, plan = self._budget.plan(source, planned)
                bound = self._choice.bound(planner.lowered, plan.plan)
                copies = away.copies(plan.plan) if away else None
                halves = bind_halves(bound, plan.plan.schedule, parts.count, copies)
            self._note(source, plan, halves)
            self._planned[key] = halves
        return self._planned[key]

    def _note(self, source: GraphSource, plan: TorchPlan, halves: Halves) -> None:
        program = f"{halves.forward.source}\n{halves.backward.source}"
        self._plans.append(replace(plan, source=program, name=source.name))
        _log.info("%s", self._plans[-1])
        shared = self._budget
        shared.note(source, plan.peak_bytes)
        if not self._warned and (said := shared.apart(source)):
            self._warned = True
            warnings.warn(said, stacklevel=2)


def _part(whole: GraphSource, parts: Sequence[int], number: int) -> GraphSource:
    """Return the source of one of the parts that DDPOptimizer cut a graph into."""
    left = sum(parts[number:])
    last = number == len(parts) - 1
    return replace(
        whole,
        name=f"{whole.name}, bucket {number + 1} of {len(parts)}",
        function=f"{whole.function} {number}",
        ends=None if last else _BUCKET,
        resumes=whole.resumes or number > 0,
        share=parts[number] / left if left else 1 / len(parts),
    )


def _refusal(error: Exception) -> Callable[..., Any]:
    """Raises an error, anew each time."""

    def refuse(*_: Any) -> Any:
        raise copy.copy(error)

    return refuse


# What Dynamo leaves to eager mode, said where the user asks what was planned.
#
# Dynamo tells a backend of what it has captured alone: a model with full backward
# hooks, with recurrent cells or with a function that is not to be compiled runs without
# it, and PyTorch logs that at most. But it counts its reasons.


_SHOWN = 3


class LeftEager:
    """Dynamo's reasons from now on, of all compiled functions of this process."""

    def __init__(self) -> None:
        self._before: Mapping[str, int] = break_reasons()
        self._warned = False

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why something runs in no graph, each reason once; empty if nothing does."""
        now = break_reasons()
        before = self._before
        return tuple(why for why, n in now.items() if n > before.get(why, 0))

    def warn(self) -> None:
        """Say, once, that there is no plan as there was nothing to plan."""
        reasons = self.reasons
        if self._warned or not reasons:
            return
        self._warned = True
        more = f" ({len(reasons) - _SHOWN} more)" if len(reasons) > _SHOWN else ""
        warnings.warn(
            "nothing was planned, so that no budget is kept: Dynamo has left to eager "
            f"mode what it cannot capture: {'; '.join(reasons[:_SHOWN])}{more}. "
            "torch.compile(..., fullgraph=True) raises there and says at which line; "
            "train_step plans without Dynamo",
            stacklevel=3,
        )


# One budget for the graphs that a model falls into where Dynamo breaks it.
#
# While one of them runs, those before it hold what their backward passes need, and
# those behind it have parameters and gradients: of each no more than its own peak. So
# peaks that add up to the budget are a promise for all of them.
#
# A graph is planned when it is first called, and what follows a break is not known
# then. So a graph that ends in one takes a third of what is left, or what it cannot do
# without; the last one takes the rest. The parts that Dynamo cuts a model in
# DistributedDataParallel into are all known: each takes as much of what is left as its
# tensors are of those of the parts that are left.


Planned = TypeVar("Planned")


@dataclass(frozen=True)
class _Part:
    """What one graph has in use at most."""

    source: GraphSource
    model: int
    peak: int


class SharedBudget:
    """Divides a budget among the graphs of each model.

    Args:
        budget: Bytes for all graphs of one model together.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self._parts: dict[str, _Part] = {}
        self._last: _Part | None = None
        self._models = 0

    @property
    def peak_bytes(self) -> int:
        """All peaks together, each of its graph's largest version."""
        return sum(part.peak for part in self._parts.values())

    def apart(self, source: GraphSource) -> str:
        """That several models may need more than the budget together; empty if not.

        Args:
            source: The last graph of theirs.
        """
        models = {part.model for part in self._parts.values()}
        if len(models) == 1 or self.peak_bytes <= self.budget:
            return ""
        first = next(iter(self._parts.values())).source.name
        return (
            f"there are several models ({first}; {source.name}), and each keeps the "
            f"budget of {format_bytes(int(self.budget), self.peak_bytes)} for itself: "
            f"together up to {format_bytes(self.peak_bytes, int(self.budget))} so far"
        )

    def plan(self, source: GraphSource, planned: Callable[[float], Planned]) -> Planned:
        """A graph in its share of the budget.

        Args:
            source: Where it comes from.
            planned: Plans it within so many bytes.

        Raises:
            PlanningError: It does not fit, by itself or beside the others; says a
                budget that works.
        """
        others = self._others(source)
        left = max(0.0, self.budget - sum(part.peak for part in others))
        try:
            if source.ends is None:
                return planned(left)
            try:
                return planned(left * source.share)
            except PlanningError as e:
                if e.least_bytes is None:
                    raise
                return planned(min(e.least_bytes, left))
        except PlanningError as e:
            if not others or e.least_bytes is None:
                raise
            raise self._refusal(source, others, e.least_bytes, e.node) from None

    def note(self, source: GraphSource, peak: int) -> None:
        """Remember what a graph has in use at most."""
        model = self._model(source)
        self._models = max(self._models, model + 1)
        known = self._parts.get(source.function)
        if known is not None and known.model == model:
            peak = max(peak, known.peak)
        self._last = self._parts[source.function] = _Part(source, model, peak)

    def _model(self, source: GraphSource) -> int:
        """Which model a graph is of: that of the graph before it behind a break."""
        known, last = self._parts.get(source.function), self._last
        if known is not None:
            return known.model
        if last is not None and (source.resumes or last.source.ends is not None):
            return last.model
        return self._models

    def _others(self, source: GraphSource) -> list[_Part]:
        """The graphs of the same model, in the order in which they came."""
        model = self._model(source)
        every = self._parts.items()
        return [p for f, p in every if p.model == model and f != source.function]

    def _refusal(
        self, source: GraphSource, others: list[_Part], least: int, node: str | None
    ) -> PlanningError:
        """Why there is no plan, and with which budget there would be one.

        A graph that ends in a break leaves of it all but what it cannot do without, or
        all but its share: whichever is less.
        """
        needed = least
        for part in reversed(others):
            shared = math.ceil(needed / (1 - part.source.share))
            needed = max(part.peak + needed, shared)
        ends = dict.fromkeys(p.source.ends or p.source.name for p in others)
        breaks = ", ".join(ends)
        used = sum(part.peak for part in others)
        return PlanningError(
            f"{source.name} is one of {len(others) + 1} graphs that share the budget "
            f"of {exact_bytes(int(self.budget))}, with graph breaks at {breaks}: up to "
            f"{exact_bytes(used)} of it are the other graphs', and it needs "
            f"{exact_bytes(least)}; a budget of {exact_bytes(needed)} works"
            f"{'' if source.ends is None else ' up to its end'}. "
            "torch.compile with fullgraph=True says why a graph ends",
            node=node,
            short_by=needed - int(self.budget),
            least_bytes=needed,
        )
