"""Turn a graph into the plainest schedule: everything stays until its last use."""

from collections import defaultdict
from collections.abc import Mapping

from mucudnn.ir.graph import PERSISTENT, Graph
from mucudnn.ir.schedule import Alloc, Compute, Free, Instruction, Schedule
from mucudnn.passes.liveness import live_ranges, peak_bytes

__all__ = ["keep_all"]


def keep_all(graph: Graph, workspaces: Mapping[str, int] | None = None) -> Schedule:
    """Allocate each storage before its first use and free it after its last.

    Persistent tensors are allocated outside of a step, but count in the peak. What
    lives to the end (see `liveness.kept`) is not freed: the caller takes it out.

    Args:
        graph: What is run.
        workspaces: Node -> bytes of scratch memory while it runs.
    """
    begins: defaultdict[int, list[Instruction]] = defaultdict(list)
    ends: defaultdict[int, list[Instruction]] = defaultdict(list)
    for name, live in live_ranges(graph).items():
        if graph.tensors[name].role not in PERSISTENT:
            begins[live.first].append(Alloc(name))
            ends[live.last].append(Free(name))
    instructions = list(begins.pop(0, ()))
    for position, node in enumerate(graph.nodes):
        instructions += begins[position]
        instructions.append(Compute(node.name))
        instructions += ends[position]
    return Schedule(
        graph,
        tuple(instructions),
        dict(workspaces or {}),
        peak_bytes(graph, workspaces),
    )
