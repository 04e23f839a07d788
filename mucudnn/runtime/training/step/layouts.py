"""Choose the memory layout of a network's images: as configured, or by measurement."""

import logging

from mucudnn.arguments import one_of
from mucudnn.errors import OutOfMemoryError
from mucudnn.ir.channels_last import AUTO, LAYOUT_CHOICES
from mucudnn.ir.conv import Direction
from mucudnn.ir.graph import Graph
from mucudnn.passes.graph.layouts.channels_last import able, with_channels_last
from mucudnn.passes.graph.layouts.choice import cheapest_layouts, stored
from mucudnn.passes.graph.layouts.trials import layout_trials
from mucudnn.runtime.profiling.profiler import OnNode, profile
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["Layouts"]

logger = logging.getLogger(__name__)


class Layouts:
    """Stores a network's images channels first, channels last, or mixed.

    `layout` is one of `LAYOUT_CHOICES`; the other arguments are for measuring `auto`.
    """

    def __init__(
        self,
        layout: str,
        tuner: Tuner,
        budget: MemoryBudget | None,
        progress: OnNode | None,
    ) -> None:
        self._layout = one_of("layout", layout, LAYOUT_CHOICES)
        self._tuner, self._budget, self._progress = tuner, budget, progress

    def __call__(self, graph: Graph, trains: bool) -> Graph:
        """Return a forward graph, which has its channels first, in the layout.

        Where `auto` cannot be measured within the budget, channels stay first.
        """
        measured = self._layout == AUTO
        return stored(
            graph, self._layout, self._fastest(graph, trains) if measured else None
        )

    def _fastest(self, graph: Graph, trains: bool) -> frozenset[str]:
        trials = layout_trials(graph, self._possible(graph), trains=trains)
        memory = None if self._budget is None else self._budget.nbytes
        try:
            times = profile(
                self._tuner, trials.graph, memory=memory, progress=self._progress
            )
        except OutOfMemoryError as e:
            logger.warning("layouts are not compared, channels come first: %s", e)
            return frozenset()
        return cheapest_layouts(graph, trials.costs(times.node_ms))

    def _possible(self, graph: Graph) -> frozenset[str]:
        """Return nodes that can run channels last, gradients included."""
        conv = self._tuner.backend.conv
        last = with_channels_last(graph, nodes := able(graph))
        without = {
            node.name
            for node in last.nodes
            if node.name in nodes and node.traits.convolution
            for way in Direction
            if not conv.algorithms(node.attrs["problem"].with_direction(way))
        }
        return nodes - without
