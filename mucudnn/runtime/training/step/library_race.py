"""Which nodes a library's kernels compute: those that it is measured to be faster at.

Beside a backend's own kernels there may be a library's for the same functions. Both are
timed, once for each distinct node, as a step finds them; the node names the library
where that wins, and what is planned and profiled afterwards is the faster one.
"""

import logging
from dataclasses import replace

from mucudnn.ir.channels_last import operands_of
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.operations import with_library
from mucudnn.runtime.profiling.cold_timing import ColdBench
from mucudnn.runtime.profiling.profiler import signature
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.step.racing import timed_within
from mucudnn.runtime.training.step.sizes import WorkingSet
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["LibraryRace"]

logger = logging.getLogger(__name__)


class LibraryRace:
    """Times both kernels of every node that has two, once in a process.

    Args:
        tuner: Its backend computes.
        budget: Within which they are measured.
    """

    def __init__(self, tuner: Tuner, budget: MemoryBudget | None = None) -> None:
        self._backend = tuner.backend
        self._memory = None if budget is None else budget.nbytes

    def __call__(self, graph: Graph) -> Graph:
        """The graph, its nodes naming the library where its kernel is the faster."""
        library = self._backend.library_kernels
        if library is None:
            return graph
        nodes = tuple(
            with_library(graph.tensors, node, library.name)
            if self.wins(graph, node)
            else node
            for node in graph.nodes
        )
        return replace(graph, nodes=nodes)

    def wins(self, graph: Graph, node: Node) -> bool:
        """Whether the library computes a node, and faster.

        It needs memory of its own for a result that our kernel may write over what it
        reads, and another of our kernels cannot make its result again, bit for bit. So
        within a budget nodes that either is planned with stay ours.
        """
        library, traits = self._backend.library_kernels, node.traits
        saving = bool(traits.overwrites) or traits.again is not None
        if library is None or (saving and self._memory is not None):
            return False
        if not library.offers(graph, node):
            return False
        key = signature(graph, node)
        if key not in library.faster:
            times = self.times(graph, node)
            if times is None or not library.offers(graph, node):  # it has refused
                return False
            logger.info(
                "%s (%s): %.3g ms by our kernel, %.3g ms by %s",
                *(node.name, node.op, *times, library.name),
            )
            library.faster[key] = times[1] < times[0]
        return library.faster[key]

    def times(self, graph: Graph, node: Node) -> tuple[float, float] | None:
        """Milliseconds by our kernel and by the library's; None without room."""
        backend, library = self._backend, self._backend.library_kernels
        if library is None:
            return None
        scratch = backend.kernels[node.op].workspace(*operands_of(graph, node))
        size = WorkingSet.of_node(graph, node, scratch).pool_bytes
        theirs = with_library(graph.tensors, node, library.name)

        def both(bench: ColdBench) -> tuple[float, float]:
            ours_ms = bench.node_ms(graph, node, scratch)
            return ours_ms, bench.node_ms(graph, theirs, scratch)

        otherwise = f"{node.name} is not timed by {library.name}"
        return timed_within(backend, size, self._memory, otherwise, both)
