"""A profile of sizes alone, for a step that is not measured.

What a step needs follows from what its kernels ask for, and they can be asked without
running. Times are made up, all alike: where everything stays on the device, nothing
depends on them. Where convolutions are not planned yet, the plan that takes most memory
is the fastest, as it might turn out to be.
"""

from collections.abc import Iterator
from dataclasses import replace

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, PerfTable
from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.passes.microbatch import candidate_batches, pareto_plans
from mucudnn.runtime.training.step_graphs import Plans
from mucudnn.runtime.training.working_set import kernel_workspaces
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["sketch"]

_NO_LIMIT = 1 << 62
_MS = 1.0
_BYTES_PER_MS = 1e6


def sketch(tuner: Tuner, graph: Graph, plans: Plans | None = None) -> Profile:
    """Sizes of a graph's workspaces.

    Args:
        tuner: Whose backend would run it, with micro-batches as it would.
        graph: Of a step.
        plans: Of its convolutions; if not given, the least and the most that any plan
            takes.

    Raises:
        PlanningError: A convolution has no algorithm.
        UnsupportedError: The backend has no kernel for an operation.
    """
    known: dict[ConvProblem, tuple[ConvPlan, ...]] = {
        problem: (plan,) for problem, plan in (plans or {}).items()
    }
    fronts: dict[str, tuple[ConvPlan, ...]] = {}
    for node in graph.nodes:
        if node.op == "conv":
            problem = node.attrs["problem"]
            if problem not in known:
                known[problem] = _extremes(tuner, problem)
            fronts[node.name] = known[problem]
    return Profile(
        node_ms=dict.fromkeys((node.name for node in graph.nodes), _MS),
        workspaces=kernel_workspaces(tuner.backend, graph),
        fronts=fronts,
        out_bytes_per_ms=_BYTES_PER_MS,
        in_bytes_per_ms=_BYTES_PER_MS,
    )


def _extremes(tuner: Tuner, problem: ConvProblem) -> tuple[ConvPlan, ...]:
    """The plan of least workspace, and one with as much as any may ask for."""
    rows = tuple(_rows(tuner, problem))
    front = pareto_plans(PerfTable(problem, rows), _NO_LIMIT)
    if not front:
        raise PlanningError(f"no algorithm is usable for {problem}")
    most = max(rows, key=lambda row: row.workspace)
    if most.workspace <= front[0].workspace:
        return front[:1]
    fastest = replace(most, batch=problem.batch, time_ms=front[0].time_ms / 2)
    return front[0], ConvPlan(problem, (fastest,))


def _rows(tuner: Tuner, problem: ConvProblem) -> Iterator[AlgoPerf]:
    """What a sweep would measure, in made-up times."""
    conv = tuner.backend.conv
    for batch in candidate_batches(problem.batch, tuner.batch_policy):
        micro, whole = problem.with_batch(batch), batch == problem.batch
        for algo, nbytes in conv.algorithms(micro):
            traits = conv.traits(micro, algo)
            if tuner.numerics.refusal(traits, whole=whole) is None:
                yield AlgoPerf(algo=algo, batch=batch, time_ms=_MS, workspace=nbytes)
