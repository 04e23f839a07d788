"""Which nodes a library's kernels compute: those that it is measured to be faster at.

Beside a backend's own kernels there may be a library's for the same functions. Both are
timed, once for each distinct node, as a step finds them, and what they took is kept
with all measurements; the node names the library where that wins, and what is planned
and profiled afterwards is the faster one.
"""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

from mucudnn.ir.channels_last import operands_of
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.operations import LIBRARY, with_library
from mucudnn.runtime.profiling.cold_timing import ColdBench
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.step.racing import Times, raced_once, timed_within
from mucudnn.runtime.training.step.sizes import WorkingSet
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["LibraryRace"]

logger = logging.getLogger(__name__)


class LibraryRace:
    """Times both kernels of every node that has two, once.

    Args:
        tuner: Its backend computes, its cache remembers.
        budget: Within which they are measured.
        used: What it chooses by, by what was raced; it grows.
    """

    def __init__(
        self,
        tuner: Tuner,
        budget: MemoryBudget | None = None,
        used: dict[str, Times] | None = None,
    ) -> None:
        self._tuner, self._backend = tuner, tuner.backend
        self._memory = None if budget is None else budget.nbytes
        self._used = {} if used is None else used

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
        times = raced_once(
            self._tuner,
            _raced(graph, node, library.name),
            library.times_ms,
            self._used,
            partial(self._measured, graph, node),
        )
        return times is not None and times[1] < times[0]

    def _measured(self, graph: Graph, node: Node) -> Times | None:
        """What both took; None where the library has refused meanwhile."""
        library, times = self._backend.library_kernels, self.times(graph, node)
        if library is None or times is None or not library.offers(graph, node):
            return None
        logger.info(
            "%s (%s): %.3g ms by our kernel, %.3g ms by %s",
            *(node.name, node.op, *times, library.name),
        )
        return times

    def times(self, graph: Graph, node: Node) -> Times | None:
        """Milliseconds by our kernel and by the library's; None without room."""
        backend, library = self._backend, self._backend.library_kernels
        if library is None:
            return None
        scratch = backend.kernels[node.op].workspace(*operands_of(graph, node))
        size = WorkingSet.of_node(graph, node, scratch).pool_bytes
        theirs = with_library(graph.tensors, node, library.name)

        def both(bench: ColdBench) -> Times:
            ours_ms = bench.node_ms(graph, node, scratch)
            return ours_ms, bench.node_ms(graph, theirs, scratch)

        otherwise = f"{node.name} is not timed by {library.name}"
        return timed_within(backend, size, self._memory, otherwise, both)


def _raced(graph: Graph, node: Node, library: str) -> dict[str, Any]:
    """What decides the times of a node's kernels: all that they are told of it."""
    storages = [graph.storages[name] for name in node.tensors]
    inputs, outputs, attrs = operands_of(graph, node)
    return {
        "ways": ["own", library],
        "op": node.op,
        "inputs": [(spec.shape, spec.dtype, spec.layout) for spec in inputs],
        "outputs": [(spec.shape, spec.dtype, spec.layout) for spec in outputs],
        "attrs": {k: v for k, v in attrs.items() if k not in ("seed", LIBRARY)},
        "shared": [storages.index(storage) for storage in storages],
    }
