"""Measured Pareto fronts (time, workspace) of the convolutions in a PyTorch step.

The tuner's algorithms and micro-batches give candidates. Each is run as the step would
run it, beside PyTorch's kernel for the whole batch, and all its allocations are
counted, including copies of operands and the results of PyTorch's kernels for
micro-batches. The candidates that no other beats in both are the front.
"""

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mucudnn.backends.base import Backend
from mucudnn.backends.device import Buffer
from mucudnn.errors import MucudnnError
from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, Direction, PerfTable
from mucudnn.ir.graph import Node
from mucudnn.ir.profile import Profile
from mucudnn.passes.microbatch import pareto_plans
from mucudnn.passes.scheduling.problem import fastest_of, origin
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.tuning.timing import StoppingRule, measure, measure_together
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.torch.conv.backend import TORCH, check_tuner
from mucudnn.torch.conv.kernels import (
    Geometry,
    Kernel,
    is_native,
    planned_backward,
    planned_forward,
    result_form,
)
from mucudnn.torch.costs.measure import evaluate
from mucudnn.torch.costs.meters import CpuMeter
from mucudnn.torch.execution.devices import autocast_off
from mucudnn.torch.lowering.lowered import Call, Layout, Lowered, Operand
from mucudnn.torch.plan_store import PlanStore

_RULE = StoppingRule(min_samples=3, max_samples=7, budget_ms=60.0)

_ONCE = StoppingRule(min_samples=1, max_samples=1)

_NO_LIMIT = 1 << 62

_MOST = 8
"""Most candidates of one convolution that are run, evenly chosen from all."""


@dataclass(frozen=True)
class ConvolutionChoice:
    """Source of algorithms for a step's convolutions: PyTorch's, or a tuner's."""

    tuner: Tuner | None = None

    def __post_init__(self) -> None:
        if self.tuner is not None:
            check_tuner(self.tuner)

    def profile(
        self, lowered: Lowered, costs: Callable[[Lowered], Profile], plans: PlanStore
    ) -> Profile:
        """Return a graph's costs, with the fronts of its convolutions.

        Fronts are stored for tuners of equal settings.
        """
        tuner = self.tuner
        if tuner is None:
            return plans.profile(lowered, costs, "")

        def chosen(lowered: Lowered) -> Profile:
            return with_fronts(lowered, plans.profile(lowered, costs, ""), tuner)

        policy = tuner.batch_policy
        if not isinstance(policy, str):  # a function has no key to store it by
            return chosen(lowered)
        settings = (
            *("fronts", tuner.backend.device.fingerprint),
            *(policy, str(tuner.numerics), str(tuner.memory_limit)),
        )
        return plans.profile(lowered, chosen, " ".join(settings))

    def bound(self, lowered: Lowered, plan: StepPlan) -> Lowered:
        """Return the graph with its convolutions run as planned."""
        if self.tuner is None:
            return lowered
        return with_plans(lowered, plan.plans, self.tuner.backend)


def with_fronts(lowered: Lowered, known: Profile, tuner: Tuner) -> Profile:
    """Return a graph's profile, `known` as PyTorch runs it, with measured fronts."""
    found = {n.name: ConvolutionNode.of(lowered, n) for n in lowered.graph.nodes}
    nodes = {name: node for name, node in found.items() if node is not None}
    if not nodes:
        return known
    distinct = {node.key: node for node in nodes.values()}
    with torch.no_grad(), autocast_off():
        every = dict(zip(distinct, _fronts([*distinct.values()], tuner), strict=True))
    fronts = {name: every[node.key] for name, node in nodes.items()}
    times = {name: fastest_of(front).time_ms for name, front in fronts.items()}
    scratch = known.workspaces.items()
    return replace(
        known,
        node_ms={**known.node_ms, **times},
        workspaces={name: nbytes for name, nbytes in scratch if name not in fronts},
        fronts=fronts,
    )


_Candidate = tuple[ConvPlan, Callable[[], Callable[[], object]]]
"""A plan of a convolution; what makes operands and returns its call with them."""


def _fronts(
    nodes: "Sequence[ConvolutionNode]", tuner: Tuner
) -> list[tuple[ConvPlan, ...]]:
    """Measure the front of each convolution, as it is run in a step."""
    # Candidates, by the tuner's measurements of plain arrays.
    tables = [_measured(tuner, node.problem) for node in nodes]
    sizes = _native_sizes(tuner.backend, tables)
    candidates = [
        [
            (p, partial(_prepared, node, node.bound(tuner.backend, p)))
            for p in _plans(table, sizes)
        ]
        for node, table in zip(nodes, tables, strict=True)
    ]
    # Time and memory of the calls that a step would make.
    timed = [[*_timed(some, tuner.backend)] for some in candidates]
    runs = [prepared for some in candidates for _, prepared in some]
    nbytes = iter(CpuMeter().most_bytes(runs))
    fronts = []
    for node, plans in zip(nodes, timed, strict=True):
        weighed = []
        for plan in plans:  # the result's bytes are not workspace
            workspace = max(0, next(nbytes) - node.result_bytes)
            steps = (replace(step, workspace=workspace) for step in plan.steps)
            weighed.append(ConvPlan(plan.problem, tuple(steps)))
        fronts.append(_undominated(weighed))
    return fronts


def _measured(tuner: Tuner, problem: ConvProblem) -> PerfTable:
    """Return the tuner's table; an empty one if it cannot measure."""
    try:
        return tuner.measure(problem)
    except MucudnnError:  # PyTorch's kernel remains
        return PerfTable(problem, ())


def _native_sizes(
    backend: Backend, tables: Iterable[PerfTable]
) -> Mapping[ConvProblem, int]:
    """Return the bytes that PyTorch allocates to compute into the caller's arrays."""
    problems = dict.fromkeys(
        table.problem.with_batch(row.batch)
        for table in tables
        for row in table.usable
        if row.algo == TORCH
    )
    sizes = CpuMeter().most_bytes([partial(_native_run, backend, p) for p in problems])
    return dict(zip(problems, sizes, strict=True))


def _native_run(backend: Backend, problem: ConvProblem) -> Callable[[], object]:
    device = backend.device
    a, b, out = (
        device.view(device.allocate(spec.nbytes), 0, spec)
        for spec in problem.operands()
    )
    device.randomize(a)
    device.randomize(b)
    return partial(backend.conv.run, problem, TORCH, a, b, out, None)


def _plans(table: PerfTable, sizes: Mapping[ConvProblem, int]) -> list[ConvPlan]:
    """Return PyTorch's kernel for the whole batch, then the front of a table."""
    problem = table.problem
    whole = AlgoPerf(algo=TORCH, batch=problem.batch, time_ms=0.0, workspace=0)
    rows = tuple(
        replace(row, workspace=sizes[problem.with_batch(row.batch)])
        if row.algo == TORCH
        else row
        for row in table.usable
    )
    front = pareto_plans(replace(table, perfs=rows), _NO_LIMIT) if rows else ()
    others = [plan for plan in front if not is_native(plan)]
    # Of a long front, evenly spaced plans are timed, the ends included.
    if (last := len(others) - 1) >= _MOST:
        others = [others[round(i * last / (_MOST - 1))] for i in range(_MOST)]
    return [ConvPlan(problem, (whole,)), *others]


def _prepared(node: "ConvolutionNode", call: Call) -> Callable[[], object]:
    """Return a call with operands."""
    return partial(evaluate, call, [_random_tensor(at) for at in node.operands])


def _timed(candidates: Sequence[_Candidate], backend: Backend) -> Iterable[ConvPlan]:
    """Time candidates in turn; yield their plans with these times.

    Candidates that the tuner found hopelessly slow, which are there for their small
    workspace, are timed once.
    """
    plans = [plan for plan, _ in candidates]
    runs = [partial(_run, prepared()) for _, prepared in candidates]
    best_ms = min((plan.time_ms for plan in plans[1:]), default=0.0)
    slow = [plan.time_ms > _RULE.hopeless * best_ms for plan in plans]
    # Candidates near the best are timed in turns, the others once, by themselves.
    fast = [run for run, late in zip(runs, slow, strict=True) if not late]
    together = iter(measure_together(fast, backend.device, _RULE))
    for plan, run, late in zip(plans, runs, slow, strict=True):
        timing = measure(run, backend.device, _ONCE) if late else next(together)
        parts = len(plan.steps)
        steps = (
            replace(
                step,
                time_ms=timing.time_ms
                * (step.time_ms / plan.time_ms if plan.time_ms else 1 / parts),
                noise_ms=timing.noise_ms / parts,
            )
            for step in plan.steps
        )
        yield ConvPlan(plan.problem, tuple(steps))


def _run(call: Callable[[], object]) -> None:
    call()


def _undominated(plans: Sequence[ConvPlan]) -> tuple[ConvPlan, ...]:
    """Return the front in ascending order of workspace.

    A plan with more workspace has to be faster by more than the noise. PyTorch's
    kernel, which is the first plan, is preferred to plans of equal workspace that are
    not clearly faster.
    """
    native, *_ = plans
    front: list[ConvPlan] = []
    for plan in sorted(plans, key=lambda p: (p.workspace, p is not native, p.time_ms)):
        noise_ms = sum(step.noise_ms for step in plan.steps)
        if front and plan.time_ms + noise_ms >= front[-1].time_ms:
            continue
        if front and plan.workspace == front[-1].workspace:
            front.pop()
        front.append(plan)
    return tuple(front)


def _random_tensor(layout: Layout) -> torch.Tensor:
    """Return a tensor of normally distributed numbers in a layout."""
    whole = replace(layout, shape=(layout.extent,), stride=(1,)).empty().normal_()
    return whole.as_strided(layout.shape, layout.stride)


# Convolution nodes of a lowered graph as our problems, and the calls that run plans.
#
# PyTorch's kernel for the whole batch is the node's own call. Any other plan takes its
# workspace from PyTorch's allocator, for the duration of the call.


_FORWARD = torch.ops.aten.convolution.default

_BACKWARD = torch.ops.aten.convolution_backward.default

_ROLES: dict[Any, Direction] = {
    (0,): Direction.BACKWARD_DATA,
    (1,): Direction.BACKWARD_FILTER,
    (1, 2): Direction.BACKWARD_FILTER,
}
"""Results of a backward node -> role of its kernel; a bias's gradient is added."""


@dataclass(frozen=True)
class ConvolutionNode:
    """A convolution of a graph that a plan may run.

    Attributes:
        call: The node's call of PyTorch's kernel.
        operands: Layouts of its operands.
        results: Layouts of its results.
        role: The result that it computes, as of a convolution that is not transposed.
        problem: The problem that is measured and planned.
    """

    call: Call
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    role: Direction
    problem: ConvProblem
    transposed: bool

    @classmethod
    def of(cls, lowered: Lowered, node: Node) -> "ConvolutionNode | None":
        """Return a node's convolution; None if our kernels cannot run it."""
        call = lowered.calls[node.name]
        layouts = tuple(lowered.layouts[name] for name in node.inputs)
        if any(layout.device.type != "cpu" for layout in layouts):
            return None
        if call.function is _FORWARD:
            role, (x, w, b), options = Direction.FORWARD, call.args[:3], call.args[3:]
            sizes = list(layouts[b.index].shape) if isinstance(b, Operand) else None
        elif call.function is _BACKWARD and call.results in _ROLES:
            role = _ROLES[call.results]
            (_, x, w, sizes), options = call.args[:4], call.args[4:-1]
        else:
            return None
        if not (isinstance(x, Operand) and isinstance(w, Operand)):
            return None
        x, w = (layouts[leaf.index].empty() for leaf in (x, w))
        try:
            geometry = Geometry.of(x, w, sizes, tuple(options))
            problem = geometry.problem(role, x, w)
        except (MucudnnError, ValueError, RuntimeError):
            return None
        # Later operations were captured for results in PyTorch's memory format.
        results = tuple(lowered.layouts[name] for name in node.outputs)
        shape, form = result_form(problem)
        ours = torch.empty(shape, device="meta", memory_format=form)
        if (results[0].shape, results[0].stride) != (ours.shape, ours.stride()):
            return None
        return cls(call, layouts, results, role, problem, geometry.transposed)

    @property
    def key(self) -> Hashable:
        """Key that is equal for convolutions of equal cost."""
        return self.problem, self.operands, self.results, self.transposed

    @property
    def result_bytes(self) -> int:
        """Bytes of its results."""
        dense = (r.dtype.itemsize * math.prod(r.shape) for r in self.results)
        return sum(map(int, dense))

    def bound(self, backend: Backend, plan: ConvPlan) -> Call:
        """Return the node's call by a plan."""
        if is_native(plan):
            return self.call
        nbytes = max(
            dict(backend.conv.algorithms(self.problem.with_batch(step.batch)))[
                step.algo
            ]
            for step in plan.steps
        )
        kernel = Kernel(backend.bind(plan), nbytes, _allocated)
        return replace(self.call, function=self._function(kernel))

    def _function(self, kernel: Kernel) -> Callable[..., Any]:
        """Return a function with the signature of PyTorch's operator."""
        if self.role is Direction.FORWARD:
            biased = isinstance(self.call.args[2], Operand)
            forward = planned_forward(kernel, biased, len(self.problem.x_shape))
            return lambda x, w, b, *options: forward(x, w, b)
        kernels: Sequence[Kernel | None] = [kernel, None]
        if self.role is Direction.BACKWARD_FILTER:
            kernels = [None, kernel]
        backward = planned_backward(kernels, self.transposed, self.call.args[-1])
        # No gradient is PyTorch's here.
        return lambda gy, x, w, *options: backward(None, gy, x, w)


def with_plans(
    lowered: Lowered, plans: Mapping[str, ConvPlan], backend: Backend
) -> Lowered:
    """Return the graph with its convolutions run by the plans of a schedule's nodes."""

    @functools.cache  # a recomputed node runs the same call
    def call(first: str, plan: ConvPlan) -> Call | None:
        node = ConvolutionNode.of(lowered, lowered.graph.by_name[first])
        return None if node is None else node.bound(backend, plan)

    calls = {name: call(origin(name), plan) for name, plan in plans.items()}
    found = {name: planned for name, planned in calls.items() if planned is not None}
    return replace(lowered, planned=found)


def _allocated(nbytes: int) -> Buffer | None:
    if not nbytes:
        return None
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu").numpy()
