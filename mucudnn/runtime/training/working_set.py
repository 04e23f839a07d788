"""What has to be on the device, all at once, while one node runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import PERSISTENT, Graph, Node
from mucudnn.ir.sizes import format_bytes
from mucudnn.ir.tensor import TensorSpec
from mucudnn.passes.liveness import ALIGNMENT, rounded

__all__ = ["WorkingSet", "largest_first"]

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


def largest_first(sizes: Mapping[str, int]) -> str:
    """`'x' (12.0 MiB), 'w' (1.0 MiB) and 3 more, 4.0 KiB`: names with their bytes."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name!r} ({format_bytes(n)})" for name, n in ordered[:_NAMED])
    if rest := [nbytes for _, nbytes in ordered[_NAMED:]]:
        text += f" and {len(rest)} more, {format_bytes(sum(rest))}"
    return text


def _scratch(name: str, nbytes: int) -> TensorSpec | None:
    return TensorSpec(name, (nbytes,), "uint8") if nbytes else None
