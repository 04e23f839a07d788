"""Neighbouring tasks of one operation as one launch, where its kernel can.

Updates of a hundred parameters are a hundred small launches. Those that nothing comes
between, no copy and no wait, are handed to the kernel together; what is resident is
then all there, for a program waits before it touches anything. Tasks that touch what
another of them writes stay apart.
"""

from collections.abc import Iterable, Sequence

from mucudnn.backends.base import Kernel, KernelArguments
from mucudnn.ir.graph import Graph, Node
from mucudnn.runtime.executor.tasks import Call, Joinable, Task

__all__ = ["joinable", "joined"]


def joinable(
    graph: Graph, node: Node, kernel: Kernel, arguments: KernelArguments
) -> Joinable | None:
    """How a node is launched with others; None where its kernel cannot."""
    if kernel.together is None:
        return None
    flags = {node.inputs[i] for i in kernel.flags}
    storages = graph.storages
    reads = frozenset(storages[t] for t in node.inputs if t not in flags)
    written = (*node.outputs, *node.mutates)
    writes = frozenset(storages[t] for t in written if t not in flags)
    return Joinable(kernel, arguments, reads, writes)


def joined(tasks: Iterable[Task]) -> list[Call]:
    """The calls of a program, with fewer launches."""
    calls: list[Call] = []
    run: list[Task] = []
    for task in tasks:
        if run and not _joins(run, task):
            calls += _launched(run)
            run = []
        run.append(task)
    return calls + _launched(run)


def _joins(run: Sequence[Task], task: Task) -> bool:
    """Whether a task can be launched with those before it."""
    new, known = task.joinable, [t.joinable for t in run]
    if new is None or known[0] is None or new.kernel is not known[0].kernel:
        return False
    return not any(
        new.writes & (old.reads | old.writes) or new.reads & old.writes
        for old in known
        if old is not None
    )


def _launched(run: Sequence[Task]) -> list[Call]:
    found = [task.joinable for task in run if task.joinable is not None]
    if len(found) < 2 or found[0].kernel.together is None:
        return [task.call for task in run]
    return [found[0].kernel.together([each.arguments for each in found])]
