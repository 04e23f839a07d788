"""Capture the launches of a step as one graph, and replay it in later steps.

One call launches a graph of any size, so a step of small kernels is no longer limited
by the host. Learning rates, step numbers and loss scales are read on the device, so the
same graph is valid for every step.

Copies to pinned host memory are captured with the kernels: events order both as they do
outside of a graph. A graph ends when everything in it is done, so a step whose copies
continue in the next one is captured in parts, between its copies; likewise a step that
copies to a file.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

from mucudnn.backends.base import Capture
from mucudnn.errors import MucudnnError
from mucudnn.runtime.executor.copies import Copies
from mucudnn.runtime.executor.joining import batch_launches
from mucudnn.runtime.executor.tasks import Call, Task

__all__ = ["replaying"]

logger = logging.getLogger(__name__)


def replaying(
    tasks: Sequence[Task], capture: Capture, copies: Copies | None = None
) -> list[Call]:
    """Return the calls of a program: one graph, or one between each two copies.

    `copies` are those of the program, if they can be captured as well.
    """
    apart = partial(_between_copies, tasks, capture)
    if copies is None or all(map(_launches, tasks)):
        return apart()
    return [_Replayed([*batch_launches(tasks), copies.settle], capture, apart)]


def _between_copies(tasks: Sequence[Task], capture: Capture) -> list[Call]:
    calls: list[Call] = []
    for launches, part in groupby(tasks, _launches):
        own = batch_launches(part)
        calls += [_Replayed(own, capture)] if launches and len(own) > 1 else own
    return calls


def _launches(task: Task) -> bool:
    """Return whether a task only launches kernels."""
    return task.copy is None and task.waits_for is None


class _Replayed:
    """Launches that are captured as a graph the second time they are called.

    The first time, kernels are loaded and libraries initialize, which cannot be
    captured. Nothing runs while capturing, so a refused capture leaves nothing half
    done. From then on `otherwise` is called instead, or the launches one by one.
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
        if self._graph is None:
            if not self._warm:
                self._launch_all()
                self._warm = True
                return
            try:
                self._graph = self._capture(self._launch_all)
            except MucudnnError as e:
                logger.warning("the step is not replayed: %s", e)
                self._graph = partial(_in_order, self._otherwise())
        self._graph()

    def _launch_all(self) -> None:
        _in_order(self._calls)


def _in_order(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
