"""A captured step written anew, node by node."""

from abc import ABC, abstractmethod
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.graph import Graph, Node, TensorSpec
from mucudnn.torch.lowering.lowered import Call, Layout, Lowered

__all__ = ["Rewriting"]


class Rewriting(ABC):
    """What is written so far; it begins with the tensors and calls that there are.

    Args:
        lowered: The step, which stays as it is.
    """

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self.nodes: list[Node] = []
        self.tensors: dict[str, TensorSpec] = dict(lowered.graph.tensors)
        self.calls: dict[str, Call] = dict(lowered.calls)
        self.layouts: dict[str, Layout] = dict(lowered.layouts)

    @abstractmethod
    def write(self, node: Node) -> None:
        """Append a node, or what is in its place."""

    def rewritten(self) -> Lowered:
        """The same step by the nodes that are written."""
        graph = self._lowered.graph
        for node in graph.nodes:
            self.write(node)
        tensors = MappingProxyType(self.tensors)
        graph = Graph(tensors, tuple(self.nodes), graph.outputs)
        return replace(
            self._lowered, graph=graph, calls=self.calls, layouts=self.layouts
        )
