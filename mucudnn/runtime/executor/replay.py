"""The launches of a step as one graph, replayed step after step.

A graph is launched by one call, whatever is in it, so the host is no longer what a step
of small kernels waits for. Learning rates, step numbers and loss scales are read on the
device, so a graph is right for every step.

Copies to pinned host memory are captured with the kernels: events order both within a
graph as they do outside. A graph ends when all in it is done, so a step whose copies go
on in the next one is captured between its copies, as is one that copies to a file.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

from mucudnn.backends.base import Capture
from mucudnn.errors import MucudnnError
from mucudnn.runtime.executor.copies import Copies
from mucudnn.runtime.executor.joining import joined
from mucudnn.runtime.executor.tasks import Call, Task

__all__ = ["replaying"]

logger = logging.getLogger(__name__)


def replaying(
    tasks: Sequence[Task], capture: Capture, copies: Copies | None = None
) -> list[Call]:
    """The calls of a program: one graph, or one for what is between two copies.

    Args:
        tasks: The program.
        capture: Makes a graph.
        copies: Of the program, if they can be captured as well.
    """
    apart = partial(_between_copies, tasks, capture)
    if copies is None or all(map(_launches, tasks)):
        return apart()
    return [_Replayed([*joined(tasks), copies.settle], capture, apart)]


def _between_copies(tasks: Sequence[Task], capture: Capture) -> list[Call]:
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
    is launched otherwise from then on: call by call if nothing else is given, which is
    made only then.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        capture: Capture,
        otherwise: Callable[[], Sequence[Call]] | None = None,
    ) -> None:
        self._calls, self._capture = tuple(calls), capture
        self._otherwise = otherwise or (lambda: self._calls)
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
                self._graph = partial(_in_order, self._otherwise())
        self._graph()

    def _one_by_one(self) -> None:
        _in_order(self._calls)


def _in_order(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
