"""What has to be on the device, all at once, while one node runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from mucudnn.backends.base import Backend, Kernel
from mucudnn.errors import UnsupportedError
from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT, Graph, Node
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tensor import TensorSpec
from mucudnn.passes.liveness import ALIGNMENT, rounded

__all__ = [
    "WorkingSet",
    "kernel_of",
    "kernel_workspaces",
    "largest_first",
    "measuring_bytes",
    "working_sets",
]

_NAMED = 8


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """The tensors of a node.

    Attributes:
        operands: Storages that it touches.
        workspace: Its scratch memory as a tensor; None if it needs none.
    """

    operands: tuple[TensorSpec, ...]
    workspace: TensorSpec | None = None

    @classmethod
    def of_node(cls, graph: Graph, node: Node, workspace: int = 0) -> "WorkingSet":
        """Of a node whose kernel asks for so many bytes of workspace."""
        storages = dict.fromkeys(graph.storages[name] for name in node.tensors)
        operands = tuple(graph.tensors[name] for name in storages)
        return cls(operands, _scratch(f"the workspace of {node.name}", workspace))

    @classmethod
    def of_plan(cls, plan: ConvPlan) -> "WorkingSet":
        """Of a convolution that runs by a plan."""
        return cls(plan.problem.operands(), _scratch("the workspace", plan.workspace))

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All of it."""
        return (
            self.operands
            if self.workspace is None
            else (*self.operands, self.workspace)
        )

    @property
    def pool_bytes(self) -> int:
        """Bytes of a pool that holds it, whatever was there before."""
        return sum(rounded(spec.nbytes, ALIGNMENT) for spec in self.tensors)

    def within_a_step(self) -> "WorkingSet":
        """The same without what outlives a step: that has memory of its own."""
        kept = tuple(spec for spec in self.operands if spec.role not in PERSISTENT)
        return WorkingSet(kept, self.workspace)

    def __str__(self) -> str:
        return largest_first({spec.name: spec.nbytes for spec in self.tensors})


def kernel_of(backend: Backend, node: Node) -> Kernel:
    """What runs a node that is neither a convolution nor a view.

    Raises:
        UnsupportedError: The backend has nothing that does.
    """
    kernel = backend.kernels.get(node.op)
    if kernel is None:
        raise UnsupportedError(
            f"backend {backend.name!r} has no kernel for {node.op!r} ({node.name})"
        )
    return kernel


def kernel_workspaces(backend: Backend, graph: Graph) -> dict[str, int]:
    """Bytes of scratch memory of every node that has a kernel and asks for some.

    Raises:
        UnsupportedError: The backend has no kernel for an operation.
    """
    sizes = {}
    for node in graph.nodes:
        if node.op == "conv" or node.traits.view:
            continue
        inputs = [graph.tensors[name] for name in node.inputs]
        outputs = [graph.tensors[name] for name in node.outputs]
        nbytes = kernel_of(backend, node).workspace(inputs, outputs, node.attrs)
        if nbytes:
            sizes[node.name] = nbytes
    return sizes


def working_sets(
    graph: Graph, workspaces: Mapping[str, int]
) -> list[tuple[Node, WorkingSet]]:
    """Nodes that run, and what each of them uses at once."""
    return [
        (node, WorkingSet.of_node(graph, node, workspaces.get(node.name, 0)))
        for node in graph.nodes
        if not node.traits.view
    ]


def measuring_bytes(backend: Backend, graph: Graph) -> int:
    """The least memory that a graph can be profiled in.

    Raises:
        UnsupportedError: The backend has no kernel for an operation.
    """
    sets = working_sets(graph, kernel_workspaces(backend, graph))
    return max((needed.pool_bytes for _, needed in sets), default=0)


def largest_first(sizes: Mapping[str, int]) -> str:
    """`'x' (12.0 MiB), 'w' (1.0 MiB) and 3 more, 4.0 KiB`: names with their bytes."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name!r} ({format_bytes(n)})" for name, n in ordered[:_NAMED])
    if rest := [nbytes for _, nbytes in ordered[_NAMED:]]:
        text += f" and {len(rest)} more, {format_bytes(sum(rest))}"
    return text


def _scratch(name: str, nbytes: int) -> TensorSpec | None:
    return TensorSpec(name, (nbytes,), "uint8") if nbytes else None
