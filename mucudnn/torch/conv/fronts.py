"""Pareto fronts of the convolutions in a PyTorch step, as measured.

The tuner's algorithms and micro-batches are candidates. Each is then run as the step
would run it, beside PyTorch's kernel for the whole batch, with what it allocates
counted: operands that have to be copied, and results of PyTorch's kernels for
micro-batches, among it. What nothing beats in both is the front.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mucudnn.backends.base import Backend
from mucudnn.backends.device import Buffer
from mucudnn.errors import MucudnnError
from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, PerfTable
from mucudnn.ir.graph import Node
from mucudnn.ir.profile import Profile
from mucudnn.passes.microbatch import pareto_plans
from mucudnn.passes.scheduling.problem import fastest_of, origin
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.tuning.timing import StoppingRule, measure, measure_together
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.torch.conv.backend import TORCH, check_tuner
from mucudnn.torch.conv.kernels import (
    Backward,
    Forward,
    Geometry,
    Kernel,
    Role,
    result_form,
)
from mucudnn.torch.costs.measure import evaluate
from mucudnn.torch.costs.meters import CpuMeter
from mucudnn.torch.lowering.lowered import Call, Layout, Lowered, Operand
from mucudnn.torch.plan_store import PlanStore

_RULE = StoppingRule(min_samples=3, max_samples=7, budget_ms=60.0)

_ONCE = StoppingRule(min_samples=1, max_samples=1)

_NO_LIMIT = 1 << 62

_MOST = 8
"""Candidates of one convolution that are run: evenly chosen where there are more."""


@dataclass(frozen=True)
class ConvolutionChoice:
    """Whether a step's convolutions may be run in other ways than PyTorch's.

    Attributes:
        tuner: Measures the ways; None leaves them to PyTorch's kernels.
    """

    tuner: Tuner | None = None

    def __post_init__(self) -> None:
        if self.tuner is not None:
            check_tuner(self.tuner)

    def profile(
        self, lowered: Lowered, costs: Callable[[Lowered], Profile], plans: PlanStore
    ) -> Profile:
        """A graph's costs, with what its convolutions may trade.

        Args:
            lowered: The graph.
            costs: What measures it as PyTorch's kernels run it.
            plans: What was measured before. Ways to run convolutions are remembered as
                long as the tuner would look for the same ones.
        """
        tuner = self.tuner
        if tuner is None:
            return plans.profile(lowered, costs)

        def chosen(lowered: Lowered) -> Profile:
            return with_fronts(lowered, plans.profile(lowered, costs), tuner)

        policy = tuner.batch_policy
        if not isinstance(policy, str):  # a function's name would not tell what it does
            return chosen(lowered)
        settings = (
            *("fronts", tuner.backend.device.fingerprint),
            *(policy, str(tuner.numerics), str(tuner.memory_limit)),
        )
        check = partial(check_fronts, lowered, tuner.backend)
        return plans.profile(lowered, chosen, " ".join(settings), check)

    def bound(self, lowered: Lowered, plan: StepPlan) -> Lowered:
        """The graph with its convolutions run as planned."""
        if self.tuner is None:
            return lowered
        return with_plans(lowered, plan.plans, self.tuner.backend)


def with_fronts(lowered: Lowered, known: Profile, tuner: Tuner) -> Profile:
    """A profile in which convolutions may be run in other ways than PyTorch's.

    Args:
        lowered: The graph.
        known: What its nodes cost as PyTorch runs them.
        tuner: Measures algorithms and micro-batches; its backend is of `cpu_backend`.
    """
    found = {node.name: Site.of(lowered, node) for node in lowered.graph.nodes}
    sites = {name: site for name, site in found.items() if site is not None}
    if not sites:
        return known
    alike = {site.key: site for site in sites.values()}
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        every = dict(zip(alike, _fronts([*alike.values()], tuner), strict=True))
    fronts = {name: every[site.key] for name, site in sites.items()}
    times = {name: fastest_of(front).time_ms for name, front in fronts.items()}
    scratch = known.workspaces.items()
    return replace(
        known,
        node_ms={**known.node_ms, **times},
        workspaces={name: nbytes for name, nbytes in scratch if name not in fronts},
        fronts=fronts,
    )


def check_fronts(lowered: Lowered, backend: Backend, known: Profile) -> None:
    """Compare remembered ways to run convolutions with those that there are.

    Raises:
        ValueError: They are of other convolutions, or not what the backend can do.
    """
    found = {node.name: Site.of(lowered, node) for node in lowered.graph.nodes}
    sites = {name: site for name, site in found.items() if site is not None}
    if known.fronts.keys() != sites.keys() or sites.keys() & known.workspaces.keys():
        raise ValueError("fronts: they are of other nodes than the convolutions")
    for name, front in known.fronts.items():
        if any(not sites[name].offers(backend, plan) for plan in front):
            raise ValueError(f"fronts: {name!r} cannot be run so")
        if known.node_ms[name] != fastest_of(front).time_ms:
            raise ValueError(f"fronts: {name!r} takes another time than its plans")


@dataclass(frozen=True)
class _Way:
    """One way to run a convolution."""

    site: "Site"
    plan: ConvPlan
    call: Call

    def prepared(self) -> Callable[[], object]:
        """The call, given operands."""
        operands = [_made(layout) for layout in self.site.operands]
        return partial(evaluate, self.call, operands)


def _fronts(sites: "Sequence[Site]", tuner: Tuner) -> list[tuple[ConvPlan, ...]]:
    """The front of each, as it is run in a step."""
    tables = [_measured(tuner, site.problem) for site in sites]
    sizes = _native_sizes(tuner.backend, tables)
    ways = [
        [_Way(site, p, site.bound(tuner.backend, p)) for p in _plans(table, sizes)]
        for site, table in zip(sites, tables, strict=True)
    ]
    timed = [[*_timed(some, tuner.backend)] for some in ways]
    nbytes = iter(
        CpuMeter().most_bytes([way.prepared for some in ways for way in some])
    )
    return [
        _undominated([_taking(p, next(nbytes) - site.result_bytes) for p in plans])
        for site, plans in zip(sites, timed, strict=True)
    ]


def _measured(tuner: Tuner, problem: ConvProblem) -> PerfTable:
    """What the tuner knows; an empty table where it cannot measure."""
    try:
        return tuner.measure(problem)
    except MucudnnError:  # PyTorch's kernel is left
        return PerfTable(problem, ())


def _native_sizes(
    backend: Backend, tables: Iterable[PerfTable]
) -> Mapping[ConvProblem, int]:
    """What PyTorch allocates to compute into arrays of the caller's."""
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
    """PyTorch's kernel for the whole batch, then what a tuner's figures speak for."""
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
    if (last := len(others) - 1) >= _MOST:
        others = [others[round(i * last / (_MOST - 1))] for i in range(_MOST)]
    return [ConvPlan(problem, (whole,)), *others]


def _timed(ways: Sequence[_Way], backend: Backend) -> Iterable[ConvPlan]:
    """Their plans, with the times that they take in turn.

    Those that the tuner found hopelessly slow, which are there for their few bytes, are
    timed once.
    """
    runs = [partial(_run, way.prepared()) for way in ways]
    best_ms = min((way.plan.time_ms for way in ways[1:]), default=0.0)
    slow = [way.plan.time_ms > _RULE.hopeless * best_ms for way in ways]
    fast = [run for run, late in zip(runs, slow, strict=True) if not late]
    together = iter(measure_together(fast, backend.device, _RULE))
    for way, run, late in zip(ways, runs, slow, strict=True):
        timing = measure(run, backend.device, _ONCE) if late else next(together)
        plan, parts = way.plan, len(way.plan.steps)
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


def _taking(plan: ConvPlan, nbytes: int) -> ConvPlan:
    """The plan, so many bytes in use beside its result."""
    steps = (replace(step, workspace=max(0, nbytes)) for step in plan.steps)
    return ConvPlan(plan.problem, tuple(steps))


def _undominated(plans: Sequence[ConvPlan]) -> tuple[ConvPlan, ...]:
    """The front, ascending in workspace; more memory has to win by more than noise.

    PyTorch's kernel, which is the first, stays where another in the same bytes is not
    clearly faster.
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


def _made(layout: Layout) -> torch.Tensor:
    """A tensor that lies so, of ordinary numbers."""
    spans = zip(layout.shape, layout.stride, strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in spans)
    flat = torch.empty(count, dtype=layout.dtype, device=layout.device).normal_()
    return flat.as_strided(layout.shape, layout.stride)


# Convolution nodes of a lowered graph as problems of ours, and how plans run them.
#
# A plan that is PyTorch's kernel for the whole batch is the node's own call. Any other
# takes its workspace from PyTorch's allocator, for as long as the call lasts.


_FORWARD = torch.ops.aten.convolution.default

_BACKWARD = torch.ops.aten.convolution_backward.default

_ROLES: dict[Any, Role] = {
    (0,): Role.INPUT_GRADIENT,
    (1,): Role.FILTER_GRADIENT,
    (1, 2): Role.FILTER_GRADIENT,
}
"""Which results of the backward operator one kernel computes, a bias's beside it."""


@dataclass(frozen=True)
class Site:
    """A convolution of a graph that a plan may run.

    Attributes:
        call: How PyTorch runs it.
        operands: How its operands lie.
        results: How its results lie.
        role: What it computes.
        problem: As which it is measured and planned.
        transposed: Whether it is of a transposed convolution.
    """

    call: Call
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    role: Role
    problem: ConvProblem
    transposed: bool

    @classmethod
    def of(cls, lowered: Lowered, node: Node) -> "Site | None":
        """What a node is; None if it is no convolution, or none of ours."""
        call = lowered.calls[node.name]
        layouts = tuple(lowered.layouts[name] for name in node.inputs)
        if any(layout.device.type != "cpu" for layout in layouts):
            return None
        if call.function is _FORWARD:
            role, (x, w, b), options = Role.OUTPUT, call.args[:3], call.args[3:]
            sizes = list(layouts[b.index].shape) if isinstance(b, Operand) else None
        elif call.function is _BACKWARD and call.results in _ROLES:
            role = _ROLES[call.results]
            (_, x, w, sizes), options = call.args[:4], call.args[4:-1]
        else:
            return None
        if not (isinstance(x, Operand) and isinstance(w, Operand)):
            return None
        x, w = (_like(layouts[leaf.index]) for leaf in (x, w))
        try:
            geometry = Geometry.of(x, w, sizes, tuple(options))
            problem = geometry.problem(role, x, w)
        except (MucudnnError, ValueError, RuntimeError):
            return None
        results = tuple(lowered.layouts[name] for name in node.outputs)
        shape, form = result_form(problem)
        ours = torch.empty(shape, device="meta", memory_format=form)
        if (results[0].shape, results[0].stride) != (ours.shape, ours.stride()):
            return None
        return cls(call, layouts, results, role, problem, geometry.transposed)

    @property
    def key(self) -> Hashable:
        """Equal for convolutions that cost the same."""
        return self.problem, self.operands, self.results, self.transposed

    @property
    def result_bytes(self) -> int:
        """Bytes of its results."""
        dense = (r.dtype.itemsize * math.prod(r.shape) for r in self.results)
        return sum(map(int, dense))

    def offers(self, backend: Backend, plan: ConvPlan) -> bool:
        """Whether a plan is one of this convolution, with the memory that it needs.

        What was measured may be less by the results, if they come behind it.
        """
        if plan.problem != self.problem:
            return False
        if is_native(plan):
            return True
        for step in plan.steps:
            offered = dict(backend.conv.algorithms(self.problem.with_batch(step.batch)))
            if offered.get(step.algo, math.inf) > plan.workspace + self.result_bytes:
                return False
        return True

    def bound(self, backend: Backend, plan: ConvPlan) -> Call:
        """The node's call by a plan."""
        if is_native(plan):
            return self.call
        nbytes = max(_needed(backend, self.problem, step) for step in plan.steps)
        kernel = Kernel(self.role, backend.bind(plan), nbytes, _workspace)
        return replace(self.call, function=self._function(kernel))

    def _function(self, kernel: Kernel) -> Callable[..., Any]:
        """In the place of PyTorch's operator, whose options it knows."""
        if self.role is Role.OUTPUT:
            biased = isinstance(self.call.args[2], Operand)
            forward = Forward(kernel, biased, len(self.problem.x_shape))
            return lambda x, w, b, *options: forward(x, w, b)
        kernels: Sequence[Kernel | None] = [kernel, None]
        if self.role is Role.FILTER_GRADIENT:
            kernels = [None, kernel]
        backward = Backward(kernels, self.transposed, self.call.args[-1])
        return lambda gy, x, w, *options: backward(_none_left, gy, x, w)


def is_native(plan: ConvPlan) -> bool:
    """Whether it is PyTorch's kernel for the whole batch."""
    return not plan.divided and plan.steps[0].algo == TORCH


def with_plans(
    lowered: Lowered, plans: Mapping[str, ConvPlan], backend: Backend
) -> Lowered:
    """The graph with its convolutions run by plans.

    Args:
        lowered: The graph that was planned.
        plans: Node of the planned schedule -> plan.
        backend: Has their algorithms.
    """
    sites: dict[str, Site | None] = {}
    made: dict[tuple[str, ConvPlan], Call] = {}
    calls = {}
    for name, plan in plans.items():
        first = origin(name)
        if first not in sites:
            sites[first] = Site.of(lowered, lowered.graph.by_name[first])
        site = sites[first]
        if site is not None:
            if (first, plan) not in made:
                made[first, plan] = site.bound(backend, plan)
            calls[name] = made[first, plan]
    return replace(lowered, planned=calls)


def _like(layout: Layout) -> torch.Tensor:
    """A tensor that lies so; nothing is in it."""
    shape, stride = layout.shape, layout.stride
    return torch.empty_strided(shape, stride, dtype=layout.dtype, device=layout.device)


def _needed(backend: Backend, problem: ConvProblem, step: Any) -> int:
    offered = dict(backend.conv.algorithms(problem.with_batch(step.batch)))
    return offered[step.algo]


def _workspace(nbytes: int) -> Buffer | None:
    if not nbytes:
        return None
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu").numpy()


def _none_left(mask: Sequence[bool]) -> Any:
    raise AssertionError(f"no gradient is PyTorch's here, {mask} was asked for")
