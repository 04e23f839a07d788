"""Batch norms that weigh their statistics by a count of batches, `momentum=None`.

The weight is one over the count, another number in every step, and PyTorch's function
takes a number, not a tensor. So it is recorded with a mark in the number's place, a
number that nothing else has. When the step is recorded, every mark gives way to what
computes the number from the count as it is then.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from mucudnn.torch.capture.reads import ReadRecorder

__all__ = ["CountedAverages", "average_weight"]

_FIRST = 0.6180339887498949
_STEP = 2.0**-40


def average_weight(count: int) -> float:
    """What the newest of so many batches counts in their mean."""
    return 1.0 / float(max(1, count))


class CountedAverages:
    """The batch norms of a model that count, while a step is recorded.

    Args:
        model: Whose they are.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._norms = {
            id(module): module
            for module in model.modules()
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
            and module.momentum is None
            and module.training
            and module.track_running_stats
        }
        self._marks: dict[float, torch.nn.Module] = {}
        self._counts: dict[float, torch.fx.Node] = {}

    @contextmanager
    def marked(self, recorder: ReadRecorder) -> Iterator[None]:
        """Each has a momentum of its own, which `called` knows.

        Args:
            recorder: Is told, so that the marks are no state of the user's.
        """
        self._marks = {_mark(i): norm for i, norm in enumerate(self._norms.values())}
        self._counts = {}
        for mark, norm in self._marks.items():
            label = f"{type(norm).__name__}.momentum"
            recorder.lend(vars(norm), "momentum", label)
            norm.momentum = mark
        try:
            yield
        finally:
            for norm in self._marks.values():
                norm.momentum = None

    def called(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        """Arguments of `functional.batch_norm`; a mark of this call if it counts.

        A model may call one of them several times in a step.
        """
        norm = self._marks.get(named.get("momentum", 0.0))
        if norm is None:
            return named
        mark = _mark(len(self._marks) + len(self._counts))
        count = norm.num_batches_tracked.item()
        tracer = get_proxy_mode().tracer
        self._counts[mark] = get_proxy_slot(count, tracer).force().node
        return {**named, "momentum": mark}

    def written(self, graph: torch.fx.Graph) -> None:
        """Put what computes a number in the place of its mark, in a recorded step."""
        for node in list(graph.nodes) if self._counts else ():
            marks = [a for a in node.args if isinstance(a, float) and a in self._counts]
            for mark in marks:
                with graph.inserting_before(node):
                    weight = graph.call_function(average_weight, (self._counts[mark],))
                weight.meta["val"] = mark
                node.args = tuple(weight if a == mark else a for a in node.args)


def _mark(number: int) -> float:
    return _FIRST + number * _STEP
