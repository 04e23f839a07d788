"""Memory requirements of a step by sizes alone: nothing here runs or times a kernel.

A working set is what must be on the device at once while one node runs. A size profile
stands for a measured profile where everything stays on the device: its times are all
alike, as nothing depends on them. Where convolutions are not planned yet, the plan with
most workspace is the fastest, as measuring might find.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mucudnn.backends.base import Backend
from mucudnn.errors import PlanningError
from mucudnn.ir.channels_last import operands_of
from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, PerfTable, problem_text
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.profile import Profile
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tensor import TensorSpec
from mucudnn.passes.liveness import ALIGNMENT, rounded
from mucudnn.passes.microbatch import candidate_batches, pareto_plans
from mucudnn.runtime.executor.program import kernel_of
from mucudnn.runtime.tuning.tuner import Tuner

_NO_LIMIT = 1 << 62
_MS = 1.0
_BYTES_PER_MS = 1e6
_NAMED = 8
"""Maximum number of tensors that an error names."""


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """The tensors that one node needs at once.

    Attributes:
        operands: Storages that the node touches.
        workspace: Its workspace as a tensor; None if it needs none.
    """

    operands: tuple[TensorSpec, ...]
    workspace: TensorSpec | None = None

    @classmethod
    def of_node(cls, graph: Graph, node: Node, workspace: int = 0) -> "WorkingSet":
        """Return the working set of a node with `workspace` bytes."""
        storages = dict.fromkeys(graph.storages[name] for name in node.tensors)
        operands = tuple(graph.tensors[name] for name in storages)
        return cls(operands, _scratch(f"the workspace of {node.name}", workspace))

    @classmethod
    def of_plan(cls, plan: ConvPlan) -> "WorkingSet":
        """Return the working set of a convolution plan."""
        return cls(plan.problem.operands(), _scratch("the workspace", plan.workspace))

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Operands and workspace."""
        scratch = () if self.workspace is None else (self.workspace,)
        return self.operands + scratch

    @property
    def pool_bytes(self) -> int:
        """Bytes of a pool that holds all tensors."""
        return sum(rounded(spec.nbytes, ALIGNMENT) for spec in self.tensors)

    def __str__(self) -> str:
        # Such as `'x' (12.0 MiB), 'w' (1.0 MiB) and 3 more, 4.0 KiB`.
        named = sorted(self.tensors, key=lambda spec: -spec.nbytes)
        rest = [spec.nbytes for spec in named[_NAMED:]]
        text = ", ".join(
            f"{s.name!r} ({format_bytes(s.nbytes)})" for s in named[:_NAMED]
        )
        more = f" and {len(rest)} more, {format_bytes(sum(rest))}"
        return text + more if rest else text


def kernel_workspaces(backend: Backend, graph: Graph) -> dict[str, int]:
    """Return the non-zero workspace bytes of all nodes with kernels."""
    sizes = {}
    for node in graph.nodes:
        if node.op == "conv" or node.traits.view:
            continue
        nbytes = kernel_of(backend, node).workspace(*operands_of(graph, node))
        if nbytes:
            sizes[node.name] = nbytes
    return sizes


def working_sets(
    graph: Graph, workspaces: Mapping[str, int]
) -> list[tuple[Node, WorkingSet]]:
    """Return the working set of every node that runs."""
    return [
        (node, WorkingSet.of_node(graph, node, workspaces.get(node.name, 0)))
        for node in graph.nodes
        if not node.traits.view
    ]


def measuring_bytes(backend: Backend, graph: Graph) -> int:
    """Return the minimum bytes in which a graph can be profiled."""
    sets = working_sets(graph, kernel_workspaces(backend, graph))
    return max((needed.pool_bytes for _, needed in sets), default=0)


def _scratch(name: str, nbytes: int) -> TensorSpec | None:
    return TensorSpec(name, (nbytes,), "uint8") if nbytes else None


def size_profile(
    tuner: Tuner, graph: Graph, plans: Mapping[ConvProblem, ConvPlan] | None = None
) -> Profile:
    """Return a profile of sizes.

    Micro-batches are those that the tuner would measure. A convolution without a plan
    has two: with the least and with the most workspace.
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
    """Return the plans of least and of most workspace."""
    conv, rows = tuner.backend.conv, []
    for batch in candidate_batches(problem.batch, tuner.batch_policy):
        micro, whole = problem.with_batch(batch), batch == problem.batch
        for algo, nbytes in conv.algorithms(micro):
            if tuner.numerics.refusal(conv.traits(micro, algo), whole=whole) is None:
                perf = AlgoPerf(algo=algo, batch=batch, time_ms=_MS, workspace=nbytes)
                rows.append(perf)
    front = pareto_plans(PerfTable(problem, tuple(rows)), _NO_LIMIT)
    if not front:
        raise PlanningError(f"no algorithm is usable for {problem_text(problem)}")
    # The row with the most workspace might turn out to be the fastest: assume so.
    most = max(rows, key=lambda row: row.workspace)
    if most.workspace <= front[0].workspace:
        return front[:1]
    fastest = replace(most, batch=problem.batch, time_ms=front[0].time_ms / 2)
    return front[0], ConvPlan(problem, (fastest,))
