"""Time every distinct node of a graph on a backend.

Convolutions come first, as the tuner allocates and frees its own memory. All other
kernels are then timed in one allocation; the two never hold memory at the same
time.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from mucudnn.errors import OutOfMemoryError, PlanningError
from mucudnn.ir.conv import ConvPlan, ConvProblem
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.convolution.explain import counted
from mucudnn.passes.microbatch import pareto_plans
from mucudnn.passes.scheduling.problem import fastest_of
from mucudnn.runtime.profiling.links import ColdBench, cold_bench
from mucudnn.runtime.training.sizes import WorkingSet, kernel_workspaces, working_sets
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner

_RULE = StoppingRule(min_samples=3, max_samples=7, budget_ms=60.0)
_NO_LIMIT = 1 << 62

OnNode = Callable[[str, int, int], None]
"""Progress callback: (name of the measured node, nodes done, nodes in total)."""


def profile(
    tuner: Tuner,
    graph: Graph,
    *,
    rule: StoppingRule | None = None,
    memory: int | None = None,
    progress: OnNode | None = None,
) -> Profile:
    """Measure a graph: kernels by running them, convolutions by their Pareto fronts.

    At most `memory` bytes of the device are in use at any time, and for convolutions at
    most the tuner's own limit. If `memory` holds the largest node and 64 MiB more, it
    does not affect results. Below that, the buffer that evicts the caches is smaller,
    so that operands may be in a cache and a kernel timed as faster than within a step.
    The link is measured in copies of at most `memory` bytes; small copies may hit a
    cache, and launch overhead weighs more. A convolution plan that does not fit keeps
    the tuner's time.

    Raises:
        OutOfMemoryError: A node does not fit `memory`; names the node and its tensors.
        PlanningError: A convolution has no algorithm, or none within the limits.
    """
    backend = tuner.backend
    workspaces = kernel_workspaces(backend, graph)
    sets = working_sets(graph, workspaces)
    node, needed = max(sets, key=lambda pair: pair[1].pool_bytes, default=(None, None))
    if memory is not None and node and needed and needed.pool_bytes > memory:
        raise OutOfMemoryError(
            f"node {node.name!r} ({node.op}) cannot be timed within "
            f"{exact_bytes(memory)}: it uses {needed} at once; the minimum is "
            f"{needed.pool_bytes} bytes"
        )
    counter = itertools.count(1)

    def done(node: Node) -> None:
        number = next(counter)
        if progress is not None:
            progress(node.name, number, len(graph.nodes))

    # Convolutions: the tuner's fronts, whose kernels were timed in warm caches.
    limit = min(tuner.memory_limit, math.inf if memory is None else memory)
    convolutions = [node for node in graph.nodes if node.op == "conv"]
    fronts = _fronts(tuner, graph, convolutions, limit, done)
    plans = _within(limit, (fastest_of(front) for front in fronts.values()))
    # One allocation for all timings, as large as the largest working set needs.
    sizes = [max((s.pool_bytes for n, s in sets if n.op != "conv"), default=0)]
    sizes += [WorkingSet.of_plan(plan).pool_bytes for plan in plans]
    with cold_bench(backend, sizes, memory, rule or _RULE) as bench:
        cold_ms = {plan.problem: bench.plan_ms(plan) for plan in plans}
        fronts = {p: _in_step(front, cold_ms.get(p)) for p, front in fronts.items()}
        kernels_ms, again_ms = _kernel_times(graph, workspaces, bench, done)
        out_rate, in_rate = bench.link()
    # Every node gets the time of its fastest plan.
    fronts_of = {node.name: fronts[node.attrs["problem"]] for node in convolutions}
    node_ms = {name: fastest_of(front).time_ms for name, front in fronts_of.items()}
    return Profile(
        node_ms=node_ms | kernels_ms,
        workspaces=workspaces,
        fronts=fronts_of,
        out_bytes_per_ms=out_rate,
        in_bytes_per_ms=in_rate,
        recompute_ms=again_ms,
    )


def refine(
    tuner: Tuner,
    known: Profile,
    plans: Iterable[ConvPlan],
    times: dict[ConvPlan, float],
    *,
    rule: StoppingRule | None = None,
    memory: int | None = None,
) -> Profile:
    """Replace the estimated times of some plans by measured ones.

    `plans` are those of the profile's fronts that a step was planned with. `times` has
    the plans that were measured before, which are not measured again; new ones are
    added to it. A plan that does not fit the memory keeps its time.
    """
    new = _within(tuner.memory_limit, (p for p in plans if p not in times))
    better: dict[ConvPlan, ConvPlan] = {}
    if new:
        sizes = [0, *(WorkingSet.of_plan(plan).pool_bytes for plan in new)]
        with cold_bench(tuner.backend, sizes, memory, rule or _RULE) as bench:
            for plan in new:
                measured = bench.plan_ms(plan)
                if measured is not None:
                    better[plan] = _scaled_to(plan, measured)
                    times[better[plan]] = measured
    fronts = {
        name: tuple(better.get(plan, plan) for plan in front)
        for name, front in known.fronts.items()
    }
    node_ms = dict(known.node_ms)
    node_ms.update((name, fastest_of(front).time_ms) for name, front in fronts.items())
    return replace(known, fronts=fronts, node_ms=node_ms)


def _within(limit: float, plans: Iterable[ConvPlan]) -> list[ConvPlan]:
    """Return the distinct plans whose operands and workspace fit a limit."""
    return [
        plan
        for plan in dict.fromkeys(plans)
        if sum(spec.nbytes for spec in WorkingSet.of_plan(plan).tensors) <= limit
    ]


def _fronts(
    tuner: Tuner,
    graph: Graph,
    convolutions: Iterable[Node],
    limit: float,
    done: Callable[[Node], None],
) -> dict[ConvProblem, tuple[ConvPlan, ...]]:
    """Return the Pareto front of every convolution, measured within a limit."""
    fronts: dict[ConvProblem, tuple[ConvPlan, ...]] = {}
    for node in convolutions:
        problem = node.attrs["problem"]
        if problem not in fronts:
            table = tuner.measure(problem, memory_limit=limit)
            fronts[problem] = pareto_plans(table, _NO_LIMIT)
            if not fronts[problem]:
                reasons = counted((p.algo, p.error) for p in table.perfs if p.error)
                raise PlanningError(
                    f"node {node.name!r} ({node.op}) has no algorithm: it uses "
                    f"{WorkingSet.of_node(graph, node)}; {reasons or 'none is known'}"
                )
        done(node)
    return fronts


def _in_step(front: Sequence[ConvPlan], measured: float | None) -> tuple[ConvPlan, ...]:
    """Scale plans to their times within a step."""
    # The tuner times repeated kernels with their operands in the caches; the fastest
    # plan was also timed cold. Scale the others by the same ratio.
    known = fastest_of(front).time_ms
    if measured is None or not known:
        return tuple(front)
    return tuple(_scaled_to(plan, plan.time_ms * measured / known) for plan in front)


def _scaled_to(plan: ConvPlan, ms: float) -> ConvPlan:
    ratio = ms / plan.time_ms if plan.time_ms else 1.0
    steps = (replace(step, time_ms=step.time_ms * ratio) for step in plan.steps)
    return replace(plan, steps=tuple(steps))


def _kernel_times(
    graph: Graph,
    workspaces: Mapping[str, int],
    bench: ColdBench,
    done: Callable[[Node], None],
) -> tuple[dict[str, float], dict[str, float]]:
    """Return ms of each node that is no convolution, and of its recomputation."""
    times: dict[Hashable, float] = {}

    def timed(node: Node, workspace: int) -> float:
        key = signature(graph, node)
        if key not in times:
            view = node.traits.view
            times[key] = 0.0 if view else bench.node_ms(graph, node, workspace)
        return times[key]

    found, again = {}, {}
    for node in graph.nodes:
        if node.op == "conv":
            continue
        found[node.name] = timed(node, workspaces.get(node.name, 0))
        if node.recompute_node is not None:
            again[node.name] = timed(node.recompute_node, 0)
        done(node)
    return found, again


def signature(graph: Graph, node: Node) -> Hashable:
    """Return the key of a kernel's time: operation, shapes, attributes, aliasing."""
    storages = [graph.storages[name] for name in node.tensors]
    return (
        node.op,
        tuple((graph.tensors[n].shape, graph.tensors[n].dtype) for n in node.tensors),
        tuple(sorted((k, v) for k, v in node.attrs.items() if k != "seed")),
        tuple(storages.index(s) for s in storages),
    )
