"""Choose between a backend's own kernels and a library's by measurement.

Both are timed once per distinct node with cold caches, and the times are cached with
all measurements. Where the library wins, the node names it, and planning and profiling
use its kernel.
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
    """Times our kernel and the library's of each node that has both, once.

    The times by which choices were made are added to `used`.
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
        """Return the graph with nodes marked where the library is faster."""
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
        """Return whether the library computes a node, and faster.

        The library cannot overwrite its input, where our kernel may, and no other
        kernel of ours recomputes its result bit for bit. So within a budget, nodes
        planned with either stay ours.
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
        """Return both times; None where the library has refused meanwhile."""
        library, times = self._backend.library_kernels, self.times(graph, node)
        if library is None or times is None or not library.offers(graph, node):
            return None
        logger.info(
            "%s (%s): %.3g ms by our kernel, %.3g ms by %s",
            *(node.name, node.op, *times, library.name),
        )
        return times

    def times(self, graph: Graph, node: Node) -> Times | None:
        """Return ms of our kernel and of the library's; None without room."""
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
    """Return everything that determines a node's times, as the key of the race."""
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
