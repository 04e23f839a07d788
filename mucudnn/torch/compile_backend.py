"""`backend`: a memory budget for models compiled with `torch.compile`.

    model = torch.compile(model, backend=mt.backend(budget="8GiB"))

AOTAutograd hands over forward and backward as one joint graph. It is planned as one
step and cut behind the last forward node. What the second half still needs are ordinary
tensors that autograd saves: on the device, on the host, and states of the random
generator. So a forward pass without a backward pass leaks nothing, several may be under
way at once, and autograd sees what has been changed between the halves.

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
from typing import Any, ParamSpec, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mucudnn.errors import MucudnnError, PlanningError, UnsupportedError
from mucudnn.ir.sizes import exact_bytes, format_bytes
from mucudnn.runtime.environment import USERS
from mucudnn.runtime.executor.tiers import TierChoice, parse_tiers
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.torch.capture.exclusive import exclusive_capture
from mucudnn.torch.capture.fake_tensors import KernelResults
from mucudnn.torch.capture.joint import BySize, Joint, has_symbols
from mucudnn.torch.costs.measure import WrongResultsError
from mucudnn.torch.execution.bound_step import Halves, bind_halves, runner_of
from mucudnn.torch.execution.cuda_memory import watching_reserved
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
from mucudnn.torch.lowering.lowered import NotCompiledError
from mucudnn.torch.plan import TorchPlan
from mucudnn.torch.plan_program import (
    LoweredStep,
    PlannedProgram,
    PlanOptions,
    plan_program,
)
from mucudnn.torch.plan_store import PlanCacheChoice
from mucudnn.torch.planning import parse_budget, too_small
from mucudnn.torch.source_lines import line_of_stack

_SHARE = 1 / 3
"""Share of the remaining budget that a graph gets that ends in a graph break."""

_BUCKET = (
    "the buckets of DistributedDataParallel (with torch._dynamo.config.optimize_ddp = "
    "False there is one graph)"
)

_OPTIONS = ("budget", "tuner", "inductor", "tiers")
"""Options of `torch.compile(backend="mucudnn", options=...)`."""

_REFUSED = ("split", "offload_state")
"""Options of `train_step` that are refused with a reason."""

_SHOWN = 3
"""Dynamo's reasons that a warning shows."""

_log = logging.getLogger(__name__)

_P = ParamSpec("_P")


def _refuse_graphs(
    make: Callable[_P, "CompileBackend"],
) -> Callable[_P, "CompileBackend"]:
    """Refuse `backend=mt.backend`, of which Dynamo calls the function with a graph."""

    @functools.wraps(make)
    def made(*args: _P.args, **options: _P.kwargs) -> Any:
        if args and isinstance(args[0], torch.fx.GraphModule):
            return _raiser(
                TypeError(
                    "backend=mt.backend is a function that makes a backend; call it: "
                    "torch.compile(model, backend=mt.backend(budget=...))"
                )
            )
        return make(*args, **options)

    return made


@_refuse_graphs
def backend(
    *,
    budget: float | str | None = None,
    tuner: Tuner | None = None,
    cache: PlanCacheChoice = USERS,
    inductor: bool = False,
    tiers: str | TierChoice | Sequence[str | TierChoice] = (),
) -> "CompileBackend":
    """Make a backend for `torch.compile` that keeps a memory budget in training.

    The budget counts the memory of one compiled graph, forward and backward: its
    parameters and buffers, activations, gradients, results and scratch memory. It does
    not count other inputs, incoming gradients and optimizer state. It counts one run of
    a graph: a warning says, once, if saved tensors of several are in memory at once, as
    of a model that is called twice for one loss. Without gradients nothing is planned
    or compiled: a graph runs operation by operation.

    The graphs of a model with graph breaks share the budget: a graph that ends in a
    break gets a third of the remaining budget, or its minimum, and the last one gets
    the rest. Models that are compiled separately with one backend each have the whole
    budget; a warning says so, once, if they may exceed it together. With
    DistributedDataParallel, around or inside it, Dynamo divides a graph at the gradient
    buckets, and the parts share the budget in proportion to their tensors. Code that
    Dynamo runs eagerly is not planned: after a break in a loop, beyond
    `torch._dynamo.config.recompile_limit` versions of a function (8), modules with
    full backward hooks, recurrent modules, and code under `torch.compiler.disable`.
    `fullgraph=True` refuses breaks, and `left_eager` lists Dynamo's reasons; reading
    `plans` or `peak_bytes` warns if nothing was planned.

    Each batch size has its own plan, made when the size is first seen; sizes count as
    versions only with `dynamic=False`. With symbolic sizes, each value of a number that
    an operation needs, such as a dropout rate, has its own plan, too. With
    `retain_graph=True` gradients are correct, but tensors that the first backward pass
    would free stay in memory, beyond the plan.

    Results of a graph may be modified in place before the backward pass. If that pass
    reads them, autograd raises an error, as in eager mode. PyTorch 2.13 itself misses
    one case with any backend: a view that is returned without its base, such as the
    result of a linear layer with three dimensions.

    Random operations draw from PyTorch's generator in eager mode's order. A recomputed
    operation gets the same numbers, unless another thread draws at the same time.

    Args:
        budget: Bytes, or a size such as "8GiB"; None plans without a limit.
        tuner: As `train_step` takes it.
        cache: Folder of the file `plans.sqlite` with measurements and plans, by default
            the cache in the user's cache directory; None stores nothing.
        inductor: As `train_step` takes it.
        tiers: As `train_step` takes it; sizes apply to every graph in flight.

    Raises:
        ValueError: The budget is not a size, the tuner has another backend, or a tier
            is unknown.
        TypeError: An argument has the wrong type.
    """
    limit = parse_budget(budget)
    options = PlanOptions.of(
        "backend", limit, tuner=tuner, cache=cache, inductor=inductor, tiers=tiers
    )
    return CompileBackend(limit, options)


def compile_graph(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph for `torch.compile(backend="mucudnn", options={"budget": ...})`.

    Plans are logged by `mucudnn.torch.compile_backend`, as information.

    Raises:
        ValueError: By the first call: an option is not known, or invalid.
        TypeError: By the first call: an option is of another type.
    """
    given = dict(options or {})
    if unknown := ", ".join(repr(n) for n in given if n not in _OPTIONS + _REFUSED):
        return _raiser(
            ValueError(
                f"unknown option {unknown}; choose one of: 'budget', 'tuner', "
                "'inductor', 'tiers'"
            )
        )
    try:
        budget = parse_budget(given.pop("budget", None))
        PlanOptions.of("backend", budget, **given)  # which checks them
        named = _backend_of(
            budget=budget,
            tuner=given.get("tuner"),
            inductor=given.get("inductor", False),
            tiers=parse_tiers(given.get("tiers", ())),
        )
    except (TypeError, ValueError) as e:
        return _raiser(e)
    return named(module, inputs)


_backend_of = functools.cache(backend)
"""Returns the one backend of some options: graphs of one model share its budget."""


@dataclass(frozen=True)
class GraphSource:
    """Origin of a graph: the compiled function and its place in it.

    Attributes:
        function: The function that it is part of; the same for all of its versions.
        ends: The user's line where a graph break ends it; None if none does.
        resumes: Whether it begins behind a graph break.
        share: Share of the remaining budget that it gets if it ends in a break.
    """

    name: str
    function: str
    ends: str | None = None
    resumes: bool = False
    share: float = _SHARE


class CompileBackend:
    """A backend of `torch.compile` that plans every graph it receives.

    Args:
        budget: Bytes for all graphs of one model.
        options: How graphs are planned.
        planned: Plans a graph within a budget, and returns its peak memory, too.
    """

    def __init__(
        self,
        budget: float,
        options: PlanOptions | None = None,
        planned: "GraphPlanner | None" = None,
    ) -> None:
        self._budget = SharedBudget(budget)
        self._options = PlanOptions() if options is None else options
        self._plan = _plan_graph if planned is None else planned
        self._results = KernelResults()
        self._planned: dict[Any, Halves] = {}
        self._split: tuple[Any, list[int]] = None, []
        self._warned = self._warned_of_runs = False
        self._plans: list[TorchPlan] = []
        self._saved: dict[str, list[StorageWeakRef]] = {}
        self._reasons_before = break_reasons()
        self._warned_of_eager = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy budget and options; a copy plans for itself."""
        made = functools.partial(
            CompileBackend, options=self._options, planned=self._plan
        )
        return made, (self._budget.budget,)

    @property
    def plans(self) -> list[TorchPlan]:
        """Plans in the order in which graphs were first seen.

        Each has the name and sizes of its graph and the line where it begins.
        """
        self._warn_if_eager()
        return self._plans

    @property
    def peak_bytes(self) -> int:
        """Peak memory with every graph in memory once, at its largest size."""
        self._warn_if_eager()
        return self._budget.peak_bytes

    @property
    def left_eager(self) -> tuple[str, ...]:
        """Dynamo's reasons for running code eagerly since this backend was created.

        Dynamo passes only captured code to a backend. Models with full backward hooks,
        recurrent cells or functions excluded from compilation run without it, which
        PyTorch logs at most. Dynamo counts its reasons, which are listed here.
        """
        before = self._reasons_before
        return tuple(
            why for why, n in break_reasons().items() if n > before.get(why, 0)
        )

    def _warn_if_eager(self) -> None:
        """Warn, once, if nothing was planned because nothing was captured."""
        reasons = () if self._plans else self.left_eager
        if self._warned_of_eager or not reasons:
            return
        self._warned_of_eager = True
        more = f" ({len(reasons) - _SHOWN} more)" if len(reasons) > _SHOWN else ""
        warnings.warn(
            "nothing was planned, so no budget is kept: Dynamo runs in eager mode "
            f"what it cannot capture: {'; '.join(reasons[:_SHOWN])}{more}. "
            "torch.compile(..., fullgraph=True) raises an error that names the line; "
            "train_step does not use Dynamo",
            stacklevel=3,
        )

    def __call__(
        self, module: torch.fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Compile one graph."""
        for node in module.graph.nodes:
            changed = node.target is torch.Tensor.set_
            if changed and node.args[0].op == "placeholder":
                where = line_of_stack(node.meta.get("stack_trace"))
                return _raiser(
                    UnsupportedError(
                        f"a graph assigns to .data of an input{where}; modify the "
                        "tensor in place, within torch.no_grad()"
                    )
                )
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
            with while_compiling(given):
                examples = examples_of(given)
                return self._compiled_whole(module, examples, source, static=True)

        # A part is planned when it is first called: all others are known then.
        if parts or has_symbols(inputs):
            return BySize(module, inputs, at_sizes)
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
        """Compile a graph, again while kernels return other layouts than it says."""
        results = self._results
        partition = functools.partial(self._partitioned, source)
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
        """Return two graphs of one node each: the halves of one planned program."""
        del joint_inputs
        own = tuple(static_lifetime_input_indices or ())
        refresh_values(joint)
        parts = Joint.of(joint, num_fwd_outputs)
        try:
            halves = self._halves(source, parts, own)
        except (MucudnnError, ValueError) as e:  # the latter of a tier's folder
            if isinstance(e, WrongResultsError):
                self._results.learn(joint, e)
            return parts.refused(_raiser(e))
        return parts.split(halves)

    def _halves(self, source: GraphSource, parts: Joint, own: Sequence[int]) -> Halves:
        """Plan a graph and cut it in halves; equal graphs of a function only once."""
        parts.check()
        with outside_of_tracing():
            step = LoweredStep.of_joint(parts, own)
            key = source.function, parts.key(step.lowered, own)
        if key not in self._planned:
            with outside_of_tracing():
                # What Inductor cannot compile runs operation by operation.
                def plan(budget: float) -> tuple[PlannedProgram, int]:
                    try:
                        return self._plan(step, self._options, budget)
                    except NotCompiledError as e:
                        message = f"{source.name} runs operation by operation: {e}"
                        warnings.warn(message, stacklevel=2)
                    options = replace(self._options, inductor=False)
                    return self._plan(step, options, budget)

                program, peak = self._budget.plan(source, plan)
                schedule = program.plan.plan.schedule
                halves = bind_halves(
                    program.lowered, schedule, parts.count, program.copies
                )
            one_layer = self._plan is _plan_graph
            if (
                own
                and halves.private is not None
                and one_layer
                and math.isfinite(self._budget.budget)
            ):
                saved = self._saved.setdefault(source.function, [])
                at = parts.count.results + halves.private
                run = functools.partial(
                    self._run_forward, source.name, saved, at, halves.forward.run
                )
                halves = replace(halves, forward=replace(halves.forward, run=run))
            if program.plan.device is not None and one_layer:
                report = functools.partial(_warn_if_reserved, source.name, program.plan)
                watched = watching_reserved(program.plan.device, report)
                forward, backward = (
                    replace(half, run=watched(half.run))
                    for half in (halves.forward, halves.backward)
                )
                halves = replace(halves, forward=forward, backward=backward)
            self._planned[key] = halves
            code = f"{halves.forward.source}\n{halves.backward.source}"
            found = replace(program.plan, source=code, name=source.name)
            self._plans.append(found)
            _log.info("%s", found)
            self._budget.note(source, peak)
            _warn_if_reserved(source.name, found)
            message = self._budget.exceeded_by_models(source)
            if message and not self._warned:
                self._warned = True
                warnings.warn(message, stacklevel=2)
        return self._planned[key]

    def _run_forward(
        self,
        name: str,
        saved: list[StorageWeakRef],
        at: int,
        run: Callable[[list[Any]], list[Any]],
        args: list[Any],
    ) -> list[Any]:
        """Run a forward half; warn, once, if saved tensors of several runs are held.

        Args:
            name: The graph.
            saved: Storages of one saved tensor of each earlier run, if still in use.
            at: Position of this tensor in the results.
            run: The forward half.
            args: Its arguments.
        """
        results = run(args)
        saved[:] = [ref for ref in saved if not ref.expired()]
        saved.append(StorageWeakRef(results[at].untyped_storage()))
        if len(saved) > 1 and not self._warned_of_runs:
            self._warned_of_runs = True
            warnings.warn(
                f"saved tensors of {len(saved)} runs of {name} are in memory at once, "
                "and the budget counts one run: each run needs its backward pass, or "
                "torch.no_grad(), before the next one; for equal layers, "
                "mt.compile_layers(layers, budget=...) counts every layer",
                stacklevel=2,
            )
        return results


GraphPlanner = Callable[[LoweredStep, PlanOptions, float], tuple[PlannedProgram, int]]
"""Plans a graph within a budget; returns it with the peak memory that it stands for."""


def _plan_graph(
    step: LoweredStep, options: PlanOptions, budget: float
) -> tuple[PlannedProgram, int]:
    """Plan a graph of which one run is in memory at a time."""
    program = plan_program(step, options, budget)
    return program, program.plan.peak_bytes


def _warn_if_reserved(name: str, plan: TorchPlan, unforeseen: int = 0) -> None:
    """Warn if more is reserved than a graph's budget: as planned, or in a run."""
    if message := replace(plan, unforeseen_bytes=unforeseen).reserved_warning:
        warnings.warn(f"{name}: {message}", stacklevel=2)


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


def _raiser(error: Exception) -> Callable[..., Any]:
    """Return a function that raises a new copy of an error at every call."""

    def refuse(*_: Any) -> Any:
        raise copy.copy(error)

    return refuse


# One budget for the graphs that a model falls into where Dynamo breaks it.
#
# While one of them runs, those before it hold what their backward passes need, and
# those behind it have parameters and gradients: each no more than its own peak. So if
# all peaks together are within the budget, the budget is kept.
#
# A graph is planned when it is first called, and what follows a break is not known
# then. So a graph that ends in one takes a third of what is left, or its least budget;
# the last one takes the rest. The parts that Dynamo cuts a model in
# DistributedDataParallel into are all known: each takes as much of what is left as its
# tensors are of those of the parts that are left.


Planned = TypeVar("Planned")


@dataclass(frozen=True)
class _Part:
    """The peak memory of one graph."""

    source: GraphSource
    model: int
    peak: int


class SharedBudget:
    """A budget that is divided among the graphs of each model."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self._parts: dict[str, _Part] = {}
        self._last: _Part | None = None
        self._models = 0

    @property
    def peak_bytes(self) -> int:
        """All peaks together, each of its graph's largest version."""
        return sum(part.peak for part in self._parts.values())

    def exceeded_by_models(self, source: GraphSource) -> str:
        """Return a warning if all models together may exceed the budget; else empty."""
        models = {part.model for part in self._parts.values()}
        if len(models) == 1 or self.peak_bytes <= self.budget:
            return ""
        first = next(iter(self._parts.values())).source.name
        return (
            f"there are several models ({first}; {source.name}), and each has its own "
            f"budget of {format_bytes(int(self.budget), self.peak_bytes)}: together "
            f"up to {format_bytes(self.peak_bytes, int(self.budget))} so far"
        )

    def plan(self, source: GraphSource, planned: Callable[[float], Planned]) -> Planned:
        """Plan a graph in its share of the budget.

        Raises:
            PlanningError: It does not fit, by itself or beside the others; says a
                budget that works.
        """
        model = self._model(source)
        others = [  # of the same model, in the order in which they came
            part
            for function, part in self._parts.items()
            if part.model == model and function != source.function
        ]
        left = max(0.0, self.budget - sum(part.peak for part in others))
        try:
            try:
                return planned(left if source.ends is None else left * source.share)
            except PlanningError as e:
                if source.ends is None or e.least_bytes is None:
                    raise
                return planned(min(e.least_bytes, left))
        except PlanningError as e:
            if not others or e.least_bytes is None:
                raise
            raise self._refusal(source, others, e.least_bytes, e.node) from None

    def note(self, source: GraphSource, peak: int) -> None:
        """Remember the peak memory of a graph."""
        model = self._model(source)
        self._models = max(self._models, model + 1)
        known = self._parts.get(source.function)
        if known is not None and known.model == model:
            peak = max(peak, known.peak)
        self._last = self._parts[source.function] = _Part(source, model, peak)

    def _model(self, source: GraphSource) -> int:
        """Return the model of a graph: behind a break, that of the graph before it."""
        known, last = self._parts.get(source.function), self._last
        if known is not None:
            return known.model
        if last is not None and (source.resumes or last.source.ends is not None):
            return last.model
        return self._models

    def _refusal(
        self, source: GraphSource, others: list[_Part], least: int, node: str | None
    ) -> PlanningError:
        """Return why there is no plan, and with which budget there would be one.

        A graph that ends in a break leaves of it all but its least budget, or all but
        its share: whichever is less.
        """
        needed = least
        for part in reversed(others):
            shared = math.ceil(needed / (1 - part.source.share))
            needed = max(part.peak + needed, shared)
        ends = dict.fromkeys(p.source.ends or p.source.name for p in others)
        breaks = ", ".join(ends)
        used = sum(part.peak for part in others)
        return too_small(
            f"{source.name} is one of {len(others) + 1} graphs that share the budget "
            f"of {exact_bytes(int(self.budget))}, with graph breaks at {breaks}: the "
            f"other graphs take up to {exact_bytes(used)} of it, and this one needs "
            f"{exact_bytes(least)}; a budget of {exact_bytes(needed)} "
            f"works{('' if source.ends is None else ' up to its end')}. torch.compile "
            "with fullgraph=True shows the cause of a graph break",
            *(self.budget, needed, node),
        )
