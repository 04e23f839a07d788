"""The launches of a step as one graph, replayed step after step.

A graph is launched by one call, whatever is in it, so the host is no longer what a step
of small kernels waits for. What is captured is what the program calls anyway, between
one copy and the next: copies are started and waited for by the host, which may find an
error there, and a step without them is one graph as a whole. Learning rates, step
numbers and loss scales are read on the device, so a graph is right for every step.
"""

import logging
from collections.abc import Sequence
from itertools import groupby

from mucudnn.backends.base import Capture
from mucudnn.errors import MucudnnError
from mucudnn.runtime.executor.joining import joined
from mucudnn.runtime.executor.tasks import Call, Task

__all__ = ["replaying"]

logger = logging.getLogger(__name__)


def replaying(tasks: Sequence[Task], capture: Capture) -> list[Call]:
    """The calls of a program: a graph for what is between its copies."""
    calls: list[Call] = []
    for launches, part in groupby(tasks, _launches):
        own = joined(part)
        calls += [_Replayed(own, capture)] if launches and len(own) > 1 else own
    return calls


def _launches(task: Task) -> bool:
    """Whether a task only launches kernels."""
    return task.copy is None and task.waits_for is None


class _Replayed:
    """Launches that become a graph the second time they are called.

    The first time kernels are loaded and libraries make what they need; neither can be
    captured. While capturing nothing runs: what refuses leaves nothing half done, and
    is launched call by call from then on.
    """

    def __init__(self, calls: Sequence[Call], capture: Capture) -> None:
        self._calls, self._capture = tuple(calls), capture
        self._graph: Call | None = None
        self._warm = False

    def __call__(self) -> None:
        """Launch them."""
        if self._graph is None:
            if not self._warm:
                self._one_by_one()
                self._warm = True
                return
            try:
                self._graph = self._capture(self._one_by_one)
            except MucudnnError as e:
                logger.warning("the step is not replayed: %s", e)
                self._graph = self._one_by_one
        self._graph()

    def _one_by_one(self) -> None:
        for call in self._calls:
            call()
