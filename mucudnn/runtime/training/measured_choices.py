"""Choices of a trainer by measurement: layout, epilogue, library, split, copies."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from mucudnn.arguments import check_choice
from mucudnn.backends.base import Backend, LibraryKernels
from mucudnn.backends.device import StepIO
from mucudnn.codecs import problem_key
from mucudnn.errors import OutOfMemoryError, PlanningError
from mucudnn.ir.channels_last import AUTO, LAYOUT_CHOICES, operands_of
from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.operations import EPILOGUE, LIBRARY, make_node, with_library
from mucudnn.ir.profile import Profile
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.layouts import (
    channels_last_nodes,
    cheapest_layouts,
    layout_trials,
    with_channels_last,
    with_layout,
)
from mucudnn.passes.graph.training_step import Complete
from mucudnn.passes.ordering import Order, ordered
from mucudnn.passes.planning.cutting import (
    Segment,
    Split,
    SplitStep,
    check_split,
    cutting_of,
)
from mucudnn.passes.planning.place_step import fits_resident
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.split_search import SplitDecision, plan_splitting
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.distributed.collectives import text_of
from mucudnn.runtime.executor.program import ways_to_run
from mucudnn.runtime.profiling.links import ColdBench, cold_bench
from mucudnn.runtime.profiling.profiler import OnNode, profile
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.planned_steps import Plans
from mucudnn.runtime.training.sizes import WorkingSet, size_profile
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layouts:
    """Stores a network's images channels first, channels last, or mixed.

    `layout` is one of `LAYOUT_CHOICES`; the other arguments are for measuring `auto`.
    """

    layout: str
    tuner: Tuner
    budget: MemoryBudget | None
    progress: OnNode | None

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, LAYOUT_CHOICES)

    def __call__(self, graph: Graph, trains: bool) -> Graph:
        """Return a forward graph, which has its channels first, in the layout.

        Where `auto` cannot be measured within the budget, channels stay first.
        """
        if self.layout != AUTO:
            return with_layout(graph, self.layout)
        # Nodes that can run channels last, gradients included.
        conv = self.tuner.backend.conv
        last = with_channels_last(graph, nodes := channels_last_nodes(graph))
        without = {
            node.name
            for node in last.nodes
            if node.name in nodes and node.traits.convolution
            for way in Direction
            if not conv.algorithms(node.attrs["problem"].with_direction(way))
        }
        trials = layout_trials(graph, nodes - without, trains=trains)
        memory = None if self.budget is None else self.budget.nbytes
        try:
            times = profile(
                self.tuner, trials.graph, memory=memory, progress=self.progress
            )
        except OutOfMemoryError as e:
            logger.warning("layouts are not compared, channels come first: %s", e)
            return with_layout(graph, AUTO, frozenset())
        fastest = cheapest_layouts(graph, trials.costs(times.node_ms))
        return with_layout(graph, AUTO, fastest)


Times = tuple[float, float]
"""Milliseconds of the first and of the second implementation."""


# Time two implementations of the same function before a step is planned.
#
# The choice affects the last bits of a training. So the times are cached with the
# measurements, where every later process finds them, and stored in checkpoints, to
# resume with another cache.


_RULE = StoppingRule(min_samples=3, max_samples=9, budget_ms=60.0)

T = TypeVar("T")


@dataclass(frozen=True)
class KernelRaces:
    """Times two implementations of a node, once each, and chooses the faster.

    * Bias and ReLU fused into a convolution or after it. The engines that fuse all
      three differ from those that the tuner measured, and may lose more than the
      separate pass over the result costs. Both are timed with the plan that the
      convolution would have.
    * A backend's own kernel or a library's, with cold caches. Where the library wins,
      the node names it, and planning and profiling use its kernel.

    `plans` are existing convolution plans. The times by which choices were made are
    added to `used`.
    """

    tuner: Tuner
    budget: MemoryBudget | None = None
    plans: Plans | None = None
    used: dict[str, Times] = field(default_factory=dict)
    _wins: dict[tuple[ConvProblem, str], bool] = field(default_factory=dict)

    def offers_epilogue(self, problem: ConvProblem, bias: str) -> bool:
        """Return whether a kernel with bias and ReLU exists and is not slower."""
        epilogues = self.tuner.backend.epilogues
        if epilogues is None or not epilogues.offers(problem, bias):
            return False
        key = problem, bias
        if key not in self._wins:
            plan = self._plan(problem)
            times = None
            if plan is not None:
                raced = {
                    "ways": ["within", "behind"],
                    "op": EPILOGUE[1],
                    "problem": problem_key(problem),
                    "batch": problem.batch,
                    "bias": bias,
                    "steps": [
                        (step.algo, step.batch, step.math_mode, step.workspace)
                        for step in plan.steps
                    ],
                }
                measure = partial(self.epilogue_times, problem, bias)
                times = self.times_of(raced, self.used, measure)
            # Without a fused kernel for the timed plan there may be one for another
            # plan: say yes, as without one, separate kernels run anyway.
            self._wins[key] = times is None or times[0] <= times[1]
        return self._wins[key]

    def epilogue_times(self, problem: ConvProblem, bias: str) -> Times | None:
        """Return the times of one fused and of two separate calls, in ms.

        None where only one of them can be run or measured.
        """
        plan = self._plan(problem)
        if plan is None:
            return None
        needed, graph = _operands(plan, bias)
        backend = self.tuner.backend

        def both(bench: ColdBench) -> tuple[float, ...]:
            return bench.calls_ms(
                needed, lambda a, scratch: ways_to_run(backend, plan, graph, a, scratch)
            )

        otherwise = f"bias and ReLU of {problem} are not timed"
        times = self._timed(needed.pool_bytes, otherwise, both)
        if not times:
            return None
        logger.info(
            "bias and ReLU of %s: %.3g ms within, %.3g ms behind it", problem, *times
        )
        return times[0], times[1]

    def with_library(self, graph: Graph) -> Graph:
        """Return the graph with nodes marked where the library is faster."""
        library = self.tuner.backend.library_kernels
        if library is None:
            return graph
        nodes = tuple(
            with_library(graph.tensors, node, library.name)
            if self._library_wins(graph, node, library)
            else node
            for node in graph.nodes
        )
        return replace(graph, nodes=nodes)

    def _library_wins(self, graph: Graph, node: Node, library: LibraryKernels) -> bool:
        """Return whether the library computes a node, and faster."""
        traits = node.traits
        # The library cannot overwrite its input, where our kernel may, and no other
        # kernel of ours recomputes its result bit for bit: within a budget, such nodes
        # stay ours.
        saving = bool(traits.overwrites) or traits.recompute_as is not None
        if (saving and self.budget is not None) or not library.offers(graph, node):
            return False
        storages = [graph.storages[name] for name in node.tensors]
        inputs, outputs, attrs = operands_of(graph, node)
        raced = {
            "ways": ["own", library.name],
            "op": node.op,
            "inputs": [(spec.shape, spec.dtype, spec.layout) for spec in inputs],
            "outputs": [(spec.shape, spec.dtype, spec.layout) for spec in outputs],
            "attrs": {k: v for k, v in attrs.items() if k not in ("seed", LIBRARY)},
            "shared": [storages.index(storage) for storage in storages],
        }
        measure = partial(self.library_times, graph, node, library)
        times = self.times_of(raced, library.times_ms, measure)
        return times is not None and times[1] < times[0]

    def library_times(
        self, graph: Graph, node: Node, library: LibraryKernels
    ) -> Times | None:
        """Return ms of our kernel and of the library's.

        None without room, and where the library refuses the node meanwhile.
        """
        kernel = self.tuner.backend.kernels[node.op]
        scratch = kernel.workspace(*operands_of(graph, node))
        size = WorkingSet.of_node(graph, node, scratch).pool_bytes
        theirs = with_library(graph.tensors, node, library.name)

        def both(bench: ColdBench) -> Times:
            ours_ms = bench.node_ms(graph, node, scratch)
            return ours_ms, bench.node_ms(graph, theirs, scratch)

        times = self._timed(size, f"{node.name} is not timed by {library.name}", both)
        if times is None or not library.offers(graph, node):
            return None
        logger.info(
            "%s (%s): %.3g ms by our kernel, %.3g ms by %s",
            *(node.name, node.op, *times, library.name),
        )
        return times

    def times_of(
        self,
        raced: Mapping[str, Any],
        known: dict[str, Times],
        measure: Callable[[], Times | None],
    ) -> Times | None:
        """Return the times of two implementations, measured once by any process.

        The tuner's cache stores them, by device and `raced`: everything that determines
        the times, as JSON values. Times are also added to `known`, those of this
        process. `measure` returns None where timing is impossible, which is not cached.
        """
        key = json.dumps(dict(raced), sort_keys=True, default=str)
        cache, fingerprint = self.tuner.cache, self.tuner.backend.device.fingerprint
        times = cache.get_race(fingerprint, key)
        if times is None:
            times = known.get(key) or measure()
            if times is None:
                return None
            times = cache.put_race(fingerprint, key, times)
        known[key] = self.used[key] = times
        return times

    def _timed(
        self, nbytes: int, otherwise: str, work: Callable[[ColdBench], T]
    ) -> T | None:
        """Run `work` on a bench with `nbytes`; None if there is no room.

        More than the budget is not tried. If the device has no room, `otherwise` is
        logged.
        """
        memory = None if self.budget is None else self.budget.nbytes
        if memory is not None and nbytes > memory:
            return None
        try:
            with cold_bench(self.tuner.backend, [nbytes], memory, _RULE) as bench:
                return work(bench)
        except OutOfMemoryError as e:
            logger.warning("%s: %s", otherwise, e)
            return None

    def _plan(self, problem: ConvProblem) -> ConvPlan | None:
        try:
            return (self.plans or {}).get(problem) or self.tuner.plan([problem])[0]
        except PlanningError:  # planning the graph reports it in more detail
            return None


def _operands(plan: ConvPlan, bias: str) -> tuple[WorkingSet, Graph]:
    """Return x, w, y and bias, and a graph of the separate bias-and-ReLU node."""
    alone, problem = WorkingSet.of_plan(plan), plan.problem
    x, w, y = alone.operands
    y = replace(y, layout=problem.layout, role=Role.INPUT)
    b = TensorSpec("bias", (problem.w_shape[0],), bias, Role.INPUT)
    made = replace(y, name="made", role=Role.ACTIVATION)
    tensors = {spec.name: spec for spec in (y, b, made)}
    node = make_node(tensors, EPILOGUE[1], EPILOGUE[1], (y.name, b.name), (made.name,))
    return WorkingSet((x, w, y, b), alone.workspace), Graph(tensors, (node,), ())


class FusionRace:
    """The predicted times of a step with and without fusion, stored as other races.

    Predictions are made of measured times, and fusion affects the last bits. `settings`
    are what determines the step beside its forward graph.
    """

    def __init__(
        self, tuner: Tuner, network: Graph, settings: Iterable[object]
    ) -> None:
        digest = hashlib.sha256()
        for spec in network.tensors.values():
            digest.update(f"{spec.name} {spec.shape} {spec.dtype}\n".encode())
        for node in network.nodes:
            attrs = {name: text_of(value) for name, value in node.attrs.items()}
            digest.update(f"{node.op} {node.inputs} {node.outputs} {attrs}\n".encode())
        digest.update("\n".join(map(text_of, settings)).encode())
        raced = {"ways": ["fused", "separate"], "op": "step", "of": digest.hexdigest()}
        self._key = json.dumps(raced, sort_keys=True)
        self._tuner = tuner

    def known(self) -> dict[str, Times]:
        """Return the times under the key of the race; empty if never compared."""
        fingerprint = self._tuner.backend.device.fingerprint
        times = self._tuner.cache.get_race(fingerprint, self._key)
        return {} if times is None else {self._key: times}

    def put(self, times: Times) -> None:
        """Store the times of both forms."""
        fingerprint = self._tuner.backend.device.fingerprint
        self._tuner.cache.put_race(fingerprint, self._key, times)


# Split a step into slices of the batch or strips: as configured, or by measurement.


@dataclass(slots=True)
class SplitChooser:
    """Splits a training graph, and records the decision.

    Args:
        split: `auto`, `none`, the number of parts of the largest layers, `height`, or
            `height:4` for so many tiles.
        tuner: Measures, for `auto` and `height`.
        budget: Budget of the step; without one, `auto` and `height` do not split.

    Attributes:
        decision: The decision and its alternatives; None where there was no choice.
        profile: Profile of the chosen step, if it was measured.
        plan: Plan of the chosen step, if it was planned.
        segments: The nodes that run in parts.
    """

    split: Split
    tuner: Tuner
    budget: MemoryBudget | None
    order: str | Order
    progress: OnNode | None
    decision: SplitDecision | None = None
    profile: Profile | None = None
    plan: StepPlan | None = None
    segments: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        check_split(self.split)

    def __call__(self, graph: Graph, complete: Complete) -> Graph:
        """Return the graph in parts, or unchanged."""
        cutting, budget = cutting_of(graph, self.split), self.budget
        if cutting is None:
            if budget is None:
                return graph
            # `auto`: cut in every promising way, measure it, and plan it.
            unmeasured: list[OutOfMemoryError | PlanningError] = []

            def costs(step: Graph) -> Profile | None:
                tuner, progress = self.tuner, self.progress
                try:
                    return profile(tuner, step, memory=budget.nbytes, progress=progress)
                except (OutOfMemoryError, PlanningError) as e:
                    unmeasured.append(e)
                    return None

            step = SplitStep(
                graph,
                lambda graph: ordered(self.order, complete(graph)),
                costs,
                partial(_request_within, budget),
            )
            try:
                self.decision = plan_splitting(step, self.split)
            except PlanningError as e:
                # Without a least budget nothing could be measured: add the last reason.
                if e.least_bytes is not None or not unmeasured:
                    raise
                last = unmeasured[-1]
                raise PlanningError(
                    f"{e}, whole or in parts; in the last attempt, {last}"
                ) from last
            chosen = self.decision.chosen
            cutting, request, self.plan = chosen.cutting, chosen.request, chosen.plan
            self.profile = None if request is None else request.profile
        self.segments = cutting.segments(graph)
        return cutting.cut(graph)


def _request_within(budget: MemoryBudget, graph: Graph, costs: Profile) -> StepRequest:
    # Convolution plans are fixed per node only after the step was split.
    dynamic = budget.convolutions == "fixed"
    return StepRequest(
        graph,
        costs,
        budget=budget.nbytes,
        policy=budget.policy,
        scheduler=budget.scheduler,
        convolutions="dynamic" if dynamic else budget.convolutions,
    )


# Optional uses of memory that make steps faster: parameter copies, input buffers.
#
# Without a budget there is always room. Within one, the tensors of the step come first.


def copies_fit(
    tuner: Tuner, budget: MemoryBudget | None, order: str | Order, step: Graph
) -> bool:
    """Return whether a step with low-precision copies of parameters fits the budget."""
    if budget is None:
        return True
    try:
        sizes = size_profile(tuner, in_place(step))
    except PlanningError:
        return False  # a convolution has no algorithm; measuring it says why
    return fits_resident(StepRequest(ordered(order, step), sizes, budget=budget.nbytes))


def step_io_of(
    backend: Backend, budget: MemoryBudget | None, held: int, inputs: int
) -> tuple[StepIO | None, int]:
    """Return the asynchronous input transfer, if any, and its device bytes.

    `held` is the bytes of arena and state, `inputs` those of all inputs of a step.
    """
    if backend.step_io is None:
        return None, 0
    staged = budget is None or held + inputs <= budget.nbytes
    return backend.step_io(staged), inputs if staged else 0
