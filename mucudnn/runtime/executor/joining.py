"""Batch adjacent tasks of one operation into one launch, where the kernel can.

Updating a hundred parameters takes a hundred small launches. Adjacent ones, with no
copy and no wait between them, are passed to the kernel together. All their tensors are
resident then, as a program waits before it touches anything. Tasks that touch what
another of them writes are not batched.
"""

from collections.abc import Iterable, Sequence

from mucudnn.backends.base import Kernel, KernelArguments
from mucudnn.ir.graph import Graph, Node
from mucudnn.runtime.executor.tasks import Batchable, Call, Task

__all__ = ["batch_launches", "batchable"]


def batchable(
    graph: Graph, node: Node, kernel: Kernel, arguments: KernelArguments
) -> Batchable | None:
    """Describe how a node is batched with others; None if its kernel cannot be."""
    if kernel.together is None:
        return None
    flags = {node.inputs[i] for i in kernel.flags}
    storages = graph.storages
    reads = frozenset(storages[t] for t in node.inputs if t not in flags)
    written = (*node.outputs, *node.mutates)
    writes = frozenset(storages[t] for t in written if t not in flags)
    return Batchable(kernel, arguments, reads, writes)


def batch_launches(tasks: Iterable[Task]) -> list[Call]:
    """Return the calls of a program with adjacent launches batched."""
    calls: list[Call] = []
    run: list[Task] = []
    for task in tasks:
        if run and not _can_batch(run, task):
            calls += _launched(run)
            run = []
        run.append(task)
    return calls + _launched(run)


def _can_batch(run: Sequence[Task], task: Task) -> bool:
    """Return whether a task can be launched together with those before it."""
    new, known = task.batchable, [t.batchable for t in run]
    if new is None or known[0] is None or new.kernel is not known[0].kernel:
        return False
    return not any(
        new.writes & (old.reads | old.writes) or new.reads & old.writes
        for old in known
        if old is not None
    )


def _launched(run: Sequence[Task]) -> list[Call]:
    found = [task.batchable for task in run if task.batchable is not None]
    if len(found) < 2 or found[0].kernel.together is None:
        return [task.call for task in run]
    return [found[0].kernel.together([each.arguments for each in found])]
